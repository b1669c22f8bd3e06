"""DeepSpeed as its documentation has it: an engine with ZeRO, its own `save_checkpoint`, and `load_checkpoint` from the newest one.

It knows nothing of Regroup. Start it with `deepspeed` or `torchrun`. With ZeRO stages 1 to 3 a checkpoint loads only at the number
of processes that wrote it.
"""

import argparse
import os
import shutil
import time

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="deepspeed", help="directory of the checkpoints, the same for all workers")
parser.add_argument("--stage", type=int, default=0, help="stage of ZeRO, 0 to 3")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
parser.add_argument("--pace", type=float, default=0.0, help="pretend that a step takes this many seconds")
parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
args = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
x = torch.randn(960, 20)
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    training_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
    config={
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": args.every,
    },
)
if os.path.exists(os.path.join(args.checkpoint, "latest")):
    engine.load_checkpoint(args.checkpoint)
me, n = torch.distributed.get_rank(), torch.distributed.get_world_size()
print(f"process {me} of {n} begins at step {engine.global_steps}", flush=True)


def save():
    """Save the parts of all ranks. Only then the file `latest` names them, so a kill in the middle leaves the checkpoint before."""
    tag, latest = f"global_step{engine.global_steps}", os.path.join(args.checkpoint, "latest")
    engine.save_checkpoint(args.checkpoint, tag=tag, save_latest=False)
    torch.distributed.barrier()
    if me == 0:
        with open(latest + ".tmp", "w") as file:
            file.write(tag)
        os.replace(latest + ".tmp", latest)
        saved = [name for name in os.listdir(args.checkpoint) if name.startswith("global_step")]
        for old in sorted(saved, key=lambda name: int(name[len("global_step") :]))[:-2]:
            shutil.rmtree(os.path.join(args.checkpoint, old))  # the two newest stay


while engine.global_steps < args.steps:
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(engine(inputs.to(engine.device)), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_steps % args.every == 0:
            save()
            if me == 0:
                print(f"step {engine.global_steps}  loss {loss.item():.6f}", flush=True)
        time.sleep(args.pace)
        if engine.global_steps == args.steps:
            break
print(f"process {me} of {n} ends at step {engine.global_steps}", flush=True)
