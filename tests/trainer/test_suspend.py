"""spec.runPolicy.suspend with real processes: all stop after the same step, its state is saved, and the job goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import judge
from harness.local_run import LocalRun
from harness.polling import until
from harness.trace import Trace, load
from tests.long import only_long

SCRIPT = Path(judge.__file__).parent / "scripts" / "traced.py"
SAMPLES = Path(__file__).parents[2] / "manifests/samples/train"
STEPS = 120
PACE_S = 0.1
"""A step takes so long until the job has been resumed."""


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the script writes its commits to."""
    directory = tmp_path / "traces"
    directory.mkdir()
    (directory / "pace").write_text(str(PACE_S))
    environment = {"TRACE": directory, "STEPS": STEPS, "REDUCTION": "exact", "HOSTNAME": "local-worker-0-0"}
    for name, value in {**environment, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, str(value))
    return directory


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    runs: list[LocalRun] = []

    def begin(*arguments: str) -> LocalRun:
        runs.append(LocalRun(tmp_path, *arguments, str(SCRIPT)))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def suspend(run: LocalRun, suspended: bool) -> None:
    run.change_spec(lambda spec: spec.setdefault("runPolicy", {}).update(suspend=suspended))


def wait_steps(run: LocalRun, traces: Path, more: int = 5) -> Trace:
    """Wait until so many further steps are committed; return the trace."""
    before = len({c.step for c in load(traces).commits})
    until(lambda: len({c.step for c in load(traces).commits}) >= before + more, "steps", details=run.log.read_text)
    return load(traces)


def suspended(status: dict[str, Any]) -> bool:
    return status.get("phase") == "Suspended"


def test_suspended_job_gives_its_workers_back_and_goes_on_where_it_was(
    start: Callable[..., LocalRun], traces: Path, tmp_path: Path
) -> None:
    """Twice: the checkpoint is written by the stop alone. A worker is added in between, so that another size goes on."""
    run = start(
        "--workers",
        "2",
        "--min",
        "1",
        "--max",
        "3",
        "--checkpoint",
        str(tmp_path / "ckpt"),
        "--checkpoint-every",
        "3600",
    )
    run.trains(2)
    generation = 1
    for workers in (3, 1):
        wait_steps(run, traces)
        suspend(run, True)
        status = run.wait(suspended, "its suspension")
        assert run.agents() == {}
        assert status["membership"]["suspended"]
        assert status["summary"]["ready"].startswith("0/")
        stopped = load(traces)
        last = {c.rank: max(d.step for d in stopped.commits if d.rank == c.rank and d.generation == c.generation)
                for c in stopped.commits if c.generation == status["membership"]["generation"]}  # fmt: skip
        assert len(set(last.values())) == 1, f"all leave after the same step: {last}"
        assert status["checkpoint"]["step"] == max(last.values()) + 1
        run.scale(workers)
        suspend(run, False)
        status = run.trains(workers, after=generation)
        generation = status["membership"]["generation"]
        assert status["incidents"][-1]["cause"] == "Resumed"
        resumed = wait_steps(run, traces)
        assert min(c.step for c in resumed.commits if c.generation == generation) == max(last.values()) + 1
    (traces / "pace").write_text("0")
    status = run.wait(lambda s: s.get("phase") == "Succeeded", "the end")
    assert run.process.wait(60) == 0
    assert (status["restarts"]["total"], status["completionTime"] >= status["startTime"]) == (0, True)
    assert judge.whole(load(traces).judged(), last=STEPS - 1, redone=0) == []


@only_long("the plan has a table of what it says")
def test_job_without_checkpoints_begins_anew_and_says_so_before(start: Callable[..., LocalRun], traces: Path) -> None:
    run = start("--workers", "2", "--min", "2", "--max", "2")
    run.trains(2)
    wait_steps(run, traces)
    suspend(run, True)
    status = run.wait(suspended, "its suspension")
    said = next(c for c in status["conditions"] if c["type"] == "Suspended")
    assert "begins anew" in said["message"]
    suspend(run, False)
    status = run.trains(2, after=1)
    assert status["membership"]["startStep"] == 0


@pytest.mark.parametrize(
    ("sample", "workers", "processes"),
    [pytest.param("fsdp", 2, 2, id="parts of a model"), pytest.param("parameter-server", 3, 1, id="a server")],
)
@only_long("as the jobs above, with checkpoints that other files test")
def test_suspended_job_of_another_strategy_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: str, workers: int, processes: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = ("--workers", str(workers), "--processes-per-worker", str(processes))
    saves = ("--checkpoint", str(tmp_path / "ckpt"), "--checkpoint-every", "3600")
    settings = ("--set", "steps=100000", "--set", "evaluate_every=1000000", "--set", "print_every=1000")
    run = LocalRun(tmp_path, *sizes, *saves, str(SAMPLES / f"{sample}.yaml"), *settings)
    try:
        generation = run.trains(workers * processes)["membership"]["generation"]
        run.wait(lambda s: (s.get("progress") or {}).get("step", 0) > 20, "steps")
        suspend(run, True)
        told = run.wait(suspended, "its suspension")["progress"]["step"]
        suspend(run, False)
        status = run.trains(workers * processes, after=generation)
        assert status["membership"]["startStep"] >= told
        assert status.get("restarts", {}).get("total", 0) == 0
    finally:
        run.close()
