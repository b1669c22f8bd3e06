"""Every field of the status is written: one that never is would be a promise in the CRD that nobody keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regroup_operator.api import parse_status
from regroup_operator.api.crd import object_schema
from tests.builders.jobs import role
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.world import World

ELSEWHERE = {
    "status.exitCode",  # of a job that has failed: test_ended.py
    "status.failedPod",
    "status.endTakenBack",  # tests/unit/plan/test_finishing.py
    *(f"status.endTakenBack.{name}" for name in ("at", "generation", "step")),
    "status.lastGoodSize",  # tier Script: test_refused_size.py
    "status.refusedSize",
    "status.refusedSizes",
    *(f"status.refusedSizes.{name}" for name in ("at", "workers")),
    *(f"status.refusedSize.{name}" for name in ("at", "backTo", "generation", "message", "wanted", "workers")),
    "status.incidents.startMs",  # tier Script: test_change.py
    "status.restarts.exits.generation",  # tier Script: tests/unit/plan/test_exits.py
    "status.checkpoint",
    *(f"status.checkpoint.{name}" for name in ("at", "directory", "generation", "kept", "step")),
    "status.incidents.firstStepMs",
    "status.incidents.stepsRedone",
    "status.memorySnapshot",
    "status.memorySnapshot.step",
    *(
        f"status.progress.{name}" for name in ("optimizerSteps", "percent", "remainingSeconds", "source")
    ),  # test_script_words.py
    "status.progress.noiseScale",
    "status.progress.samplesPerSecond",
    "status.progress.stepTime",
    "status.resumedFrom",
    *(f"status.resumedFrom.{name}" for name in ("digest", "path", "step")),
}
"""What the trainers of this world, which use the library and have no tensors, do not report; tests/unit/plan holds that it is
passed on."""


def declared(node: dict[str, Any], at: str = "status") -> Iterator[str]:
    for name, child in node.get("properties", {}).items():
        yield f"{at}.{name}"
        yield from declared(child.get("items", child), f"{at}.{name}")


def written(value: Any, at: str = "status") -> Iterator[str]:
    """An empty list says nothing about its field."""
    if isinstance(value, dict):
        for name, child in value.items():
            if child != []:
                yield f"{at}.{name}"
            yield from written(child, f"{at}.{name}")
    elif isinstance(value, list):
        for child in value:
            yield from written(child, at)


class Reader(World):
    """Remembers every field that was ever written."""

    def __init__(self, tmp_path: Path, job: JobBuilder, **given: Any) -> None:
        self.found: set[str] = set()
        super().__init__(tmp_path, job, **given)

    def _wrote(self, status: dict[str, Any]) -> None:
        assert parse_status({"status": status}).to_dict() == status, "the next operator writes what it has read"
        self.found.update(written(status))
        super()._wrote(status)


def test_every_field_is_written_in_the_life_of_a_job(tmp_path: Path) -> None:
    rules = [{"action": "Ignore", "signals": ["SIGKILL"]}]
    job = make_job().with_replicas(3).with_recovery(hangSeconds=5, onExit=rules)
    policy = {"minReplicas": 1, "maxReplicas": 5, "growthCooldownSeconds": 1}
    roles = [role(), role("eval"), role("report") | {"requiredForCompletion": True}]
    world = Reader(tmp_path, job.with_spec(elasticPolicy=policy, roles=roles), total_steps=80)
    world.advance(12, step_every_s=0.5)
    world.pods.end_role("digits-eval-0-0", phase="Succeeded")
    world.pods.end_role("digits-board-0-0", phase="Pending", waiting_reason="ErrImagePull")
    world.vanish(sorted(world.pods.by_uid)[1])
    world.advance(5, step_every_s=0.5)
    world.kill_process(sorted(world.agents)[0])
    world.advance(5, step_every_s=0.5)
    for uid in sorted(world.agents)[:2]:
        world.kill_process(uid, code=3)  # within a second, and no rule ignores it
    world.advance(5, step_every_s=0.5)
    next(t for a in world.agents.values() for t in a.trainers.values() if t.group is not None).frozen = True
    world.advance(8, step_every_s=0.5)
    world.scale(1)
    world.advance(5, step_every_s=0.5)
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended", step_every_s=0.5)
    world.suspend(False)
    world.until(lambda: world.phase == "Completing", step_every_s=0.5)
    world.pods.end_role("digits-report-0-0", phase="Succeeded")
    world.until(lambda: world.phase == "Succeeded", step_every_s=0.5)
    assert set(declared(object_schema()["properties"]["status"])) - world.found == ELSEWHERE
