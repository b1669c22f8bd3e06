"""Hangs of real trainer processes under `regroup run`: found, named, ended, and no step lost by it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.local_run import LocalRun

SCRIPT = Path(__file__).with_name("hanging_job.py")
HANG_S = 3


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LocalRun]]:
    runs: list[LocalRun] = []

    def begin(where: str, *arguments: str, workers: int = 2) -> LocalRun:
        monkeypatch.setenv("TEST_HANG", where)
        monkeypatch.setenv("TEST_ONCE", str(tmp_path))
        for slot in range(workers):
            (tmp_path / str(slot)).touch()
        command = ("--workers", str(workers), "--hang-seconds", str(HANG_S), "--first-step-seconds", "8", *arguments)
        runs.append(LocalRun(tmp_path, *command, str(SCRIPT)))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(30)


def succeeded(run: LocalRun, timeout_s: float = 90) -> dict[str, Any]:
    return run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s)


def hung(status: dict[str, Any]) -> dict[str, Any]:
    found = [i for i in status["incidents"] if i["cause"] == "Hung"]
    assert len(found) == 1, status["incidents"]
    return found[0]


@pytest.mark.parametrize(
    ("where", "place"),
    [
        pytest.param("python:1:20", r"<module> \(hanging_job.py:\d+\)", id="a loop that never ends"),
        pytest.param("loader:1:20", r"__getitem__ \(hanging_job.py:\d+\)", id="the data of one rank"),
        pytest.param("eval:0:20", r"evaluate \(hanging_job.py:\d+\)", id="one rank in an evaluation"),
        pytest.param("pause:1:20", r'is in pause "eval" for longer than its max_s, in <module>', id="a pause"),
        pytest.param(
            "native:1:20", r"does not answer: <module> \(hanging_job.py:\d+\)", id="native code with the lock"
        ),
        pytest.param("python:1:0", r"<module> \(hanging_job.py:\d+\)", id="before the first step"),
    ],
)
def test_rank_that_hangs_is_named_and_restarted_and_nothing_is_lost(
    start: Callable[..., LocalRun], where: str, place: str
) -> None:
    run = start(where)
    slot = where.split(":")[1]
    run.trains(2)
    before = run.trainers()
    run.trains(2, after=1)
    after = run.trainers()
    assert {worker for worker in before if before[worker] != after[worker]} == {f"local-worker-{slot}-0"}
    status = succeeded(run)
    incident = hung(status)
    assert incident["culprit"] == slot
    assert re.search(rf"rank {slot} \(worker {slot}, process 0\).*{place}", incident["decision"]), incident
    assert len(incident["stacks"]) == 2
    assert incident.get("stepsRedone", 0) <= 1
    assert (status["restarts"]["processes"], status["progress"]["step"]) == (1, 200)
    assert status["lineage"][-1]["startStep"] >= (0 if where.endswith(":0") else 19), "it was rolled back"
    assert "thread MainThread:" in run.log.read_text()


def test_stopped_trainer_is_killed_and_its_survivor_keeps_its_process(start: Callable[..., LocalRun]) -> None:
    run = start("none:9:0", workers=3)
    run.trains(3)
    before = run.trainers()
    os.kill(before["local-worker-1-0"], signal.SIGSTOP)
    run.trains(3, after=1)
    after = run.trainers()
    assert {w for w in before if before[w] != after[w]} == {"local-worker-1-0"}
    status = succeeded(run)
    assert "rank 1 (worker 1, process 0) is stopped by a signal (state T)" in hung(status)["decision"]


def test_two_ranks_that_hang_at_once_are_both_restarted(start: Callable[..., LocalRun]) -> None:
    run = start("python:0,2:30", workers=3)
    status = succeeded(run)
    assert status["restarts"]["processes"] == 2
    assert {i["cause"] for i in status["incidents"]} == {"Hung"}


def test_only_worker_is_restarted_and_goes_on_from_its_checkpoint(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    run = start("python:0:150", "--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "1", workers=1)
    status = succeeded(run)
    assert hung(status)["culprit"] == "0"
    assert status["lineage"][-1]["startStep"] > 0


def test_ranks_that_run_different_collectives_get_new_groups_and_keep_their_processes(
    start: Callable[..., LocalRun],
) -> None:
    run = start("collective:1:20")
    run.trains(2)
    before = run.trainers()
    run.trains(2, after=1)
    assert run.trainers() == before
    status = succeeded(run)
    assert "every rank is in a collective" in hung(status)["decision"]
    assert status["restarts"]["processes"] == 0


def test_slow_step_and_a_pause_are_no_incidents(start: Callable[..., LocalRun]) -> None:
    status = succeeded(start("slow:1:50"))
    assert status.get("incidents", []) == []
