"""Samples of JAX, XGBoost, TensorFlow and Hugging Face's Trainer under `regroup run`: a kill, growth, and the right end.

Each goes on from its own checkpoint. Its interpreter is one that has the framework. `make venv-frameworks` builds them,
and REGROUP_FRAMEWORKS_PYTHON names others, separated by colons. Where there is none the test says so and is skipped.
"""

from __future__ import annotations

import functools
import json
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("torchrun",), id="torchrun"),
        pytest.param(("accelerate", "launch", "--mixed_precision", "no"), id="accelerate"),
    ],
)
def test_hugging_faces_trainer_shows_its_progress_and_goes_on_from_its_checkpoint(
    start: Callable[..., LocalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: tuple[str, ...]
) -> None:
    """Nothing says how to find its step: the Trainer posts it, every 5 s."""
    python, steps = python_with("transformers"), 300
    monkeypatch.setenv("PATH", str(Path(python).parent) + os.pathsep + os.environ["PATH"])  # of the launcher
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    output = tmp_path / "output"
    run = start(
        *("--workers", "2", "--min", "1", "--max", "3", "--join-quiet", "0.2", *launcher),
        *(str(SAMPLES / "huggingface_train.py"), "--output", str(output)),
        *("--steps", str(steps), "--every", str(EVERY), "--pace", PACE_S),
    )
    seen = run.wait(lambda s: s.get("progress", {}).get("step", 0) > 0, "the Trainer's own step", timeout_s=240)
    assert begun(run, 2) == {(0, 0), (1, 0)}
    progress = seen["progress"]
    assert (progress["source"], progress["totalSteps"]) == ("Reported", steps)
    assert seen["summary"]["progress"] == f"{100 * progress['step'] // steps}%"
    # The Trainer writes this file last, so a kill finds a complete checkpoint.
    run.wait(lambda _: (output / f"checkpoint-{EVERY}" / "trainer_state.json").exists(), "a checkpoint")
    os.kill(run.trainers()["local-worker-1-0"], signal.SIGKILL)
    run.wait(lambda _: all_begun(run, 2, EVERY - 1), "both go on from the checkpoint", timeout_s=180)
    again = run.wait(lambda s: s.get("progress", {}).get("step", 0) > EVERY, "a step beyond it", timeout_s=180)
    assert 0 < again["progress"]["loss"] < 4, "the loss of a model that knows nothing is ln(64) = 4.16"

    run.scale(3)
    run.wait(lambda _: all_begun(run, 3, EVERY - 1), "three go on from a checkpoint", timeout_s=180)
    ended = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=240)
    assert run.process.wait(60) == 0
    assert (ended["tier"], ended["summary"]["progress"]) == ("Script", "100%")
    assert json.loads((output / f"checkpoint-{steps}" / "trainer_state.json").read_text())["global_step"] == steps
    text = run.log.read_text()
    assert [rank for rank in range(3) if f"process {rank} of 3 ends at step {steps}" not in text] == []
