"""Lightning as its documentation has it: `ModelCheckpoint` saves every few steps, and `ckpt_path="last"` goes on from there.

It knows nothing of Regroup. The Trainer has neither `num_nodes` nor `devices`: it reads both from the environment.
"""

import argparse
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="lightning", help="directory of the checkpoints, the same for all workers")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
parser.add_argument("--pace", type=float, default=0.0, help="pretend that a step takes this many seconds")
args = parser.parse_args()


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):  # noqa: ARG002
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Pace(Callback):
    """Says where the process is, and makes a step of the tiny model take as long as one of a large model."""

    def on_train_start(self, trainer, module):  # noqa: ARG002
        print(f"process {trainer.global_rank} of {trainer.world_size} begins at step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):  # noqa: ARG002
        if trainer.is_global_zero and trainer.global_step % 10 == 0:
            print(f"step {trainer.global_step}  loss {outputs['loss'].item():.6f}", flush=True)
        time.sleep(args.pace)


L.seed_everything(0)
x = torch.randn(960, 20)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
trainer = L.Trainer(
    max_steps=args.steps,
    default_root_dir=args.checkpoint,
    callbacks=[ModelCheckpoint(dirpath=args.checkpoint, every_n_train_steps=args.every, save_last=True), Pace()],
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=16, shuffle=True), ckpt_path="last")
me, n = trainer.global_rank, trainer.world_size
print(f"process {me} of {n} ends at step {trainer.global_step}", flush=True)
