"""A spec that is corrected before the job has started is what the job runs with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regroup_operator.api import parse_job, worker_digest
from tests.builders.plan import make_job
from tests.simulator.world import World


def change(world: World, spec_change: Any) -> str:
    """Change the spec as a user would; return the digest that every pod must have then."""
    world.store.change_spec(spec_change)
    world.dirty()
    return worker_digest(parse_job(world.store.read()))


def image(spec: dict[str, Any]) -> None:
    spec["template"]["spec"]["containers"][0]["image"] = "example/trainer:2"


def image_and_two(spec: dict[str, Any]) -> None:
    image(spec)
    spec["replicas"] = 2


def test_pods_whose_image_cannot_be_pulled_are_made_anew_when_it_is_corrected(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    world.pods.pending = {0, 1}
    world.start_operator()
    world.settle()
    wrong = set(world.pods.by_uid)
    world.pods.pending = set()
    digest = change(world, image)
    world.until(lambda: world.status.get("phase") == "Running")
    assert set(world.pods.deleted) == wrong
    assert {pod.spec_digest for pod in world.pods.by_uid.values()} == {digest}
    assert sorted(pod.attempt for pod in world.pods.by_uid.values()) == [1, 1]


@pytest.mark.parametrize(
    ("spec_change", "replicas"),
    [
        pytest.param(image_and_two, 2, id="another image"),
        pytest.param(lambda spec: spec.update(replicas=2), 2, id="a smaller fixed size"),
        pytest.param(lambda spec: spec.update(replicas=4), 4, id="a larger fixed size"),
    ],
)
def test_workers_that_wait_ready_are_no_members_once_the_spec_has_changed(
    tmp_path: Path, spec_change: Any, replicas: int
) -> None:
    """Slots 0 and 1 are ready: with two replicas they would be the first generation at once."""
    world = World(tmp_path, make_job().with_replicas(3).fixed(), start=False)
    world.pods.pending = {2}
    world.start_operator()
    world.settle()
    world.pods.pending = set()
    digest = change(world, spec_change)
    world.until(lambda: world.status.get("phase") == "Running")
    assert {pod.spec_digest for pod in world.pods.by_uid.values()} == {digest}
    assert world.status["membership"]["worldSize"] == replicas
    assert world.status["membership"]["members"] == ",".join(f"{slot}.1" for slot in range(min(3, replicas))) + (
        ",3" if replicas == 4 else ""
    )


def test_what_kind_of_script_the_old_template_had_is_forgotten(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2).fixed(), known_session=True, start=False)
    world.pods.pending = {1}
    world.start_operator()
    world.until(lambda: world.status.get("tier") == "Session")
    world.pods.pending, world.script, world.known_session = set(), "plain", False
    change(world, image)
    world.until(lambda: world.status.get("phase") == "Running")
    assert world.status["tier"] == "Script"


def test_nothing_happens_to_a_job_that_has_started(tmp_path: Path) -> None:
    """No API server here: the rule that refuses it is tests/api's. The plan, too, leaves running pods alone."""
    world = World(tmp_path, make_job().with_replicas(2))
    world.until(lambda: world.status.get("phase") == "Running")
    pods = set(world.pods.by_uid)
    change(world, lambda spec: spec.update(recovery={"disconnectSeconds": 9}))
    world.advance(30, step_every_s=1.0)
    assert (set(world.pods.by_uid), world.pods.deleted) == (pods, [])
