"""Commands of launchers under `regroup run`: the program runs as the launcher starts it, and restarts and resizes as any other."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.local_run import LocalRun
from harness.polling import until

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
here = Path(__file__).parent
one = torch.ones(1)
dist.all_reduce(one)
said = {"world": int(one.item()), "rank": dist.get_rank(), "local": os.environ["LOCAL_RANK"], "args": sys.argv[1:],
        "name": __name__, "threads": os.environ.get("OMP_NUM_THREADS"),
        "accelerate": [os.environ.get("ACCELERATE_MIXED_PRECISION"), os.environ.get("ACCELERATE_USE_CPU")],
        "A": os.environ.get("A")}
with open(here / "said.jsonl", "a") as file:
    file.write(json.dumps(said) + "\\n")
while "--wait" in sys.argv:  # until the test ends the job at this size
    end = torch.tensor([float((here / f"end-{said['world']}").exists())])
    dist.all_reduce(end)
    if end.item():
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"])  # of torchrun
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def said(script: Path) -> list[dict[str, Any]]:
    """Return what each process has written, in the order of their starts."""
    path = script.parent / "said.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ends_well(run: LocalRun) -> str:
    code = run.process.wait(180)
    text = run.log.read_text()
    assert code == 0, text
    return text


def test_torchrun_restarts_what_failed_and_is_resized(start: Callable[..., LocalRun], script: Path) -> None:
    """`--nnodes 1:3` is the job's elastic policy. All processes get the program's arguments, and ranks of their generation."""
    run = start(
        *("--workers", "1", "torchrun", "--nproc-per-node", "2", "--nnodes", "1:3", "--max-restarts", "3"),
        *(str(script), "--wait", "--nnodes", "9"),
    )
    run.trains(2)
    generation = run.status()["membership"]["generation"]
    until(lambda: len(said(script)) == 2, "both have begun", details=run.log.read_text)
    os.kill(next(iter(run.trainers().values())), signal.SIGKILL)
    run.trains(2, after=generation)
    until(lambda: len(said(script)) == 4, "both have begun again", details=run.log.read_text)
    run.scale(2)
    run.trains(4)
    (script.parent / "end-4").touch()
    text = ends_well(run)
    assert "torchrun --max-restarts is ignored: " in text
    last = said(script)[-4:]
    assert sorted((one["rank"], one["local"], one["world"]) for one in last) == [
        (0, "0", 4),
        (1, "1", 4),
        (2, "0", 4),
        (3, "1", 4),
    ]
    assert {(*one["args"], one["name"]) for one in last} == {("--wait", "--nnodes", "9", "__main__")}


@pytest.mark.parametrize(
    ("command", "args", "local"),
    [
        pytest.param(("env", "A=b", "torchrun", "--nproc-per-node=2"), [], "", id="env before it"),
        pytest.param(
            (sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2"),
            [],
            "--local-rank",
            id="as a module",
        ),
        pytest.param(("mpirun", "-np", "2", "-x", "A=b", sys.executable), [], "", id="mpirun that is not installed"),
        pytest.param(("horovodrun", "-np", "2", sys.executable, "-u"), [], "", id="horovodrun that is not installed"),
    ],
)
def test_other_launchers_start_the_program(
    start: Callable[..., LocalRun], script: Path, command: tuple[str, ...], args: list[str], local: str
) -> None:
    ends_well(start(*command, str(script), *args, "--lr", "1"))
    for one in said(script):
        assert one["world"] == 2
        assert one["args"] == [*([f"{local}={one['local']}"] if local else []), "--lr", "1"]
        assert one["A"] == ("b" if "A=b" in command else None)
    assert len(said(script)) == 2


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="`make test-frameworks` has accelerate")
def test_accelerate_makes_the_environment(
    start: Callable[..., LocalRun], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ends_well(
        start("accelerate", "launch", "--num_processes", "2", "--mixed_precision", "no", str(script), "--lr", "1")
    )
    assert [one["accelerate"] for one in said(script)] == [["no", "true"]] * 2
    assert {one["world"] for one in said(script)} == {2}


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="`make test-frameworks` has deepspeed")
def test_deepspeed_gives_each_process_its_local_rank(start: Callable[..., LocalRun], script: Path) -> None:
    ends_well(start("deepspeed", "--num_gpus", "2", str(script), "--lr", "1"))
    assert sorted(one["args"][0] for one in said(script)) == ["--local_rank=0", "--local_rank=1"]


@pytest.mark.parametrize("preload", ["torch", ""], ids=["in a fork of the zygote", "without a zygote"])
def test_count_that_only_the_worker_knows_ends_the_job_with_a_sentence(
    start: Callable[..., LocalRun], script: Path, monkeypatch: pytest.MonkeyPatch, preload: str
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("REGROUP_PRELOAD", preload)
    run = start("--processes-per-worker", "2", "torchrun", str(script))
    assert run.process.wait(120) != 0
    assert "torchrun asks for 3 processes in this pod" in run.log.read_text()
    assert said(script) == []


def test_command_that_the_launcher_refuses_ends_the_job_with_its_words(
    start: Callable[..., LocalRun], script: Path
) -> None:
    run = start("torchrun", "--max-restarts", "many", str(script))
    assert run.process.wait(120) != 0
    text = run.log.read_text()
    assert "torchrun refuses the command (argument --max-restarts/--max_restarts: invalid int value: 'many')." in text
    assert "Traceback" not in text


def test_contradiction_is_refused_before_anything_starts(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "regroup_cli", "run", "--workers", "2", "torchrun", "--nnodes", "3", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "spec.replicas (2) differs from --nnodes 3 in the command." in ended.stderr
