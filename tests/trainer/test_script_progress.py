"""Programs that know nothing of us under `regroup run`: one posts as Hugging Face's Trainer does, one prints lines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.local_run import LocalRun
from tests.long import only_long

POSTS = """
import json, os, sys, time, urllib.request
from pathlib import Path

directory = Path(sys.argv[1])


class Callback:
    # What KubeflowCallback of transformers 5.24 does, with a shorter time between two posts.
    def post(self, percent, metrics):
        token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text(encoding="utf-8").strip()
        status = {"lastUpdatedTime": "2026-01-01T00:00:00+00:00", "progressPercentage": percent, "estimatedRemainingSeconds": 1}
        status["metrics"] = [{"name": k, "value": str(v)} for k, v in metrics.items()]
        request = urllib.request.Request(
            os.environ["KUBEFLOW_TRAINER_SERVER_URL"],
            data=json.dumps({"trainerStatus": status}).encode("utf-8"),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=5, context=None) as response:
            assert response.status == 200


saved, rank = directory / "step", int(os.environ["RANK"])
step = int(saved.read_text()) if saved.exists() else 5000
callback = Callback()
if rank == 0:
    callback.post(0, {"total_steps": 9000})
while not (directory / "end").exists():
    time.sleep(0.1)
    step += 1
    if rank == 0:
        saved.write_text(str(step))
        callback.post(min(99, 100 * step // 9000), {"loss": 0.5, "current_step": step, "total_steps": 9000, "current_epoch": 1.5})
if rank == 0:
    callback.post(100, {"loss": 0.5, "train_loss": 0.7})
"""

PRINTS = """
import sys, time
from pathlib import Path

directory = Path(sys.argv[1])
step = 0
while step < 400:
    time.sleep(0.02)
    if not (directory / "hangs").exists():
        step += 1
        print(f"iter {step}/400: loss {1 / step:.4f}, time 20ms")
"""
COUNTS = """
import sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    for _ in range(4):  # gradient accumulation
        model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    end = torch.tensor([float((Path(sys.argv[1]) / "end").exists())])
    dist.all_reduce(end)
    if end.item():
        break
"""
PATTERN = r"iter (?P<step>\d+)/(?P<total>\d+): loss (?P<loss>[0-9.]+)"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., LocalRun]:
    def begin(text: str, *options: str) -> LocalRun:
        script = tmp_path / "train.py"
        script.write_text(text)
        return LocalRun(tmp_path, *options, str(script), str(tmp_path))

    return begin


@only_long(
    "tests/e2e/test_scripts.py has the protocol on real pods, and tests/unit/controller what follows from a crash"
)
def test_program_that_posts_shows_its_step_and_resumes(
    run: Callable[..., LocalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy of the environment gets nothing of it. The first post after a start says no step, and hides none."""
    monkeypatch.setenv("REGROUP_PRELOAD", "json")
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:9")
    job = run(POSTS, "--workers", "2", "--min", "1", "--max", "2")
    try:
        seen = job.wait(lambda s: s.get("progress", {}).get("step", 0) > 5010, "the program's own step")
        progress = seen["progress"]
        assert (progress["source"], progress["totalSteps"], progress["loss"]) == ("Reported", 9000, 0.5)
        assert seen["summary"]["progress"] == f"{100 * progress['step'] // 9000}%"
        job.wait(lambda s: bool(s["summary"]["eta"]), "an ETA")
        os.kill(job.trainers()["local-worker-1-0"], signal.SIGKILL)
        again = job.wait(
            lambda s: s["membership"]["generation"] > 1 and s["progress"]["step"] > progress["step"] + 20,
            "steps after a crash",
        )
        assert again["progress"]["totalSteps"] == 9000
        (tmp_path / "end").touch()
        ended = job.wait(lambda s: s.get("phase") == "Succeeded", "the end")
        assert (ended["summary"]["progress"], ended["summary"]["loss"]) == ("100%", "0.5")
        assert job.process.wait(60) == 0
        assert "/9000  loss 0.5" in job.log.read_text(), "regroup run shows it"
    finally:
        job.close()


def test_program_that_prints_lines_shows_them_and_is_restarted_where_it_hangs(
    run: Callable[..., LocalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only process writes stdout, which comes through the agent because there is a pattern."""
    monkeypatch.setenv("REGROUP_PRELOAD", "json")
    job = run(PRINTS, "--workers", "1", "--hang-seconds", "2", "--progress-log", PATTERN)
    try:
        seen = job.wait(lambda s: s.get("progress", {}).get("step", 0) > 100, "a step")
        assert (seen["progress"]["source"], seen["progress"]["totalSteps"]) == ("Logged", 400)
        began_s = time.monotonic()
        (tmp_path / "hangs").touch()
        hung = job.wait(lambda s: s["membership"]["generation"] == 2, "a restart")
        assert 10.0 < time.monotonic() - began_s < 60.0
        assert hung["incidents"][-1]["cause"] == "Hung"
        assert "The script's progress has not changed for 12 s: rank 0" in hung["incidents"][-1]["decision"]
        (tmp_path / "hangs").unlink()
        ended = job.wait(lambda s: s.get("phase") == "Succeeded", "the end")
        assert (ended["summary"]["step"], ended["summary"]["progress"]) == ("400", "100%")
        assert ended["restarts"]["processes"] == 1
        assert "iter 400/400: loss 0.0025, time 20ms\n" in job.log.read_text(), "what it prints is in the log as it was"
    finally:
        job.close()


def test_torch_loop_that_says_nothing_shows_its_optimizer_steps(run: Callable[..., LocalRun], tmp_path: Path) -> None:
    job = run(COUNTS, "--workers", "2", "--min", "1", "--max", "2")
    try:
        seen = job.wait(lambda s: s.get("progress", {}).get("optimizerSteps", 0) > 20, "counted steps")
        assert seen["progress"]["source"] == "Counted"
        assert "step" not in seen["progress"]
        assert seen["summary"]["step"] == f"+{seen['progress']['optimizerSteps']}"
        os.kill(job.trainers()["local-worker-1-0"], signal.SIGKILL)
        again = job.wait(
            lambda s: s["membership"]["generation"] > 1 and s["progress"]["optimizerSteps"] < 20,
            "a count that begins anew",
        )
        assert again["progress"]["optimizerSteps"] > 0
        (tmp_path / "end").touch()
        job.wait(lambda s: s.get("phase") == "Succeeded", "the end")
    finally:
        job.close()
