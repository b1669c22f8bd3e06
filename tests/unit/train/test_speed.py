"""Tokens a second and MFU, and what is written of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from regroup.train import command
from regroup.train.board import curves
from regroup.train.config import parse
from regroup.train.flops import flops_per_token, peak_flops
from regroup.train.speed import Meter, Speed
from regroup.train.tasks import build
from regroup.train.tasks.task import Chain, Task
from regroup.train.trace import TRACED_STEPS, Trace
from regroup.transaction.laps import StepTimes

CPU = torch.device("cpu")
TIMES = StepTimes(0.25, 0.25, 0.5, 0.25, 0.25, 0.25, 0.25, between=30.0)


def test_flops_of_a_token_of_palm_540b() -> None:
    """PaLM's appendix B: 540.35e9 parameters, 118 layers, 48 heads of 256, samples of 2048; 46.2 % at 238.3e3 tokens/s on 6144 TPUs
    of 275e12 FLOP/s, and 45.7 % without the attention."""
    tokens_s, peak = 238.3e3, 6144 * 275e12
    assert tokens_s * flops_per_token(540_350_000_000, 118, 48 * 256, 2048) / peak == pytest.approx(0.462, abs=5e-4)
    assert tokens_s * flops_per_token(540_350_000_000, 0, 0, 2048) / peak == pytest.approx(0.457, abs=5e-4)


@pytest.mark.parametrize(
    ("gpu", "precision", "want"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("Tesla T4", "float16", None),
        ("", "bfloat16", None),
    ],
)
def test_peak_of_a_gpu(gpu: str, precision: str, want: float | None) -> None:
    assert peak_flops(gpu, precision) == want


def test_speed_is_over_the_steps_since_the_last_line_without_what_is_between_them() -> None:
    meter = Meter(Task(Chain({}, [], {}), None, None, tokens=128, flops_per_token=1e6), peak=1e9)
    for _ in range(4):
        meter.add(TIMES, 10)
    assert meter.take(world_size=2) == Speed(2.0, 640.0, "tokens", 0.32)
    meter.add(TIMES._replace(backward=2.5), 10)
    assert meter.take(world_size=1).step_s == 4.0
    meter = Meter(Task(Chain({}, [], {}), None, None), peak=1e9)
    meter.add(TIMES, 10)
    assert meter.take(1) == Speed(2.0, 5.0, "samples", None)


def test_language_model_counts_all_but_its_positions() -> None:
    task = build(parse({"task": "language_model", "steps": 1, "global_batch": 1, "microbatch": 1}).task)
    assert task.tokens == 128
    assert task.flops_per_token == 6 * (842_496 - 128 * 128) + 12 * 4 * 128 * 128


def test_points_of_a_step() -> None:
    class Committed:
        loss, learning_rates, norm, noise_scale, times = 0.5, (0.1, 0.2), 2.0, 96.0, TIMES

    step: Any = Committed()
    points = curves(step, Speed(2.0, 640.0, "tokens", 0.32), CPU)
    assert points.pop("step seconds/between") == 30.0
    assert {name for name in points if name.startswith("step seconds/")} == {
        f"step seconds/{part}" for part in StepTimes._fields if part != "between"
    }
    assert {name: value for name, value in points.items() if "seconds/" not in name} == {
        "loss": 0.5, "learning rate": 0.1, "gradient norm": 2.0, "noise scale": 96.0, "speed/tokens per second": 640.0,
        "speed/MFU": 0.32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "is_main", "recorded"),
    [
        pytest.param([1, 2, 3, 4, 5], True, [2, 3, 4], id="three steps"),
        pytest.param([2, 2, 3, 4, 5], True, [2, 2, 3, 4], id="a step that comes again"),
        pytest.param([2, 3], True, [2, 3], id="the run ends before"),
        pytest.param([2, 1, 2, 3, 4, 5], True, [2, 3, 4], id="back before the first: the file is written again"),
        pytest.param([3, 4, 5], True, None, id="a run that continues after the first"),
        pytest.param([1, 2, 3, 4, 5], False, None, id="another rank"),
    ],
)
def test_trace_has_its_steps(steps: list[int], is_main: bool, recorded: list[int] | None, tmp_path: Path) -> None:
    trace = Trace(tmp_path, 2, CPU)
    for step in steps:
        trace.begin(step, is_main=is_main)
        with torch.profiler.record_function(f"step-{step}"):
            torch.ones(2).sum()
    trace.end()
    assert TRACED_STEPS == 3
    if recorded is None:
        assert not list(tmp_path.iterdir())
        return
    events = json.loads(trace.path.read_text())["traceEvents"]
    names = [
        event["name"] for event in sorted(events, key=lambda e: e.get("ts", 0)) if event.get("cat") == "user_annotation"
    ]
    assert names == [f"step-{step}" for step in recorded]


class _Without:
    """Finds no tensorboard, as where it is not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")


def test_missing_tensorboard_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("{task: digits, steps: 1, global_batch: 8, microbatch: 8, tensorboard: runs}")
    monkeypatch.chdir(tmp_path)
    loaded = [name for name in sys.modules if name.split(".")[0] == "tensorboard"]
    for name in ("torch.utils.tensorboard", *loaded):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Without(), *sys.meta_path])
    assert command.main([str(tmp_path / "c.yaml")]) == 2
    assert capsys.readouterr().err == (
        "regroup: regroup.train needs the package tensorboard, which is not installed. Install it.\n"
    )
    assert not (tmp_path / "runs").exists()
