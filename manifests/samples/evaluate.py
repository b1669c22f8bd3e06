"""Evaluates the checkpoints of digits.py in a pod of its own while training goes on, and ends after the one of the last step."""

import argparse
import os
import re
import tempfile
import time

import torch
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints", required=True, help="the directory of spec.checkpoint, as this pod mounts it")
parser.add_argument("--board", required=True, help="directory for TensorBoard's files")
parser.add_argument("--steps", type=int, default=1000, help="as in digits.py")
args = parser.parse_args()

digits = load_digits()  # the same data, order and model as in digits.py
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
held_out = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[1437:]
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def newest() -> tuple[int, int, str]:
    """Return generation, step and directory of the newest checkpoint. It is complete once it has a COMMIT.json."""
    found = [(0, 0, "")]
    for name in os.listdir(args.checkpoints):
        match = re.fullmatch(r"step-(\d+)\.g(\d+)-\w+", name)
        if match and os.path.exists(f"{args.checkpoints}/{name}/COMMIT.json"):
            found.append((int(match[2]), int(match[1]), f"{args.checkpoints}/{name}"))
    return max(found)  # generations come first: where training went back, a newer one begins at a lower step


done = 0
with SummaryWriter(args.board) as board, tempfile.TemporaryDirectory() as scratch:
    while done < args.steps:
        _, step, directory = newest()
        if step in (0, done):
            time.sleep(1)
            continue
        dcp_to_torch_save(
            directory, f"{scratch}/state.pt"
        )  # a checkpoint is a plain one of torch.distributed.checkpoint
        model.load_state_dict(torch.load(f"{scratch}/state.pt", weights_only=True)["model"])
        accuracy = (model(x[held_out]).argmax(1) == y[held_out]).float().mean().item()
        board.add_scalar("held-out accuracy", accuracy, step)
        board.flush()
        print(f"step {step}  held-out accuracy {accuracy:.4f}", flush=True)
        done = step
