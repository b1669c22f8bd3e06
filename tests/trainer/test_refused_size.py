"""A script that does not run with every number of workers, as nanoGPT, under `regroup run` with real processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from harness.local_run import LocalRun
from tests.long import only_long

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

gradient_accumulation_steps = 4
dist.init_process_group("gloo")
world_size, rank, directory = dist.get_world_size(), dist.get_rank(), Path(sys.argv[1])
assert gradient_accumulation_steps % world_size == 0
saved = directory / "step"
step = int(saved.read_text()) if saved.exists() else 0
while True:
    end = torch.tensor([float(rank == 0 and (directory / "end").exists())])
    dist.all_reduce(end)
    if end.item():
        break
    time.sleep(0.1)
    step += 1
    if rank == 0:
        with open(directory / "steps.jsonl", "a") as trace:
            trace.write(json.dumps([time.time(), world_size, step]) + "\\n")
        (directory / "step.tmp").write_text(str(step))
        (directory / "step.tmp").replace(saved)
dist.destroy_process_group()
"""


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def _steps(directory: Path) -> list[tuple[float, int, int]]:
    """Return (time, world size, step) of each step."""
    lines = (directory / "steps.jsonl").read_text().splitlines(keepends=True)
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


@only_long("tests/e2e/test_scripts.py has it on real pods")
def test_script_that_asserts_its_world_size_trains_on_at_the_size_before(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = LocalRun(tmp_path, "--workers", "2", "--min", "1", "--max", "4", str(script), str(tmp_path))
    try:
        run.wait(lambda status: status.get("lastGoodSize") == 2, "two workers have trained for a while")
        run.scale(3)
        refused = run.wait(lambda status: "refusedSize" in status, "the script refuses three workers")
        assert (refused["refusedSize"]["workers"], refused["refusedSize"]["backTo"]) == (3, 2)
        status = run.trains(2, after=refused["refusedSize"]["generation"])
        back_at = time.time()
        run.wait(lambda _: _steps(tmp_path)[-1][0] > back_at + 3.0, "two workers train on")
        said = _condition(run.status(), "Degraded")
        assert (said["status"], said["reason"]) == ("True", "SizeRefused")
        assert "The script refuses 3 workers: it failed in every one of them" in said["message"]
        assert "AssertionError" in said["message"]
        assert status["restarts"].get("total", 0) == 0, "a refused size is no failure"
        run.scale(4)
        run.trains(4, after=status["membership"]["generation"])
        (tmp_path / "end").touch()
        assert run.process.wait(60) == 0
    finally:
        run.close()
    steps = _steps(tmp_path)
    assert {world for _, world, _ in steps} == {2, 4}
    assert [step for _, _, step in steps] == sorted({step for _, _, step in steps}), "no step was lost"


def test_loss_and_scale_keep_to_the_sizes(tmp_path: Path) -> None:
    """The script never sees another size than those of the list."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = LocalRun(tmp_path, "--workers", "3", "--sizes", "1,2,4", str(script), str(tmp_path))
    try:
        first = run.trains(2)
        assert _condition(first, "Training")["message"].endswith(
            "2 is the largest size of spec.elasticPolicy.sizes up to spec.replicas (3)."
        )
        run.scale(4)
        grown = run.trains(4, after=first["membership"]["generation"])
        run.scale(3)
        run.trains(2, after=grown["membership"]["generation"])
        (tmp_path / "end").touch()
        assert run.process.wait(60) == 0
    finally:
        run.close()
    assert {world for _, world, _ in _steps(tmp_path)} <= {1, 2, 4}
