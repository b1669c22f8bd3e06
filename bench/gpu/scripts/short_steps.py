"""Steps of about 20 ms in a session, profiled: TRACE. The number of microbatches follows from how fast this GPU is."""

from __future__ import annotations

import sys
import time

import torch
from torch.nn import functional as F

import regroup

STEP_S = 0.020
WARM, PROFILED, SAMPLES = 10, 10, 256
device = regroup.device()
width, depth = (4096, 6) if device.type == "cuda" else (64, 2)
torch.manual_seed(0)
layers = [module for _ in range(depth) for module in (torch.nn.Linear(width, width), torch.nn.ReLU())]
model = torch.nn.Sequential(torch.nn.Linear(64, width), *layers, torch.nn.Linear(width, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(16384, 64, generator=torch.Generator().manual_seed(0))
y = torch.randint(0, 10, (len(x),), generator=torch.Generator().manual_seed(1))


def wait() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(repeats: int) -> float:
    """Return the seconds of one forward and backward pass."""
    a, b = x[:SAMPLES].to(device), y[:SAMPLES].to(device)
    wait()
    began_s = time.perf_counter()
    for _ in range(repeats):
        F.cross_entropy(model(a), b).backward()  # type: ignore[no-untyped-call]
    wait()
    return (time.perf_counter() - began_s) / repeats


timed(3)
one_s = timed(10)
optimizer.zero_grad()
num_microbatches = max(1, min(len(x) // SAMPLES, round(STEP_S / one_s)))
of = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
profile = torch.profiler.profile(activities=[of])  # what the host does is not recorded: that would slow it down
began_s = 0.0
with regroup.session(
    model=model, optimizer=optimizer, data=(x, y), global_batch=num_microbatches * SAMPLES, microbatch=SAMPLES
) as job:
    for step in job.steps(WARM + PROFILED + 1):
        if step.index == WARM:
            profile.start()
            began_s = time.perf_counter()
        if step.index == WARM + PROFILED:
            print(f"{num_microbatches} microbatches, {(time.perf_counter() - began_s) / PROFILED * 1e3:.1f} ms a step")
            profile.stop()
            profile.export_chrome_trace(sys.argv[1])
        with step:
            for batch in step.microbatches():
                a, b = batch.x.to(device, non_blocking=True), batch.y.to(device, non_blocking=True)
                step.backward(mean=F.cross_entropy(model(a), b), weight=len(b))
            step.commit()
