"""As nanoGPT: an unmodified script that asserts its world size after init_process_group, and saves when a file asks for it."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

max_iters = 5000
gradient_accumulation_steps = 4
dist.init_process_group("gloo")
ddp_world_size, rank = dist.get_world_size(), dist.get_rank()
assert gradient_accumulation_steps % ddp_world_size == 0
directory = Path(os.environ["REGROUP_CHECKPOINT_DIR"])
checkpoint, wish = directory / "ckpt.pt", directory / "save"
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
print(f"rank {rank} of {ddp_world_size} starts at iter {step}", flush=True)
ended = False
while not ended and step < max_iters:
    time.sleep(0.1)
    loss = torch.nn.functional.mse_loss(model(torch.randn(8, 16)), torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    step += 1
    if rank == 0:
        print(f"iter {step}/{max_iters}: loss {loss.item():.4f}, time 100ms", flush=True)
        if wish.exists():
            wish.unlink()
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, checkpoint
            )
            print(f"saved iter {step}", flush=True)
    asked = torch.tensor(float(rank == 0 and (directory / "end").exists()))
    dist.all_reduce(asked)
    ended = asked.item() > 0
dist.destroy_process_group()
