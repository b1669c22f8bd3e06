"""What a job under `regroup run` shows: its end, after which a fault hits nothing, and a checkpoint that is being written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from chaos.job import JobError, NothingToHitError
from chaos.kinds import SCRIPT, SESSION
from chaos.local import LocalJob
from chaos.plan import FINISHING, SETTLED, SHAPES, Fault, Scenario
from chaos.signals import Agent


@pytest.mark.parametrize(
    ("phase", "error"), [("Succeeded", NothingToHitError), ("Failed", NothingToHitError), (None, JobError)]
)
def test_resize_of_a_job_that_has_ended(tmp_path: Path, phase: str | None, error: type[Exception]) -> None:
    job = LocalJob(Scenario(SESSION, 1, 2, 1), tmp_path, 10, needs_disk=False)
    if phase:
        job.state.mkdir()
        (job.state / "job.json").write_text(json.dumps({"spec": {"replicas": 2}, "status": {"phase": phase}}))
    with pytest.raises(error, match=phase or "holds no job"):
        job.scale(1)


class Idle(LocalJob):
    """A job that has no processes."""

    def agents(self) -> list[Agent]:
        return []


class Resized(LocalJob):
    """A job of which only the sizes are seen that it is asked for."""

    def __init__(self, scenario: Scenario, directory: Path, steps: int, *, needs_disk: bool) -> None:
        super().__init__(scenario, directory, steps, needs_disk=needs_disk)
        self.sizes: list[int] = []

    def scale(self, workers: int) -> None:
        self.sizes.append(workers)


@pytest.mark.parametrize(
    ("number", "wanted", "size"),
    [pytest.param(0, 4, 2), pytest.param(2, 4, 6), pytest.param(2, 6, 4)],
)
def test_resize_is_by_whole_groups(tmp_path: Path, number: int, wanted: int, size: int) -> None:
    job = Resized(Scenario(SESSION, 1, 4, 2, SHAPES[1]), tmp_path, 10, needs_disk=False)
    job.wanted = wanted
    job.inject(Fault("scale", SETTLED, 0.0, 0.0, 0.0, number, False))
    assert job.sizes == [size]


def test_command_of_a_split_job(tmp_path: Path) -> None:
    words = LocalJob(Scenario(SESSION, 1, 4, 2, SHAPES[1]), tmp_path, 10, needs_disk=False).command()
    assert words[words.index("--workers-per-group") + 1] == "2"
    assert words[words.index("--max") + 1] == "6"
    assert words[-1].endswith("split.py")


@pytest.mark.parametrize(
    ("kind", "saved", "tier", "workers_per_group", "why"),
    [
        pytest.param(
            "damage-checkpoint", 10, SESSION, 1, "in the newest checkpoint only", id="the checkpoint of the last step"
        ),
        pytest.param("kill-all", 8, SESSION, 1, "in no checkpoint", id="a last step that was not saved"),
        pytest.param("kill-all", None, SESSION, 1, "in no checkpoint", id="a job without a checkpoint"),
        pytest.param("kill-all", 10, SESSION, 1, "no trainer process runs", id="a process whose script can run again"),
        pytest.param("kill-all", None, SCRIPT, 1, "no trainer process runs", id="a script with its own checkpoint"),
        pytest.param("kill-all", 8, SESSION, 2, "no trainer process runs", id="members that go back together"),
    ],
)
def test_after_the_last_step_nothing_is_hit_that_would_rightly_fail_the_job(
    tmp_path: Path, kind: str, saved: int | None, tier: str, workers_per_group: int, why: str
) -> None:
    shape = SHAPES[1] if workers_per_group > 1 else None
    job = Idle(Scenario(tier, 1, 4, 2, shape), tmp_path, 10, needs_disk=False)
    job.state.mkdir()
    status = {"finished": {"step": 10}, "checkpoint": {} if saved is None else {"step": saved}}
    (job.state / "job.json").write_text(json.dumps({"status": status}))
    with pytest.raises(NothingToHitError, match=why):
        job.inject(Fault(kind, FINISHING, 0.0, 0.0, 0.0, 0, False))


NEW, OLD = "step-12.g3-abcd1234", "step-9.g3-abcd1234"


@pytest.mark.parametrize(
    ("files", "age_s", "writes"),
    [
        pytest.param([], 0, False, id="there is none"),
        pytest.param([f"{OLD}/COMMIT.json", f".writing-{NEW}/.job"], 0, True, id="its data are written aside"),
        pytest.param([f"{OLD}/COMMIT.json", f"{NEW}/.metadata"], 0, True, id="its data are there, COMMIT.json is not"),
        pytest.param([f"{OLD}/COMMIT.json", f"{NEW}/COMMIT.json"], 0, False, id="it is whole"),
        pytest.param([f"{OLD}/.metadata", f"{NEW}/COMMIT.json"], 0, False, id="an older one is deleted"),
        pytest.param(["step-40.g2-abcd1234/COMMIT.json", f"{NEW}/.metadata"], 0, True, id="a newer generation's, of an older step"),
        pytest.param([f"{OLD}/COMMIT.json", f"{NEW}/.metadata"], 60, False, id="its writer was killed a minute ago"),
        pytest.param(["ballast", "step-12/x"], 0, False, id="other files"),
    ],
)  # fmt: skip
def test_checkpoint_is_being_written(tmp_path: Path, files: list[str], age_s: float, writes: bool) -> None:
    job = LocalJob(Scenario(SESSION, 1, 2, 1), tmp_path, 10, needs_disk=False)
    for name in files:
        path = job.checkpoints / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for path in job.checkpoints.iterdir():
        os.utime(path, (time.time() - age_s,) * 2)
    assert job.writes_checkpoint() is writes
