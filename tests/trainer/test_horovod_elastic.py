"""Elastic Horovod under `regroup run`: survivors keep their processes and their state, and the job comes to the right end.

Where no process is left, the newest checkpoint has the state."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.local_run import LocalRun
from regroup.protocol import env

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "horovod_elastic.py"
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
