"""What tests with real frameworks share: their interpreters, and what the samples print.

`make venv-frameworks` builds the interpreters, and REGROUP_FRAMEWORKS_PYTHON names others, separated by colons.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from harness.local_run import LocalRun
from harness.processes import children

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "manifests" / "samples"
PYTHONS = (
    *filter(None, os.environ.get("REGROUP_FRAMEWORKS_PYTHON", "").split(os.pathsep)),
    *(str(ROOT / venv / "bin" / "python") for venv in (".venv-frameworks", ".venv-torch-frameworks")),
)
STEPS = 600
EVERY = 50
"""Steps between two checkpoints. A planned change waits for files that are being written, so they are seconds apart."""
PACE_S = "0.1"
BEGINS = re.compile(r"process (\d+) of (\d+) begins at step (\d+)")


@functools.cache
def python_with(module: str) -> str:
    """Return an interpreter that has a module, or skip the test."""
    for python in PYTHONS:
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if Path(python).exists() and subprocess.run([python, "-c", look], check=False).returncode == 0:
            return python
    pytest.skip(f"no interpreter has {module}: run `make venv-frameworks`, or set REGROUP_FRAMEWORKS_PYTHON")


def begins(run: LocalRun) -> list[tuple[int, int, int]]:
    """Return (process, world size, first step) of all processes that have begun so far, in this order."""
    return [(int(rank), int(size), int(step)) for rank, size, step in BEGINS.findall(run.log.read_text())]


def begun(run: LocalRun, world_size: int, beyond: int = -1) -> set[tuple[int, int]]:
    """Return (process, first step) of the processes that began with this world size at a step above `beyond`."""
    return {(rank, step) for rank, size, step in begins(run) if size == world_size and step > beyond}


def all_begun(run: LocalRun, world_size: int, beyond: int = -1) -> bool:
    return {rank for rank, _ in begun(run, world_size, beyond)} == set(range(world_size))


def ended(run: LocalRun, world_size: int, end: str) -> list[int]:
    """Return the ranks whose last words the log lacks: `process R of N` and the text `end`."""
    text = run.log.read_text()
    return [rank for rank in range(world_size) if f"process {rank} of {world_size} {end}" not in text]


def process_of(run: LocalRun, slot: int) -> int:
    """Return the pid of a worker's process, which is its agent's only child where no zygote is."""
    (agent,) = (pid for pid, worker in run.agents().items() if worker.startswith(f"local-worker-{slot}-"))
    (process,) = children(agent)
    return process


def breaks_and_goes_on(run: LocalRun, *pids: int, signum: int = signal.SIGKILL) -> None:
    """Kill or stop processes of a job with two, and wait until both have gone on from a checkpoint and two more were saved."""
    before, generation = len(begins(run)), run.status()["membership"]["generation"]
    for pid in pids:
        os.kill(pid, signum)
    run.wait(lambda _: len(begins(run)) == before + 2, "both begin again", timeout_s=180)
    (_, size, step), (_, other_size, other_step) = begins(run)[before:]
    assert (size, step) == (other_size, other_step)
    assert size == 2
    assert step >= EVERY, "from a checkpoint"
    run.trains(2, after=generation)
    run.wait(lambda s: s["progress"].get("step", 0) >= step + 2 * EVERY, "two more checkpoints", timeout_s=180)
