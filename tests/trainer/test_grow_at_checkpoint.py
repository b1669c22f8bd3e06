"""A script under `regroup run` grows right after its own checkpoint: real processes, a real directory, the real agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.local_run import LocalRun
from harness.polling import until
from tests.long import only_long

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
world_size, rank, directory = dist.get_world_size(), dist.get_rank(), Path(sys.argv[1])
saved = Path(os.environ["REGROUP_CHECKPOINT_DIR"]) / "step.pt"
step = int(saved.read_text()) if saved.exists() else 0
while True:
    wish = torch.tensor([float(rank == 0 and (directory / name).exists()) for name in ("end", "save")])
    dist.all_reduce(wish)
    if wish[0].item():
        break
    time.sleep(0.1)
    step += 1
    if rank == 0:
        with open(directory / "steps.jsonl", "a") as trace:
            trace.write(json.dumps([world_size, step]) + "\\n")
        if wish[1].item():
            (directory / "save").unlink()
            aside = saved.with_suffix(".tmp")
            aside.write_text(str(step))
            aside.replace(saved)
dist.destroy_process_group()
"""
MOST_LOST = 100
"""Steps of 0.1 s between the checkpoint and the change of size, on a busy machine. The files settle for a second."""


def _degraded(status: dict[str, Any]) -> str:
    said: dict[str, Any] = next((c for c in status.get("conditions", ()) if c["type"] == "Degraded"), {})
    return str(said.get("reason", ""))


def _steps(directory: Path) -> list[tuple[int, int]]:
    """Return (world size, step) of each step."""
    lines = (directory / "steps.jsonl").read_text().splitlines(keepends=True)
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


@only_long("tests/e2e/test_scripts.py has it on real pods")
def test_script_grows_right_after_its_checkpoint(tmp_path: Path) -> None:
    script, checkpoints = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    checkpoints.mkdir()
    options = ["--workers", "1", "--min", "1", "--max", "2", "--checkpoint", str(checkpoints)]
    run = LocalRun(tmp_path, *options, str(script), str(tmp_path))
    try:
        first = run.trains(1)
        run.change_spec(lambda spec: spec["elasticPolicy"].update(growAt="Checkpoint"))
        run.wait(lambda status: status.get("tier") == "Script", "the script is known to be one")
        run.scale(2)
        waiting = run.wait(lambda status: _degraded(status) == "WaitingForCheckpoint", "the new worker waits")
        steps = len(_steps(tmp_path))
        until(lambda: len(_steps(tmp_path)) > steps + 30, "one worker trains on", timeout_s=60)
        assert run.status()["membership"]["generation"] == waiting["membership"]["generation"]
        (tmp_path / "save").touch()
        run.trains(2, after=first["membership"]["generation"])
        (tmp_path / "end").touch()
        assert run.process.wait(60) == 0
    finally:
        run.close()
    steps_of = {size: [step for world, step in _steps(tmp_path) if world == size] for size in (1, 2)}
    saved = int((checkpoints / "step.pt").read_text())
    assert steps_of[2][0] == saved + 1, "it continues from the checkpoint"
    assert saved > 30
    assert steps_of[1][-1] - saved <= MOST_LOST
