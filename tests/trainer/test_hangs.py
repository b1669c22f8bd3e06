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
from regroup_cli.__main__ import main
from tests.long import only_long
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).with_name("hanging_job.py")
HANG_S = 3

Start = Callable[..., LocalRun]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    runs: list[LocalRun] = []

    def begin(where: str, *arguments: str, workers: int = 3, steps: int = 100) -> LocalRun:
        monkeypatch.setenv("TEST_HANG", where)
        monkeypatch.setenv("TEST_STEPS", str(steps))
        monkeypatch.setenv("TEST_PAUSE_S", str(HANG_S + 1))
        monkeypatch.setenv("TEST_ONCE", str(tmp_path))
        command = ("--workers", str(workers), "--hang-seconds", str(HANG_S), "--first-step-seconds", "8", *arguments)
        runs.append(LocalRun(tmp_path, *command, str(SCRIPT)))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def succeeded(run: LocalRun, timeout_s: float = 240) -> dict[str, Any]:
    """Wait for the end and for the last lines: the job has succeeded before what follows the loop has run."""
    status = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s)
    assert run.process.wait(60) == 0
    return status


HERE = r"\(hanging_job.py:\d+\)"
IN_TURN = {
    "python:1:0": rf"worker 1 .*rank 1 \(worker 1, process 0\) hangs in <module> {HERE}",
    "stopped:2:10": r"worker 2 .*rank 2 \(worker 2, process 0\) is stopped by a signal \(state T\)",
    "loader:0:20": rf"worker 0 .*rank 0 \(worker 0, process 0\) hangs in __getitem__ {HERE}",
    "eval:1:30": rf"worker 1 .*rank 1 \(worker 1, process 0\) hangs in evaluate {HERE}",
    "collective:1:40": "every rank is in a collective: rank 0 in evaluate",
    "pause:0:50": rf'worker 0 .*rank 0 .* is in pause "eval" for longer than its max_s, in <module> {HERE}',
    "native:2:60": rf"worker 2 .*rank 2 \(worker 2, process 0\) does not answer: .*<module> {HERE}",
    "python:0,2:70": rf"rank (0|2) .* hangs in <module> {HERE}",
}
"""Hang -> what its incident says."""
NO_HANGS = ["slow:1:80", "declared:2:90"]
"""After the others: a step that takes long, and a pause longer than hangSeconds that ends before its max_s. They make none."""


@pytest.mark.slow
def test_hangs_of_every_kind_are_named_and_ended_and_no_step_is_lost(
    start: Start, zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow: each hang lasts for HANG_S at least."""
    plain = Plain(zygote, tmp_path / "plain", SCRIPT)
    run = start(" ".join([*IN_TURN, *NO_HANGS]), "--max-restarts", "20")
    status = succeeded(run)
    decisions = [incident["decision"] for incident in status["incidents"] if incident["cause"] == "Hung"]
    assert len(decisions) == len(status["incidents"]) == len(IN_TURN), status["incidents"]
    for decision, (where, said) in zip(decisions, IN_TURN.items()):
        assert re.search(said, decision), f"{where}: {decision}"
    # The two at once count twice, the one in which everybody waits for the others not at all.
    assert status["restarts"]["processes"] == len(IN_TURN)
    assert all(len(incident["stacks"]) == 3 for incident in status["incidents"])
    assert main(["stacks", str(run.state)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == status["incidents"][-1]["stacks"]
    assert all(incident.get("stepsRedone", 0) <= 1 for incident in status["incidents"])
    steps = [entry["startStep"] for entry in status["lineage"]]
    assert steps == sorted(steps), "it was rolled back"
    log = run.log.read_text()
    assert not list(unlogged(status["incidents"], log))
    assert plain.wait().splitlines()[-1] in log, "a step was lost or done twice"


def unlogged(incidents: list[dict[str, Any]], log: str) -> Iterator[str]:
    """Yield the stacks of the incidents that are not in the log, whole, by the worker and in the order of the incidents."""
    by_worker: dict[str, list[str]] = {}
    for stack in (line for incident in incidents for line in incident["stacks"]):
        by_worker.setdefault(stack.partition(": ")[0].partition(" (")[2].rstrip(")"), []).append(stack)
    for worker, stacks in by_worker.items():
        said = "\n".join(re.findall(rf"^regroup: worker {worker}: (.*)", log, re.M))
        reports = iter(said.split("No step is committed. Process 0 is ")[1:])
        for number, stack in enumerate(stacks):
            _, place, chain = stack.split(": ", 2)
            calls = re.findall(r"(\S+) \((\S+):(\d+)\)", chain)
            wanted = [f'{file}", line {line}, in {name}' for name, file, line in calls]
            if place in ("stopped", "silent"):  # seen from outside; a silent one's own account is not the agent's line
                wanted = [chain, "\nthread "]
            if not any(all(words in report for words in wanted) for report in reports):
                yield f"hang {number + 1}, worker {worker}: {stack}"


@only_long("a stopped trainer is one of the hangs above")
def test_stopped_trainer_is_killed_and_the_others_keep_their_processes(start: Start) -> None:
    run = start("", "--min", "2", steps=100_000)
    run.trains(3)
    before = run.trainers()
    os.kill(before["local-worker-1-0"], signal.SIGSTOP)
    run.trains(3, after=1)
    after = run.trainers()
    assert {w for w in before if before[w] != after[w]} == {"local-worker-1-0"}
    incident = run.status()["incidents"][0]
    assert (incident["cause"], incident["culprit"]) == ("Hung", "1")
    assert "rank 1 (worker 1, process 0) is stopped by a signal (state T)" in incident["decision"]


@pytest.mark.slow
def test_only_worker_is_restarted_and_goes_on_from_its_checkpoint(start: Start, tmp_path: Path) -> None:
    saved = ("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "1")
    status = succeeded(start("python:0:150", *saved, workers=1, steps=200))
    assert [(i["cause"], i["culprit"]) for i in status["incidents"]] == [("Hung", "0")]
    assert 0 < status["lineage"][-1]["startStep"] <= 150
