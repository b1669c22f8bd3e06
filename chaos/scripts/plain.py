"""The script of a Script job under chaos: torch.distributed as anybody writes it, with a checkpoint of its own.

It does not import `regroup`. Gradients are rounded to multiples of 2^-24 before they are summed. So neither their sum
nor the final parameters depend on the number of ranks. Environment: CHAOS_TRACE, CHAOS_STEPS (tracing.py).
"""

import hashlib
import os
import time

started = time.time()

import torch
import torch.distributed as dist
from tracing import DIRECTORY, pause, trace

CHECKPOINT = f"{DIRECTORY}/script.pt"
BATCH, SAVE_EVERY = 24, 5

alone = "RANK" not in os.environ
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if not alone:
    dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(0)
x = torch.rand(499, 16, generator=generator, dtype=torch.float64)
target = torch.rand(16, generator=generator, dtype=torch.float64)
weight, velocity = torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
step, total = 0, int(os.environ["CHAOS_STEPS"])
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT, weights_only=True)
    weight, velocity, step = saved["weight"], saved["velocity"], saved["step"]
if not alone:  # all ranks continue from what rank 0 read, as nanoGPT's DDP wrapper has it
    begin = torch.tensor([step])
    for tensor in (begin, weight, velocity):
        dist.broadcast(tensor, 0)
    step = int(begin)
trace("built", started=started, step=step)

while step < total:
    pause(step)
    gradient = torch.zeros(16, dtype=torch.float64)
    for sample in range(step * BATCH + rank, (step + 1) * BATCH, world_size):
        row = x[sample % len(x)]
        error = (row * weight).sum() - (row * target).sum()
        gradient += torch.round(error * row * 2**24) / 2**24
    if not alone:
        dist.all_reduce(gradient)
    velocity = 0.9 * velocity + gradient / BATCH
    weight = weight - 0.05 * velocity
    trace("commit", step=step, generation=0, rank=rank)
    step += 1
    if rank == 0:
        print(f"step {step}", flush=True)
        if not alone and step % SAVE_EVERY == 0:
            torch.save({"weight": weight, "velocity": velocity, "step": step}, CHECKPOINT + f".{os.getpid()}")
            os.replace(CHECKPOINT + f".{os.getpid()}", CHECKPOINT)
            trace("saved", step=step)
trace(
    "done",
    generation=0,
    world_size=world_size,
    parameters=hashlib.sha256(weight.numpy().tobytes()).hexdigest(),
    samples="",
)
if not alone:
    dist.destroy_process_group()
