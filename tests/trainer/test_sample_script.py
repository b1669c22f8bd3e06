"""The unmodified script of manifests/samples, started as torchrun or the agent would: also where nothing is left to do. And the
evaluator, beside a job that has gone back."""

from __future__ import annotations

import socket
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from regroup.checkpoint import Checkpointer
from regroup.checkpoint.checkpointer import Origin
from regroup.protocol.state import StatePair
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
SCRIPT = SAMPLES / "script.py"


def test_script_that_is_started_again_after_its_last_step_ends_well(tmp_path: Path, zygote: Zygote) -> None:
    def run(name: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = ("--checkpoint", str(tmp_path / "model.pt"), "--steps", "12", "--step-seconds", "0")
        return Plain(zygote, tmp_path / name, SCRIPT, *arguments, **environment).wait()

    first = run("first")
    assert "starts at step 0\n" in first
    assert first.endswith("rank 0 finished step 12\n")
    assert run("second") == "rank 0 of 1 starts at step 12\nrank 0 finished step 12\n"


def save(directory: Path, *, generation: int, step: int, guess: int) -> Path:
    """Save a model of digits.py that takes each picture for the same digit; return the checkpoint's directory."""
    last = torch.nn.Linear(128, 10)
    torch.nn.init.zeros_(last.weight)
    last.bias.data = torch.nn.functional.one_hot(torch.tensor(guess), 10).float()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": {}}
    checkpointer = Checkpointer(str(directory), every_s=0, job_uid="job-1")
    checkpointer.save(tree, pair=StatePair(generation, step), origin=Origin(generation, "a", 0, 0))
    assert checkpointer.wait(30)
    return directory / f"step-{step}.g{generation}-a"


def test_evaluator_takes_the_newest_generation_and_no_checkpoint_that_is_being_written(
    tmp_path: Path, zygote: Zygote
) -> None:
    directory = tmp_path / "checkpoints"
    save(directory, generation=1, step=40, guess=1)
    save(directory, generation=2, step=20, guess=2)
    (save(directory, generation=3, step=30, guess=3) / "COMMIT.json").unlink()
    arguments = ("--checkpoints", str(directory), "--board", str(tmp_path / "board"), "--steps", "20")
    said = Plain(zygote, tmp_path / "output", SAMPLES / "evaluate.py", *arguments).wait()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    share = (torch.tensor(load_digits().target)[order[1437:]] == 2).float().mean().item()
    assert said == f"step 20  held-out accuracy {share:.4f}\n"
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))
