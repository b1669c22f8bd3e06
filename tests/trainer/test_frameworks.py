"""Samples of JAX, XGBoost and TensorFlow under `regroup run`: a kill, growth, and the right end.

Each goes on from its own checkpoint. Its interpreter is one that has the framework. Where there is none the test is skipped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.local_run import LocalRun
from harness.processes import children
from tests.trainer.framework_kit import EVERY, PACE_S, SAMPLES, STEPS, all_begun, begun, ended, python_with


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
    last = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=180)
    assert run.process.wait(60) == 0
    assert (last["tier"], last["progress"]["step"]) == ("Script", STEPS)
    assert ended(run, 3, end) == []
