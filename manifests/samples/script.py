"""An unmodified torch.distributed script: env:// rendezvous, DistributedDataParallel, its own torch.save."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", required=True)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--step-seconds", type=float, default=0.05, help="pretend that a step takes this long")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
target = torch.randn(16, 4)
step = 0
if os.path.exists(args.checkpoint):
    saved = torch.load(args.checkpoint, weights_only=True)
    model.module.load_state_dict(saved["model"])
    step = saved["step"]
print(f"rank {rank} of {world_size} starts at step {step}", flush=True)

while step < args.steps:
    time.sleep(args.step_seconds)
    x = torch.randn(32, 16)
    loss = torch.nn.functional.mse_loss(model(x), x @ target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0 and step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if rank == 0 and (step % 10 == 0 or step == args.steps):
        torch.save({"model": model.module.state_dict(), "step": step}, args.checkpoint + ".tmp")
        os.replace(args.checkpoint + ".tmp", args.checkpoint)
# If one process fails before all have returned 0, all start again. They load the checkpoint of the last step and come here.
print(f"rank {rank} finished step {step}", flush=True)
dist.destroy_process_group()
