"""SIGTERM to real agents: a worker leaves at a step boundary, its state goes first, the run ends with the bits of one undisturbed.

Nobody deletes these pods: it is what a kubelet does that evicts one, or shuts its node down. A deletion marks the pod besides
(tests/unit/controller/test_drain.py, tests/e2e/test_drain.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import judge
from harness.local_run import LocalRun
from harness.polling import until
from harness.processes import alive
from harness.trace import Trace, load
from tests.long import only_long
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SCRIPT = Path(judge.__file__).parent / "scripts" / "traced.py"
STEPS = 400
PACE_S = 0.1
"""A step takes so long until the last drain is over."""
GRACE_S = 25.0
"""As the agent has it where nothing else is said."""
SLOT = "local-worker-0-0"
"""The host's name that the script sees, and by which it finds the file that holds up its start."""


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the script writes its commits to."""
    directory = tmp_path / "traces"
    directory.mkdir()
    (directory / "pace").write_text(str(PACE_S))
    for name, value in {"HOSTNAME": SLOT, "TRACE": directory, "STEPS": STEPS, "REDUCTION": "exact"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
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


def wait_steps(run: LocalRun, traces: Path, more: int = 5) -> Trace:
    """Wait until so many further steps are committed; return the trace."""
    before = len({c.step for c in load(traces).commits})
    until(lambda: len({c.step for c in load(traces).commits}) >= before + more, "steps", details=run.log.read_text)
    return load(traces)


def agent_of(run: LocalRun, worker: str) -> int:
    return next(pid for pid, name in run.agents().items() if name == worker)


def end(run: LocalRun, traces: Path) -> Trace:
    """Let the run end; return what it committed, every step once."""
    (traces / "pace").write_text("0")
    run.wait(lambda s: s.get("phase") == "Succeeded", "the end")
    assert run.process.wait(60) == 0  # what the script does after its loop is done
    trace = load(traces)
    assert judge.whole(trace.judged(), last=STEPS - 1, redone=0) == []
    return trace


def parameters(trace: Trace) -> set[str]:
    return {done.parameters for done in trace.done}


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The parameters that plain python ends with."""
    directory = tmp_path_factory.mktemp("undisturbed")
    environment = {"TRACE": str(directory), "HOSTNAME": SLOT, "STEPS": str(STEPS), "REDUCTION": "exact"}
    Plain(zygote, directory / "log", SCRIPT, STEP_SECONDS="0", **environment).wait()
    return parameters(load(directory))


def test_only_worker_hands_its_state_over_within_its_grace(
    start: Callable[..., LocalRun], traces: Path, undisturbed: set[str]
) -> None:
    run = start("--workers", "1")
    run.trains(1)
    before = wait_steps(run, traces)
    old, (process,) = agent_of(run, "local-worker-0-0"), run.trainers().values()
    asked_s = time.time()
    os.kill(old, signal.SIGTERM)
    run.wait(
        lambda s: (s.get("membership") or {}).get("members") == "0.1" and s["membership"]["adopted"], "a hand-over"
    )
    until(lambda: not alive(old), "the end of the agent that left", timeout_s=GRACE_S)
    handed_s = time.time() - asked_s
    wait_steps(run, traces)
    status = run.status()
    assert [i["cause"] for i in status["incidents"]] == ["Drained", "Drained"]
    assert [i.get("stepsRedone", 0) for i in status["incidents"]] == [0, 0]
    assert status["restarts"]["total"] == 0
    trace = end(run, traces)
    first = {g: min(c.step for c in trace.commits if c.generation == g) for g in trace.generations()}
    last = {g: max(c.step for c in trace.commits if c.generation == g) for g in trace.generations()}
    generations = trace.generations()
    assert [first[g] for g in generations[1:]] == [last[g] + 1 for g in generations[:-1]]
    assert {c.pid for c in trace.commits if c.generation == generations[-1]}.isdisjoint({process})
    longest_s = max(trace.intervals_s(since=before.commits[-1].t, until=asked_s + handed_s))
    print(f"SIGTERM -> the old agent has gone: {handed_s:.1f} s; longest time between two steps: {longest_s:.2f} s")
    assert longest_s <= 2.0, "training stood while the successor started"
    assert parameters(trace) == undisturbed


@only_long("tests/e2e/test_drain.py drains two of three, and the only worker is drained above")
def test_one_of_two_leaves_at_a_step_boundary_and_the_other_keeps_its_process(
    start: Callable[..., LocalRun], traces: Path
) -> None:
    run = start("--workers", "2", "--min", "1", "--join-quiet", "0.2")
    run.trains(2)
    wait_steps(run, traces)
    stays = run.trainers()["local-worker-0-0"]
    old = agent_of(run, "local-worker-1-0")
    os.kill(old, signal.SIGTERM)
    run.wait(
        lambda s: (s.get("membership") or {}).get("members") == "0,1.1" and s["membership"]["adopted"], "a successor"
    )
    assert not alive(old)
    assert run.trainers()["local-worker-0-0"] == stays
    wait_steps(run, traces)
    status = run.status()
    assert [i["cause"] for i in status["incidents"]] == ["Drained", "Resized"]
    assert status["restarts"]["total"] == 0
    assert len(parameters(end(run, traces))) == 1


@pytest.mark.slow
def test_successor_that_comes_after_the_grace_finds_the_last_step_on_the_volume(
    start: Callable[..., LocalRun], traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: set[str]
) -> None:
    """Nowhere to go within the grace period: no checkpoint was due, and the last one was written at its end."""
    monkeypatch.setenv("REGROUP_GRACE_SECONDS", "6")
    run = start("--workers", "1", "--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3600")
    run.trains(1)
    wait_steps(run, traces)
    old = agent_of(run, "local-worker-0-0")
    (traces / "start-0").touch()
    os.kill(old, signal.SIGTERM)
    until(lambda: not alive(old), "the end of the grace", timeout_s=20)
    last = load(traces).commits[-1].step
    (traces / "start-0").unlink()
    run.wait(lambda s: len(s.get("lineage", ())) == 2, "the successor has adopted")
    assert run.status()["lineage"][-1]["startStep"] == last + 1
    assert parameters(end(run, traces)) == undisturbed
