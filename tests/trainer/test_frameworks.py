"""The samples of JAX, XGBoost and TensorFlow under `regroup run`: a kill, growth, and the right end, each from its own checkpoint.

Their interpreter is one that has the framework: `.venv-frameworks`, which `make venv-frameworks` builds, or one of those that
REGROUP_FRAMEWORKS_PYTHON names, separated by colons. Where there is none the test says so and is skipped.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.local_run import LocalRun
from harness.processes import children

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "manifests" / "samples"
PYTHONS = (
    *filter(None, os.environ.get("REGROUP_FRAMEWORKS_PYTHON", "").split(os.pathsep)),
    str(ROOT / ".venv-frameworks" / "bin" / "python"),
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


def begun(run: LocalRun, world_size: int, beyond: int = -1) -> set[tuple[int, int]]:
    """Return (process, first step) of the processes that began with this world size at a step above `beyond`."""
    found = [tuple(map(int, groups)) for groups in BEGINS.findall(run.log.read_text())]
    return {(rank, step) for rank, size, step in found if size == world_size and step > beyond}


def all_begun(run: LocalRun, world_size: int, beyond: int = -1) -> bool:
    return {rank for rank, _ in begun(run, world_size, beyond)} == set(range(world_size))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("framework", "module", "script", "end"),
    [
        pytest.param("JAX", "jax", "jax_train.py", "ends with weights -2.5207", id="JAX"),
        pytest.param("XGBoost", "xgboost", "xgboost_train.py", f"ends with {STEPS} trees", id="XGBoost"),
        pytest.param("TensorFlow", "tensorflow", "tensorflow_train.py", f"ends at step {STEPS}", id="TensorFlow"),
    ],
)
def test_killed_and_grown_script_goes_on_from_its_checkpoint_to_the_right_end(
    start: Callable[..., LocalRun], tmp_path: Path, framework: str, module: str, script: str, end: str
) -> None:
    python = python_with(module)
    run = start(
        *("--framework", framework, "--workers", "2", "--min", "1", "--max", "3", "--join-quiet", "0.2"),
        *("--progress-log", r"^step (?P<step>\d+)  \w+ (?P<loss>\S+)"),
        *(python, str(SAMPLES / script), "--checkpoint", str(tmp_path / "saved")),
        *("--steps", str(STEPS), "--every", str(EVERY), "--pace", PACE_S),
    )
    run.wait(lambda _: f"step {EVERY} " in run.log.read_text(), "a checkpoint", timeout_s=240)
    assert begun(run, 2) == {(0, 0), (1, 0)}
    (agent,) = (pid for pid, worker in run.agents().items() if worker == "local-worker-1-0")
    (trainer,) = children(agent)
    os.kill(trainer, signal.SIGKILL)
    run.wait(lambda _: all_begun(run, 2, EVERY - 1), "both go on from the checkpoint", timeout_s=180)

    run.trains(2, after=1)
    run.scale(3)
    run.wait(lambda _: all_begun(run, 3, EVERY - 1), "three go on from the checkpoint", timeout_s=180)
    ended = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=180)
    assert run.process.wait(60) == 0
    assert (ended["tier"], ended["progress"]["step"]) == ("Script", STEPS)
    text = run.log.read_text()
    assert [rank for rank in range(3) if f"process {rank} of 3 {end}" not in text] == []
