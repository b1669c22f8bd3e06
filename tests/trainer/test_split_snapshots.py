"""Memory snapshots of a model that is split: what is left when no other copy of a part lives, and nothing is on disk."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.local_run import LocalRun
from harness.processes import children, name_of
from tests.long import only_long
from tests.trainer.split_kit import SCRIPT, SplitJob
from tests.trainer.zygote import Zygote

STEPS = 60
RAISES_AT = 20
SNAPSHOT = ("--memory-snapshot", "64Mi", "--memory-snapshot-every", "1", "--join-quiet", "0.2")
ONE_GROUP = ("--workers", "2", "--workers-per-group", "2")
IN_A_WORKER = ("--workers", "1", "--processes-per-worker", "2")
TWO_GROUPS = ("--workers", "4", "--workers-per-group", "2")


class Run:
    """A job in a directory of its own."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> None:
        directory.mkdir()
        self.directory, self.go = directory, directory / "go"
        values = {"STEPS": str(STEPS), "TRACE": str(directory / "trace"), "PARTS": str(directory), "GO": str(self.go)}
        for name, value in {**values, "PACE": "0.05", **environment}.items():
            monkeypatch.setenv(f"TEST_{name}", value)
        self.local = LocalRun(directory, *arguments, str(SCRIPT))

    def wait_covered(self, step: int) -> tuple[int, int]:
        """Wait until every process has a snapshot of a step from `step` on; return (it, the generation)."""
        status = self.local.wait(lambda s: (s.get("memorySnapshot") or {}).get("step", 0) >= step, "a snapshot")
        return status["memorySnapshot"]["step"], status["membership"]["generation"]

    def pids(self) -> dict[str, list[int]]:
        """Return the trainers of each worker."""
        return {
            worker: [child for child in children(agent) if name_of(child).startswith("trainer-")]
            for agent, worker in self.local.agents().items()
        }

    def end(self) -> dict[str, Any]:
        self.go.touch()
        status = self.local.wait(lambda status: status.get("phase") in ("Succeeded", "Failed"), "the end")
        assert status["phase"] == "Succeeded", self.local.log.read_text()
        self.local.process.wait(30)
        return status

    def commits(self) -> list[dict[str, int]]:
        return [json.loads(line) for line in (self.directory / "trace").read_text().splitlines()]

    def parts(self) -> list[Any]:
        """Return what each rank holds at the end."""
        return [torch.load(path) for path in sorted(self.directory.glob("*.pt"))]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str, **environment: str) -> Run:
        runs.append(Run(tmp_path / str(len(runs)), monkeypatch, *arguments, **environment))
        return runs[-1]

    yield begin
    for run in runs:
        run.local.close()


@pytest.fixture
def undisturbed(tmp_path: Path, zygote: Zygote) -> Iterator[Callable[[str, int], list[Any]]]:
    """A function that returns what each rank holds after a run that nothing happens to."""
    jobs: list[SplitJob] = []

    def run(mesh: str, ranks: int) -> list[Any]:
        jobs.append(SplitJob(tmp_path / "undisturbed", zygote, mesh, TEST_STEPS=str(STEPS), TEST_PACE="0"))
        jobs[-1].start(range(ranks))
        jobs[-1].agents.announce(range(ranks))
        jobs[-1].finish(range(ranks))
        return [torch.load(jobs[-1].parts / f"{rank}.pt") for rank in range(ranks)]

    yield run
    for job in jobs:
        job.close()


def assert_same_end(run: Run, want: list[Any]) -> None:
    got = run.parts()
    assert len(got) == len(want) > 0
    for one, other in zip(got, want):
        for name, held in other.items():
            for key, value in held["local"].items():
                assert torch.equal(one[name]["local"][key], value), (name, key)


def assert_went_back_to(run: Run, covered: int, generation: int) -> None:
    """The first step after `generation` follows a snapshot that is not older than the one that was known of."""
    later = min(line["step"] for line in run.commits() if line["generation"] > generation)
    before = max(line["step"] for line in run.commits() if line["generation"] <= generation)
    assert 0 < covered <= later <= before + 1


@pytest.mark.parametrize(
    ("arguments", "mesh"),
    [
        pytest.param(ONE_GROUP, "shard=2", id="FSDP2 over all processes"),
        pytest.param(
            IN_A_WORKER, "pipeline=2", id="a pipeline in one worker", marks=only_long("as FSDP2 over all processes")
        ),
    ],
)
@pytest.mark.slow
def test_part_that_no_living_process_has_comes_from_memory(
    start: Callable[..., Run],
    undisturbed: Callable[[str, int], list[Any]],
    arguments: tuple[str, ...],
    mesh: str,
) -> None:
    """One process of the only model group dies: the other one goes back to its own snapshot of the same step."""
    want = undisturbed(mesh, 2)
    run = start(*arguments, *SNAPSHOT, MESH=mesh)
    covered, generation = run.wait_covered(5)
    worker = min(run.pids())
    os.kill(run.pids()[worker][-1], signal.SIGKILL)
    run.end()
    assert_went_back_to(run, covered, generation)
    assert_same_end(run, want)


@only_long("as with one copy of each part, above")
def test_all_copies_of_one_part_die(start: Callable[..., Run], undisturbed: Callable[[str, int], list[Any]]) -> None:
    """Two model groups: inner index 1 dies in both, and the other two processes live."""
    want = undisturbed("shard=2", 4)
    run = start(*TWO_GROUPS, *SNAPSHOT, MESH="shard=2")
    covered, generation = run.wait_covered(5)
    for worker in sorted(run.pids())[1::2]:
        os.kill(run.pids()[worker][0], signal.SIGKILL)
    run.end()
    assert_went_back_to(run, covered, generation)
    assert_same_end(run, want)


@pytest.mark.slow
def test_exception_on_every_rank_at_once_costs_no_step(
    start: Callable[..., Run], undisturbed: Callable[[str, int], list[Any]]
) -> None:
    """Each process copies its part as it ends, and FSDP2 had gathered parameters when it raised."""
    want = undisturbed("shard=2", 2)
    run = start(*IN_A_WORKER, *SNAPSHOT, MESH="shard=2", PACE="0", RAISE=f"1:{RAISES_AT}")
    status = run.end()
    assert min(line["step"] for line in run.commits() if line["generation"] > 1) == RAISES_AT
    assert not any(incident.get("stepsRedone") for incident in status["incidents"])
    assert "rolled back" not in json.dumps(status["incidents"])
    assert_same_end(run, want)
