"""One rank of a group of torch's own: RANK WORLD STORE. Prints how long it took to form, and a sum over all ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

rank, world = map(int, sys.argv[1:3])
is_gpu = os.environ["BENCH_DEVICE"] == "cuda"
device = torch.device("cuda", rank % torch.cuda.device_count()) if is_gpu else torch.device("cpu")
if is_gpu:
    torch.cuda.set_device(device)
began_s = time.perf_counter()
store = dist.FileStore(sys.argv[3], world)  # type: ignore[attr-defined]
dist.init_process_group(
    "nccl" if is_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=25)
)
tensor = torch.full((1,), rank + 1.0, device=device)
dist.all_reduce(tensor)
total = tensor.item()
print(json.dumps({"formed_s": time.perf_counter() - began_s, "sum": total}), flush=True)
dist.destroy_process_group()
