"""Elastic Horovod under `regroup run`: survivors keep their processes and their state, and the job comes to the right end.

Where no process is left, the newest checkpoint has the state."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.local_run import LocalRun
from harness.polling import until
from harness.processes import children, name_of
from regroup.protocol import env
from tests.long import only_long

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "horovod_elastic.py"
SCRIPT = Path(__file__).with_name("horovod_elastic_job.py")
EPOCHS = "8"
BEGINS = re.compile(r"rank (\d+) of (\d+) \(process (\d+)\) goes on at epoch (\d+) batch (\d+)")
ENDS = re.compile(r"rank (\d+) of (\d+) \(process (\d+)\) ends with held-out loss (\S+)  accuracy (\S+)")


class Begun(NamedTuple):
    """The start of the training function on one rank."""

    rank: int
    size: int
    pid: int
    epoch: int
    batch: int

    @property
    def is_later(self) -> bool:
        return (self.epoch, self.batch) > (0, 0)


def begun(run: LocalRun) -> list[Begun]:
    return [Begun(*map(int, groups)) for groups in BEGINS.findall(run.log.read_text())]


def alone(*args: str) -> tuple[float, float]:
    """Return held-out loss and accuracy of an undisturbed run under plain python."""
    environment = {name: value for name, value in os.environ.items() if name != env.SOCKET}
    ended = subprocess.run([sys.executable, str(SAMPLE), *args], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    ((*_, loss, accuracy),) = ENDS.findall(ended.stdout)
    return float(loss), float(accuracy)


def processes(run: LocalRun) -> dict[tuple[str, str], int]:
    """Return the pids of all trainers by worker and process name."""
    return {
        (worker, name_of(child)): child
        for agent, worker in run.agents().items()
        for child in children(agent)
        if name_of(child).startswith("trainer-")
    }


def all_in(run: LocalRun, size: int) -> bool:
    """Return whether the last starts of the function are those of all ranks of a group of this size."""
    return {b.rank for b in begun(run)[-size:] if b.size == size} == set(range(size))


def commits(run: LocalRun, least: int) -> dict[str, Any]:
    """Wait for this number of commits."""
    return run.wait(lambda s: (s.get("progress") or {}).get("step", 0) >= least, f"{least} commits")


def end(run: LocalRun, hurry: Path) -> dict[str, Any]:
    """Let the run come to its end, and return its last status."""
    hurry.touch()
    last = run.wait(lambda status: status.get("phase") == "Succeeded", "the end")
    assert run.process.wait(60) == 0
    return last


@pytest.mark.timeout(240)
def test_state_stays_through_a_kill_growth_shrinking_and_the_loss_of_all_processes(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    run = start(
        *("--framework", "Horovod", "--workers", "2", "--min", "1", "--max", "3", "--join-quiet", "0.2"),
        *("--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "1"),
        *(sys.executable, str(SAMPLE), "--epochs", EPOCHS, "--pace", "0.5", "--hurry", str(hurry)),
    )
    first = run.trains(2)["membership"]["generation"]
    run.wait(lambda status: (status.get("progress") or {}).get("step", 0) >= 3, "three commits")
    before = run.trainers()
    # Rank 0 is lost: the survivor becomes rank 0, and the new process, which has rank 0's slot, takes its state.
    os.kill(before["local-worker-0-0"], signal.SIGKILL)
    second = run.trains(2, after=first)["membership"]["generation"]
    survivor = before["local-worker-1-0"]
    run.wait(lambda _: any(b.size == 2 and b.is_later and b.pid != survivor for b in begun(run)), "the new process")
    assert run.trainers()["local-worker-1-0"] == survivor
    there = [b for b in begun(run) if b.size == 2 and b.is_later]
    assert {(b.rank, b.pid == survivor) for b in there} == {(0, True), (1, False)}
    assert len({(b.epoch, b.batch) for b in there}) == 1, "both go on from one commit"

    run.scale(3)
    third = run.trains(3, after=second)["membership"]["generation"]
    run.wait(lambda _: len({b.pid for b in begun(run) if b.size == 3}) == 3, "three ranks in their function")
    assert len({(b.epoch, b.batch) for b in begun(run) if b.size == 3}) == 1
    run.scale(1)
    fourth = run.trains(1, after=third)["membership"]["generation"]
    run.wait(lambda _: begun(run)[-1].size == 1, "one rank in its function")
    places = [(b.epoch, b.batch) for b in begun(run)]
    assert places == sorted(places), "training never goes back"
    run.wait(lambda s: (s.get("checkpoint") or {}).get("generation", 0) == fourth, "a checkpoint of the last rank")
    run.wait(lambda _: len(run.trainers()) == 1, "the end of the others")
    (last,) = run.trainers().values()
    os.kill(last, signal.SIGKILL)
    run.trains(1, after=fourth)
    run.wait(lambda _: begun(run)[-1].pid != last, "the function in the new process")
    assert begun(run)[-1].epoch + begun(run)[-1].batch > 0
    hurry.touch()
    ended = run.wait(lambda status: status.get("phase") == "Succeeded", "the end")
    assert run.process.wait(60) == 0
    assert ended["tier"] == "Session"
    assert ended["restarts"]["total"] == 2
    found = ENDS.findall(run.log.read_text())
    assert [(rank, size) for rank, size, *_ in found] == [("0", "1")]
    loss, accuracy = float(found[0][3]), float(found[0][4])
    whole_loss, whole_accuracy = alone("--epochs", EPOCHS)
    assert accuracy > whole_accuracy - 0.1
    assert loss < whole_loss + 0.5


OTHERS = "the test of the sample has a kill, growth, shrinking and a checkpoint"
FOUR = ("--framework", "Horovod", "--workers", "2", "--min", "1", "--max", "2", "--processes-per-worker", "2")


@only_long(OTHERS)
@pytest.mark.timeout(240)
def test_stopped_rank_is_ended_and_the_others_keep_their_processes(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    """Rank 1 stops between two commits. The others wait for it in a collective."""
    run = start(
        *(
            "--framework",
            "Horovod",
            "--workers",
            "3",
            "--min",
            "1",
            "--hang-seconds",
            "3",
            "--first-step-seconds",
            "60",
        ),
        *(sys.executable, str(SAMPLE), "--epochs", "4", "--pace", "0.3", "--hurry", str(tmp_path / "hurry")),
    )
    first = run.trains(3)["membership"]["generation"]
    commits(run, 3)
    before = run.trainers()
    os.kill(before["local-worker-1-0"], signal.SIGSTOP)
    status = run.trains(3, after=first)
    (incident,) = (one for one in status["incidents"] if one["cause"] == "Hung")
    assert incident["culprit"] == "1"
    assert "is stopped by a signal" in incident["decision"]
    commits(run, status["membership"]["startStep"] + 3)
    after = run.trainers()
    assert {w: pid for w, pid in after.items() if w != "local-worker-1-0"} == {
        w: pid for w, pid in before.items() if w != "local-worker-1-0"
    }
    assert after["local-worker-1-0"] != before["local-worker-1-0"]
    assert end(run, tmp_path / "hurry")["restarts"]["total"] == 1


@only_long(OTHERS)
@pytest.mark.timeout(240)
def test_script_that_leaves_the_world_and_joins_it_again_goes_on_through_a_kill_and_a_resize(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    """There are two processes in each worker. One of them is lost, then a worker leaves and another one comes."""
    run = start(*FOUR, "--join-quiet", "0.2", sys.executable, str(SCRIPT), "200", "0.2", str(tmp_path / "hurry"))
    first = run.trains(4)["membership"]["generation"]
    commits(run, 6)
    before = processes(run)
    assert len(before) == 4
    os.kill(before.pop(("local-worker-1-0", "trainer-1")), signal.SIGKILL)
    second = run.trains(4, after=first)["membership"]["generation"]
    assert before.items() <= processes(run).items()
    run.wait(lambda _: len({b.pid for b in begun(run) if b.is_later}) == 4, "four ranks in their function")
    for size in (1, 2):
        run.scale(size)
        second = run.trains(2 * size, after=second)["membership"]["generation"]
        until(functools.partial(all_in, run, 2 * size), "all ranks in their function")
    ended = end(run, tmp_path / "hurry")
    assert ended["progress"]["step"] == 201, "200 commits, and the end of the function"
    found = re.findall(r"rank (\d) of 4 has parameters (\w+)", run.log.read_text())
    assert sorted(rank for rank, _ in found) == ["0", "1", "2", "3"]
    assert len({digest for _, digest in found}) == 1


@only_long(OTHERS)
@pytest.mark.timeout(240)
def test_suspended_job_goes_on_from_its_last_commit(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    """The checkpoint is written by the stop alone."""
    run = start(
        *(*FOUR, "--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3600"),
        *(sys.executable, str(SCRIPT), "200", "0.2", str(tmp_path / "hurry")),
    )
    run.trains(4)
    commits(run, 6)
    run.change_spec(lambda spec: spec.setdefault("runPolicy", {}).update(suspend=True))
    stopped = run.wait(lambda status: status.get("phase") == "Suspended", "its suspension")
    assert run.agents() == {}
    saved = stopped["checkpoint"]["step"]
    assert saved >= 6
    run.change_spec(lambda spec: spec["runPolicy"].update(suspend=False))
    run.wait(lambda _: len([b for b in begun(run) if b.is_later]) == 4, "four ranks in their function")
    assert {b.batch for b in begun(run) if b.is_later} == {saved}
    last = end(run, tmp_path / "hurry")
    assert (last["progress"]["step"], last["restarts"]["total"]) == (201, 0)


@only_long(OTHERS)
@pytest.mark.timeout(240)
def test_drained_worker_leaves_after_a_commit_and_the_others_keep_their_processes(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    """SIGTERM to an agent is what a kubelet does that evicts a pod. The processes have handled nothing of it themselves."""
    run = start(*FOUR, "--join-quiet", "0.2", sys.executable, str(SCRIPT), "300", "0.2", str(tmp_path / "hurry"))
    first = run.trains(4)["membership"]["generation"]
    commits(run, 6)
    before = processes(run)
    (agent,) = (pid for pid, worker in run.agents().items() if worker == "local-worker-0-0")
    os.kill(agent, signal.SIGTERM)
    second = run.trains(4, after=first)["membership"]["generation"]
    run.wait(lambda _: begun(run)[-1].is_later and all_in(run, 4), "all in their function")
    there = processes(run)
    assert {worker for worker, _ in there} == {"local-worker-0-1", "local-worker-1-0"}, second
    assert {p for (worker, _), p in before.items() if worker == "local-worker-1-0"} <= set(there.values())
    places = [b.batch for b in begun(run)]
    assert places == sorted(places), "training never goes back"
    last = end(run, tmp_path / "hurry")
    assert (last["progress"]["step"], last["restarts"]["total"]) == (301, 0)


@only_long(OTHERS)
@pytest.mark.timeout(240)
def test_loss_of_all_processes_goes_back_to_the_memory_snapshot(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    run = start(
        *(*FOUR, "--memory-snapshot", "64Mi", "--memory-snapshot-every", "1"),
        *(sys.executable, str(SCRIPT), "200", "0.2", str(tmp_path / "hurry")),
    )
    first = run.trains(4)["membership"]["generation"]
    status = run.wait(lambda s: (s.get("memorySnapshot") or {}).get("step", 0) >= 6, "a snapshot of commit 6")
    covered = status["memorySnapshot"]["step"]
    lost = processes(run)
    for pid in lost.values():
        os.kill(pid, signal.SIGKILL)
    run.trains(4, after=first)
    until(lambda: len([b for b in begun(run)[4:] if b.size == 4]) == 4, "four ranks in their function", timeout_s=60)
    assert not set(lost.values()) & {b.pid for b in begun(run)[4:]}
    assert min(b.batch for b in begun(run)[4:]) >= covered
    assert end(run, tmp_path / "hurry")["progress"]["step"] == 201
