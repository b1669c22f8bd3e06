"""What the API server says of a job's pods: verdicts become conditions and events, trouble becomes another try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regroup_operator.api import SpecError, UnavailableError
from regroup_operator.model.ports import AlreadyExists
from tests.builders.plan import make_job
from tests.unit.controller.world import World


def say(world: World, method: str, error: Exception | None, slots: set[int] | None = None) -> list[tuple[Any, ...]]:
    """Have a method of the Workers port raise (for some slots); return the list of its calls."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(type(world.pods), method)

    async def call(*args: Any) -> None:
        calls.append(args[1:])
        if error is not None and (slots is None or args[1] in slots):
            raise error
        await real(world.pods, *args)

    setattr(world.pods, method, call)
    return calls


def test_template_that_is_refused_makes_no_pod_and_is_tried_again_when_it_changes(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    calls = say(world, "validate", SpecError("spec.template is not a pod: no.", reason="InvalidTemplate"))
    world.start_operator()
    world.advance(60)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"], accepted["message"]) == (
        "False", "InvalidTemplate", "spec.template is not a pod: no.",
    )  # fmt: skip
    assert (world.names(), len(calls), [n.reason for n in world.notes]) == ([], 1, ["InvalidTemplate"])
    assert world.status["summary"]["state"] == "InvalidTemplate"
    say(world, "validate", None)
    world.scale(3)
    world.advance(0.1)
    assert (world.condition("Accepted")["status"], world.phase) == ("True", "Running")


def test_name_that_is_taken_is_a_verdict_until_it_is_free(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    say(world, "prepare", SpecError("Service digits exists and is not this job's.", reason="NameTaken"))
    world.start_operator()
    world.settle()
    assert (world.condition("Accepted")["reason"], world.names()) == ("NameTaken", [])
    say(world, "prepare", None)
    world.advance(world.settings.resync_s)
    assert world.phase == "Running"


def test_template_of_a_started_job_is_not_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2))
    world.advance(0.1)
    calls = say(world, "validate", SpecError("A newer rule.", reason="InvalidTemplate"))
    world.scale(3)
    world.advance(3, step_every_s=0.1)
    assert (calls, world.members) == ([], "0-2")


@pytest.mark.parametrize(
    ("error", "noted"),
    [
        pytest.param(UnavailableError("The API server does not answer."), False, id="trouble is not told to the user"),
        pytest.param(SpecError("No.", reason="PodSecurity"), True, id="a refusal is"),
    ],
)
def test_failed_creation_holds_up_no_other_and_is_raised_for_the_back_off(
    tmp_path: Path, error: Exception, noted: bool
) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    calls = say(world, "create", error, {0})
    operator = world.start_operator()
    with pytest.raises(type(error)):
        world.reconcile(operator)
    assert [slot for slot, *_ in calls] == [0, 1]
    assert world.names() == ["1-0"]
    assert bool(world.notes) == noted


def test_deletion_comes_before_creation(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 5))
    world.advance(0.1)
    order: list[str] = []
    for method in ("create", "delete"):
        real = getattr(type(world.pods), method)

        async def call(*args: Any, method: str = method, real: Any = real) -> None:
            order.append(method)
            await real(world.pods, *args)

        setattr(world.pods, method, call)
    uid = world.uid(1)
    world.power_off(uid)
    world.cut_off(uid)
    world.advance(7, step_every_s=None)
    world.node_not_ready(uid)
    world.advance(5, step_every_s=0.1)
    assert order == ["create", "delete"]
    assert world.members == "0,1.1"


def test_name_of_a_pod_that_is_going_is_not_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(1), start=False)
    real = type(world.pods).create

    async def create(job: Any, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> None:
        if attempt < 2:
            raise AlreadyExists(f"Pod digits-worker-{slot}-{attempt} is still terminating.")
        await real(world.pods, job, slot, attempt, avoid_nodes)

    world.pods.create = create  # type: ignore[method-assign]
    world.start_operator()
    world.advance(0.1)
    assert (world.names(), world.members) == (["0-2"], "0.2")
