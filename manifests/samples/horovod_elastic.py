"""Horovod's example of elastic training for PyTorch (pytorch_mnist_elastic.py), with pictures that are made here.

Survivors keep their processes when a worker is lost, and when workers come or leave. After each such change `train` is called
again, with the state of the last commit.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import regroup.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32, help="samples of each process in a step")
parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
parser.add_argument(
    "--hurry", type=Path, default=None, help="once this file is there, steps take no more time than they need"
)
args = parser.parse_args()


def pictures(number, seed):
    """Return pictures of ten kinds, [number, 1, 14, 14], with noise, and their kinds."""
    kinds = torch.randn(10, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(10, (number,), generator=generator)
    return kinds[targets] + torch.randn(number, 1, 14, 14, generator=generator), targets


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


hvd.init()
torch.manual_seed(42)
train_set = TensorDataset(*pictures(1920, seed=1))
test_pictures, test_kinds = pictures(500, seed=2)
sampler = hvd.elastic.ElasticSampler(train_set)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
model = Net()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5),
    named_parameters=model.named_parameters(),
)


@hvd.elastic.run
def train(state):
    print(
        f"rank {hvd.rank()} of {hvd.size()} (process {os.getpid()}) goes on at epoch {state.epoch} batch {state.batch}",
        flush=True,
    )
    loss = torch.zeros(())
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020 (as Horovod's examples have it)
        state.model.train()
        for picture, kind in loader:
            began = time.monotonic()
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(picture), kind)
            loss.backward()
            state.optimizer.step()
            state.batch += 1
            state.sampler.record_batch(state.batch, len(kind))
            if state.batch % 10 == 0 and hvd.rank() == 0:
                print(f"epoch {state.epoch}  batch {state.batch}  loss {loss.item():.4f}", flush=True)
            state.commit()
            if args.hurry is None or not args.hurry.exists():
                time.sleep(max(0.0, args.pace - (time.monotonic() - began)))
        state.batch = 0
        state.sampler.set_epoch(state.epoch + 1)
    return hvd.allreduce(loss.detach(), name="last loss").item()


def follow_size():
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([follow_size])
last = train(state)
model.eval()
with torch.no_grad():
    output = model(test_pictures)
loss, accuracy = F.cross_entropy(output, test_kinds).item(), (output.argmax(1) == test_kinds).float().mean().item()
print(
    f"rank {hvd.rank()} of {hvd.size()} (process {os.getpid()}) ends with held-out loss {loss:.4f}  accuracy {accuracy:.3f}"
    f"  mean loss of the last batch {last:.4f}",
    flush=True,
)
