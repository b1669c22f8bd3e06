"""Samples of JAX, XGBoost and TensorFlow under `regroup run`: killed, stopped, grown and shrunk, to the right end.

Each goes on from its own checkpoint. Its interpreter is one that has the framework. Where there is none the test is skipped.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.local_run import LocalRun
from harness.polling import until
from tests.trainer.framework_kit import (
    EVERY,
    PACE_S,
    SAMPLES,
    all_begun,
    begins,
    begun,
    breaks_and_goes_on,
    ended,
    process_of,
    python_with,
)

PATTERN = r"^step (?P<step>\d+)  \w+ (?P<loss>\S+)"
STEPS = 1200
SURVIVOR_ENDS_S = 30.0
"""SIGTERM, 10 s of grace, and what a busy machine needs. JAX alone would let a survivor wait for 96 s."""


def incidents(run: LocalRun) -> set[str]:
    return {one["cause"] for one in run.status()["incidents"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("framework", "module", "script", "end"),
    [
        pytest.param("JAX", "jax", "jax_train.py", "ends with weights -2.5207", id="JAX"),
        pytest.param("JAX", "orbax", "jax_orbax_train.py", "ends with weights -2.5207", id="Orbax"),
        pytest.param("XGBoost", "xgboost", "xgboost_train.py", f"ends with {STEPS} trees", id="XGBoost"),
        pytest.param("TensorFlow", "tensorflow", "tensorflow_train.py", f"ends at step {STEPS}", id="TensorFlow"),
        pytest.param("TensorFlow", "tf_keras", "keras_train.py", f"ends with optimizer step {STEPS}", id="Keras"),
    ],
)
def test_killed_stopped_and_resized_script_goes_on_from_its_checkpoint_to_the_right_end(
    start: Callable[..., LocalRun], tmp_path: Path, framework: str, module: str, script: str, end: str
) -> None:
    python = python_with(module)
    run = start(
        *("--framework", framework, "--workers", "2", "--min", "1", "--max", "3", "--join-quiet", "0.2"),
        *("--hang-seconds", "20", "--progress-log", PATTERN),
        *(python, str(SAMPLES / script), "--checkpoint", str(tmp_path / "saved")),
        *("--steps", str(STEPS), "--every", str(EVERY), "--pace", PACE_S),
    )
    seen = run.wait(lambda s: s.get("progress", {}).get("step", 0) > EVERY, "a checkpoint", timeout_s=240)
    assert begun(run, 2) == {(0, 0), (1, 0)}
    assert seen["progress"]["source"] == "Logged"
    agents = set(run.agents())

    # The first process is the coordinator of JAX, the tracker of XGBoost and the chief of TensorFlow.
    coordinator, survivor = process_of(run, 0), process_of(run, 1)
    began_s = time.monotonic()
    breaks_and_goes_on(run, coordinator)
    assert not Path(f"/proc/{survivor}").exists(), f"it lives {time.monotonic() - began_s:.0f} s after the coordinator"
    # If only one were stopped, TensorFlow's heartbeats would end the other one.
    breaks_and_goes_on(run, process_of(run, 0), process_of(run, 1), signum=signal.SIGSTOP)
    assert set(run.agents()) == agents, "a pod was replaced"
    assert {"ProcessExited", "Hung"} <= incidents(run)

    for size in (3, 1):
        generation = run.status()["membership"]["generation"]
        run.scale(size)
        run.trains(size, after=generation)
        until(functools.partial(all_begun, run, size, EVERY - 1), f"{size} go on from the checkpoint", timeout_s=180)
    last = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=240)
    assert run.process.wait(60) == 0
    assert (last["tier"], last["progress"]["step"]) == ("Script", STEPS)
    assert ended(run, 1, end) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("slot", [0, 1], ids=["the coordinator", "another process"])
def test_survivor_of_a_process_of_jax_ends_soon(start: Callable[..., LocalRun], tmp_path: Path, slot: int) -> None:
    """JAX alone lets a survivor wait for its heartbeats, and catches SIGTERM. The agent ends it."""
    run = start(
        *("--framework", "JAX", "--workers", "2", "--progress-log", PATTERN, python_with("jax")),
        *(str(SAMPLES / "jax_train.py"), "--checkpoint", str(tmp_path / "saved")),
        *("--steps", "100000", "--every", str(EVERY), "--pace", PACE_S),
    )
    run.wait(lambda s: s.get("progress", {}).get("step", 0) > EVERY, "a checkpoint", timeout_s=240)
    survivor = Path(f"/proc/{process_of(run, 1 - slot)}")
    os.kill(process_of(run, slot), signal.SIGKILL)
    until(lambda: not survivor.exists(), "the survivor ends", timeout_s=SURVIVOR_ENDS_S)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_of_a_parameter_server_end_with_the_chief_and_start_again_together(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    """The sample takes a chief, a server of parameters and workers from the list of TF_CONFIG. Each of them is lost once."""
    steps, python = 1500, python_with("tensorflow")
    run = start(
        *("--framework", "TensorFlow", "--workers", "3", "--min", "3", "--max", "4", "--join-quiet", "0.2"),
        *("--hang-seconds", "20", "--progress-log", PATTERN, python, str(SAMPLES / "tensorflow_ps_train.py")),
        *("--checkpoint", str(tmp_path / "saved"), "--steps", str(steps), "--every", str(EVERY), "--pace", PACE_S),
    )

    def chief_begins(size: int) -> list[int]:
        return [step for rank, world_size, step in begins(run) if (rank, world_size) == (0, size)]

    def chief_has_begun(times: int) -> bool:
        return len(chief_begins(3)) >= times

    def is_at(step: int) -> bool:
        return bool(run.status()["progress"]["step"] >= step)

    def serves(size: int) -> int:
        return run.log.read_text().count(f"of {size} serves as ")

    run.wait(lambda s: s.get("progress", {}).get("step", 0) >= EVERY, "a checkpoint", timeout_s=240)
    for lost, (slot, signum) in enumerate(
        [(2, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)], start=1
    ):
        os.kill(process_of(run, slot), signum)
        until(functools.partial(chief_has_begun, lost + 1), f"the chief goes on after {slot}", timeout_s=180)
        assert serves(3) == 2 * (lost + 1), "all processes start again"
        newest = chief_begins(3)[-1]
        assert newest >= EVERY * lost, "from a checkpoint"
        until(functools.partial(is_at, newest + 2 * EVERY), "two more checkpoints", timeout_s=180)
    assert {"ProcessExited", "Hung"} <= incidents(run)

    run.scale(4)
    run.wait(lambda _: bool(chief_begins(4)) and serves(4) == 3, "another worker serves", timeout_s=180)
    last = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=240)
    assert run.process.wait(60) == 0
    assert (last["tier"], last["progress"]["step"]) == ("Script", steps)
    log = run.log.read_text()
    ends = (f"process 0 of 4 ends at step {steps}", "process 1 of 4 ends as ps 0", "process 2 of 4 ends as worker 0")
    assert [one for one in (*ends, "process 3 of 4 ends as worker 1") if one not in log] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("framework", "module", "script", "workers", "end"),
    [
        pytest.param("XGBoost", "xgboost", "xgboost_train.py", 1, "step 25  rmse", id="XGBoost"),
        pytest.param("TensorFlow", "tensorflow", "tensorflow_ps_train.py", 3, "step 25  loss", id="ParameterServer"),
    ],
)
def test_steps_after_the_last_multiple_are_saved_too(
    start: Callable[..., LocalRun], tmp_path: Path, framework: str, module: str, script: str, workers: int, end: str
) -> None:
    run = start(
        *("--framework", framework, "--workers", str(workers), python_with(module), str(SAMPLES / script)),
        *("--checkpoint", str(tmp_path / "saved"), "--steps", "25", "--every", "10"),
    )
    assert run.process.wait(200) == 0
    assert end in run.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fit_that_has_ended_is_not_trained_again(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    """A failure after `fit` starts the script again."""
    for attempt in range(2):
        (tmp_path / str(attempt)).mkdir()
        run = start(
            *("--framework", "TensorFlow", "--workers", "2", python_with("tf_keras"), str(SAMPLES / "keras_train.py")),
            *("--checkpoint", str(tmp_path / "saved"), "--steps", "20", "--every", "10"),
            directory=tmp_path / str(attempt),
        )
        assert run.process.wait(140) == 0, run.log.read_text()
        assert ended(run, 2, "ends with optimizer step 20") == []
        assert len(begins(run)) == (0 if attempt else 2)
    assert (tmp_path / "saved" / "model.keras").is_file()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_server_of_parameters_that_never_reaches_a_chief_ends() -> None:
    with socket.socket() as chief, socket.socket() as own, socket.socket() as worker:
        for one in (chief, own, worker):
            one.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in (chief, own, worker)]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 1}}
    done = subprocess.run(
        [python_with("tensorflow"), str(SAMPLES / "tensorflow_ps_train.py"), "--wait", "2"],
        env={**os.environ, "TF_CONFIG": json.dumps(config)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "has not reached the chief for 2 s" in done.stdout
