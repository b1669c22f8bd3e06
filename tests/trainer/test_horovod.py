"""Horovod's API in real processes: operations, mismatches, joins, the optimizer, a rank that is killed, and the sample as a job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.local_run import LocalRun
from tests.long import only_long

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("horovod_ranks.py")
SAMPLE = ROOT / "manifests" / "samples" / "horovod_mnist.py"
BEGINS = re.compile(r"process (\d+) of (\d+) begins at step (\d+)")


def start_ranks(size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-u", str(RANKS), *arguments],
            env={
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
                **{"PYTHONPATH": str(ROOT / "trainer-image"), "HOROVOD_STALL_CHECK_TIME_SECONDS": "1.2"},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_operations_do_what_horovods_do(size: int) -> None:
    ranks = start_ranks(size, "all")
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)
    assert all(text.count("passed") == 10 for text in said), said[0]


@pytest.mark.timeout(120)
def test_rank_0_that_ends_at_once_has_let_the_others_in() -> None:
    ranks = start_ranks(2, "late")
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_wait_of_all_others_with_an_error(victim: int) -> None:
    ranks = start_ranks(3, "waits", str(victim))
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waits\n"
    ranks[victim].send_signal(signal.SIGKILL)
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for index, rank in enumerate(ranks) if index != victim] == [0, 0], "\n".join(said)


@pytest.mark.timeout(400)
def test_sample_is_killed_and_grown_and_reaches_the_end(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    run = start(
        *("--framework", "Horovod", "--workers", "2", "--min", "1", "--max", "3", "--join-quiet", "0.2"),
        *("--progress-log", r"^step (?P<step>\d+)  loss (?P<loss>\S+)"),
        *(sys.executable, str(SAMPLE), "--checkpoint", str(tmp_path / "mnist.pt")),
        *("--steps", "300", "--pace", "0.1"),
    )

    def begun(size: int) -> list[int]:
        return [int(step) for _, ranks, step in BEGINS.findall(run.log.read_text()) if int(ranks) == size]

    run.wait(lambda _: "step 20 " in run.log.read_text(), "a checkpoint", timeout_s=120)
    os.kill(run.trainers()["local-worker-1-0"], signal.SIGKILL)
    run.wait(lambda _: len(begun(2)) == 4, "both processes again", timeout_s=120)
    assert begun(2)[2] == begun(2)[3] >= 20
    run.scale(3)
    run.wait(lambda _: len(begun(3)) == 3, "three processes", timeout_s=120)
    assert len(set(begun(3))) == 1
    run.wait(lambda _: "after 300 steps" in run.log.read_text(), "the end", timeout_s=200)
    assert float(re.findall(r"held-out accuracy (\S+)", run.log.read_text())[-1]) > 0.8


@only_long("test_script_progress.py has a script of torch that hangs")
@pytest.mark.timeout(240)
def test_stopped_process_is_ended_and_all_start_again(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    """The other one waits for it in a collective. The stall check ends no such wait, since a rank may be busy with a checkpoint."""
    run = start(
        *("--framework", "Horovod", "--workers", "2", "--hang-seconds", "5"),
        *("--progress-log", r"^step (?P<step>\d+)  loss (?P<loss>\S+)"),
        *(sys.executable, str(SAMPLE), "--checkpoint", str(tmp_path / "mnist.pt"), "--steps", "150", "--pace", "0.1"),
    )
    run.wait(lambda _: "step 20 " in run.log.read_text(), "a checkpoint", timeout_s=120)
    os.kill(run.trainers()["local-worker-1-0"], signal.SIGSTOP)
    run.wait(lambda _: len(BEGINS.findall(run.log.read_text())) == 4, "both processes again", timeout_s=120)
    assert min(int(step) for *_, step in BEGINS.findall(run.log.read_text())[2:]) >= 20
    last = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=120)
    assert [(one["cause"], one["culprit"]) for one in last["incidents"]] == [("Hung", "1")]
