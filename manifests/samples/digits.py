"""Handwritten digits, real data that ships with scikit-learn: plain `python`, `regroup run` or a cluster, unchanged."""

import argparse
import hashlib
import os
import time

import torch
from sklearn.datasets import load_digits

import regroup

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--reduction", choices=["fast", "exact"], default="fast", help="exact: the same bits at any size")
parser.add_argument("--print-every", type=int, default=200, help="steps between two lines")
parser.add_argument("--every-rank", action="store_true", help="each rank prints these lines, not only the first")
parser.add_argument("--pace", type=float, default=0.0, help="seconds added to each step, to have time to watch")
parser.add_argument("--hurry", default="", help="add no time once this file exists; until then, steps get longer")
parser.add_argument("--save", default="", help="write the trained model to this file")
args = parser.parse_args()

torch.manual_seed(7)
torch.use_deterministic_algorithms(args.reduction == "exact")
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, held_out = (x[order[:1437]], y[order[:1437]]), (x[order[1437:]], y[order[1437:]])
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def pause_s(index: int) -> float:  # with --hurry late steps take longer: some are left whenever the file comes
    longer = max(1, args.steps / 2 / (args.steps - index)) if args.hurry else 1
    return 0.0 if args.hurry and os.path.exists(args.hurry) else args.pace * longer


with regroup.session(
    model=model, optimizer=optimizer, data=train, global_batch=80, microbatch=8, reduction=args.reduction
) as job:
    for step in job.steps(args.steps):
        with step:  # a membership change ends this block; the same step comes again
            time.sleep(pause_s(step.index))
            for batch in step.microbatches():  # this rank's share, whatever the world is now
                loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum")
                step.backward(sum=loss, weight=len(batch.y))
            step.commit()
        if step.committed and (job.is_main or args.every_rank) and (step.index + 1) % args.print_every == 0:
            where = f"generation {job.generation}  ranks {job.world_size}"
            print(f"step {step.index + 1}  loss {step.loss:.4f}  {where}", flush=True)
# The job is Complete once the script has returned 0 in every worker. A process that fails here is started again with the state of
# the last step, and does not enter the loop: use no variable that only the loop sets, and write files that may be written again.
if job.is_main:
    accuracy = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    parameters = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"held-out accuracy {accuracy:.4f}  parameters sha256 {parameters}", flush=True)
    if args.save:
        torch.save({"model": model.state_dict(), "steps": job.step}, args.save + ".tmp")
        os.replace(args.save + ".tmp", args.save)  # nobody reads half a file
