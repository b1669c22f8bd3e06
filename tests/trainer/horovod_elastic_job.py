"""A small elastic script of Horovod that leaves the world and joins it again within its function: hvd.shutdown, then hvd.init.

Arguments: the number of steps, seconds that a step takes, and a file. Once the file is there, steps take no more time than
they need.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import regroup.horovod as hvd

STEPS, PACE_S, HURRY = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
REJOIN_EVERY = 4

hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())


@hvd.elastic.run
def train(state: Any) -> None:
    print(
        f"rank {hvd.rank()} of {hvd.size()} (process {os.getpid()}) goes on at epoch 0 batch {state.step}", flush=True
    )
    while state.step < STEPS:
        state.optimizer.zero_grad()
        state.model(torch.full((2, 4), float(hvd.rank()))).sum().backward()
        state.optimizer.step()
        state.step += 1
        if state.step % REJOIN_EVERY == 0:
            hvd.shutdown()
            assert not hvd.is_initialized()
            hvd.init()
            ranks = hvd.allgather(torch.tensor([hvd.rank()]), name="ranks after init")
            assert ranks.tolist() == list(range(hvd.size())), ranks
        state.commit()
        if not HURRY.exists():
            time.sleep(PACE_S)


train(hvd.elastic.TorchState(model, optimizer, step=0))
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"rank {hvd.rank()} of {hvd.size()} has parameters {digest}", flush=True)
hvd.shutdown()
