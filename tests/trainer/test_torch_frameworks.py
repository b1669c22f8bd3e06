"""Samples of Accelerate, Lightning, DeepSpeed and Hugging Face's Trainer under `regroup run`, with the real frameworks.

A process is killed, another one is stopped, the job grows, and the program ends as it should. Each goes on from its own checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.local_run import LocalRun
from tests.long import only_long
from tests.trainer.framework_kit import (
    EVERY,
    PACE_S,
    ROOT,
    SAMPLES,
    STEPS,
    all_begun,
    begun,
    breaks_and_goes_on,
    ended,
    python_with,
)

PATTERN = r"^step (?P<step>\d+)  loss (?P<loss>\S+)"
ELASTIC = ("--workers", "2", "--min", "1", "--max", "3", "--join-quiet", "0.2")
EXTENSIONS = ROOT / ".cache" / "torch_extensions"
"""DeepSpeed builds a C++ operator at its first start, which takes a minute of CPU time. It is kept from run to run."""


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(EXTENSIONS))


def on_path(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    """Let the launchers of this interpreter be found."""
    monkeypatch.setenv("PATH", str(Path(python).parent) + os.pathsep + os.environ["PATH"])


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((one for one in status.get("conditions", ()) if one["type"] == kind), {})


def victim(run: LocalRun) -> int:
    return run.trainers()["local-worker-1-0"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("module", "command"),
    [
        pytest.param("accelerate", ("accelerate_train.py",), id="Accelerate"),
        pytest.param("lightning", ("lightning_train.py",), id="Lightning"),
        pytest.param("deepspeed", ("deepspeed_train.py", "--stage", "0"), id="DeepSpeed"),
    ],
)
def test_killed_stopped_and_grown_script_goes_on_from_its_checkpoint_to_the_right_end(
    start: Callable[..., LocalRun], tmp_path: Path, module: str, command: tuple[str, ...]
) -> None:
    framework = ("--framework", "DeepSpeed") if module == "deepspeed" else ()
    run = start(
        *(*framework, *ELASTIC, "--hang-seconds", "20", "--progress-log", PATTERN),
        *(python_with(module), str(SAMPLES / command[0]), *command[1:], "--checkpoint", str(tmp_path / "saved")),
        *("--steps", str(STEPS), "--every", str(EVERY), "--pace", PACE_S),
    )
    seen = run.wait(lambda s: s.get("progress", {}).get("step", 0) > EVERY, "a checkpoint", timeout_s=300)
    assert begun(run, 2) == {(0, 0), (1, 0)}
    assert (seen["progress"]["source"], seen["summary"]["ready"]) == ("Logged", "2/2")
    pods = set(run.agents())
    breaks_and_goes_on(run, victim(run))
    breaks_and_goes_on(run, victim(run), signum=signal.SIGSTOP)
    assert set(run.agents()) == pods, "the pods stay"
    incidents = {one["cause"] for one in run.status()["incidents"]}
    assert {"ProcessExited", "Hung"} <= incidents, incidents

    run.scale(3)
    run.wait(lambda _: all_begun(run, 3, EVERY - 1), "three go on from the checkpoint", timeout_s=180)
    last = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=180)
    assert run.process.wait(60) == 0
    assert (last["tier"], last["progress"]["step"]) == ("Script", STEPS)
    assert last["progress"]["loss"] < 0.5, "a model that knows nothing has a loss of 20"
    assert ended(run, 3, f"ends at step {STEPS}") == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("module", "launcher", "script", "kept"),
    [
        pytest.param("accelerate", ("accelerate", "launch"), "accelerate_train.py", {"step-20", "step-30"}, id="Accelerate"),
        pytest.param("lightning", ("python",), "lightning_train.py", None, id="Lightning"),
        pytest.param(
            "deepspeed",
            ("deepspeed",),
            "deepspeed_train.py",
            {"global_step20", "global_step30", "latest"},
            id="DeepSpeed",
        ),
    ],
)  # fmt: skip
def test_steps_are_counted_without_a_pattern(
    start: Callable[..., LocalRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    launcher: tuple[str, ...],
    script: str,
    kept: set[str] | None,
) -> None:
    """A sample that deletes its older checkpoints keeps two, and no file of a save."""
    on_path(monkeypatch, python_with(module))
    framework = ("--framework", "DeepSpeed") if module == "deepspeed" else ()
    saved = tmp_path / "saved"
    run = start(
        *(*framework, "--workers", "2", *launcher, str(SAMPLES / script), "--checkpoint", str(saved)),
        *("--steps", "30", "--every", "10", "--pace", "0.3"),
    )
    seen = run.wait(lambda s: s.get("progress", {}).get("optimizerSteps", 0) > 0, "a counted step", timeout_s=240)
    assert seen["progress"]["source"] == "Counted"
    assert run.process.wait(120) == 0, run.log.read_text()
    assert kept is None or {one.name for one in saved.iterdir() if not one.name.endswith(".py")} == kept


FABRIC = """
import os
import lightning as L
import torch
if os.environ["RANK"] == "0":
    alone = L.Fabric(accelerator="cpu", devices=1, num_nodes=1)
    alone.launch()
    print("alone in a world of", alone.world_size)
nodes, devices = (int(os.environ["PL_TRAINER_" + name]) for name in ("NUM_NODES", "DEVICES"))
fabric = L.Fabric(accelerator="cpu", devices=devices, num_nodes=nodes)
fabric.launch()
print(f"process {fabric.global_rank} of {fabric.world_size} ends with", int(fabric.all_reduce(torch.ones(1), reduce_op="sum")))
"""


@pytest.mark.slow
def test_fabric_of_lightning_forms_one_group(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    """There are two processes in each of two workers. One of them works alone before."""
    script = tmp_path / "fabric.py"
    script.write_text(FABRIC)
    run = start("--workers", "2", "--processes-per-worker", "2", python_with("lightning"), str(script))
    assert run.process.wait(120) == 0, run.log.read_text()
    assert "alone in a world of 1" in run.log.read_text()
    assert ended(run, 4, "ends with 4") == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=only_long("as stage 1")), 3])
def test_deepspeed_with_zero_refuses_another_size_and_goes_on_at_the_size_before(
    start: Callable[..., LocalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """The engine's checkpoint has a part for each rank. The launcher is DeepSpeed's own, which is translated."""
    python, steps = python_with("deepspeed"), 900
    on_path(monkeypatch, python)
    run = start(
        *("--framework", "DeepSpeed", *ELASTIC, "--progress-log", PATTERN, "deepspeed"),
        *(str(SAMPLES / "deepspeed_train.py"), "--stage", str(stage), "--checkpoint", str(tmp_path / "saved")),
        *("--steps", str(steps), "--every", str(EVERY), "--pace", PACE_S),
    )
    run.wait(lambda s: s.get("progress", {}).get("step", 0) > EVERY, "a checkpoint", timeout_s=300)
    breaks_and_goes_on(run, victim(run))
    run.wait(lambda s: s.get("lastGoodSize") == 2, "two workers have trained for a while")
    run.scale(3)
    refused = run.wait(lambda s: "refusedSize" in s, "DeepSpeed refuses three processes", timeout_s=180)
    assert (refused["refusedSize"]["workers"], refused["refusedSize"]["backTo"]) == (3, 2)
    status = run.trains(2, after=refused["refusedSize"]["generation"])
    assert condition(status, "Degraded")["reason"] == "SizeRefused"
    assert "DP world size" in condition(status, "Degraded")["message"]
    last = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=240)
    assert run.process.wait(60) == 0
    assert (last["progress"]["step"], begun(run, 3)) == (steps, set())
    assert last["progress"]["loss"] < 0.5, "a model that knows nothing has a loss of 20"
    assert ended(run, 2, f"ends at step {steps}") == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_build_of_deepspeed_that_was_killed_does_not_stop_the_next_start(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    """A lock that a killed process has left in the directory of the operator: torch alone would wait for it for ever."""
    if ROOT.stat().st_dev != Path("/").stat().st_dev:
        pytest.skip("the repository is on a volume, where locks are left alone")
    lock = EXTENSIONS / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    run = start(
        *("--framework", "DeepSpeed", "--workers", "2", "--progress-log", PATTERN),
        *(python_with("deepspeed"), str(SAMPLES / "deepspeed_train.py"), "--checkpoint", str(tmp_path / "saved")),
        *("--steps", "20", "--every", "10"),
    )
    last = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=240)
    assert last["progress"]["step"] == 20
    assert not lock.exists()


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
    python, steps = python_with("transformers"), 600
    on_path(monkeypatch, python)
    output = tmp_path / "output"
    run = start(
        *(*ELASTIC, "--hang-seconds", "20", *launcher),
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
    breaks_and_goes_on(run, victim(run))
    breaks_and_goes_on(run, victim(run), signum=signal.SIGSTOP)
    again = run.status()
    assert 0 < again["progress"]["loss"] < 4, "the loss of a model that knows nothing is ln(64) = 4.16"

    run.scale(3)
    run.wait(lambda _: all_begun(run, 3, EVERY - 1), "three go on from a checkpoint", timeout_s=180)
    last = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=240)
    assert run.process.wait(60) == 0
    assert (last["tier"], last["summary"]["progress"]) == ("Script", "100%")
    assert json.loads((output / f"checkpoint-{steps}" / "trainer_state.json").read_text())["global_step"] == steps
    assert ended(run, 3, f"ends at step {steps}") == []
