"""Accelerate as its documentation has it: `prepare`, `backward`, `save_state`, and `load_state` from the newest checkpoint.

It knows nothing of Regroup. Start it with `accelerate launch`, `torchrun` or plain `python`.
"""

import argparse
import os
import shutil
import time

import torch
from accelerate import Accelerator, skip_first_batches

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="accelerate", help="directory of the checkpoints, the same for all workers")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
parser.add_argument("--pace", type=float, default=0.0, help="pretend that a step takes this many seconds")
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(960, 20)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def path(step):
    return os.path.join(args.checkpoint, f"step-{step}")


def saved():
    names = os.listdir(args.checkpoint) if os.path.isdir(args.checkpoint) else []
    return [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit()]


def save(step):
    """All processes save aside. The directory gets its name last, so a kill in the middle leaves no broken checkpoint."""
    accelerator.save_state(path(step) + ".tmp")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(path(step) + ".tmp", path(step))
        for old in sorted(saved())[:-2]:
            shutil.rmtree(path(old))  # the two newest stay


step = max(saved(), default=0)
accelerator.wait_for_everyone()  # all have listed the same before anybody saves
if step:
    accelerator.load_state(path(step))
me, n = accelerator.process_index, accelerator.num_processes
print(f"process {me} of {n} begins at step {step}", flush=True)
while step < args.steps:
    for inputs, targets in skip_first_batches(loader, step % len(loader)):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % args.every == 0:
            save(step)
            if accelerator.is_main_process:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
        time.sleep(args.pace)
        if step == args.steps:
            break
print(f"process {me} of {n} ends at step {step}", flush=True)
