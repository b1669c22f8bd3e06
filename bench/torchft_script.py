"""torchft's script in `bench.recovery` and `bench.goodput`: one replica group that trains the same model.

Usage: `torchft_script.py TIMEOUT`, the timeout of the process group in milliseconds. The launcher's environment has the
rest. The script follows torchft's train_ddp.py. One process is one replica group. Its fixed number chooses its share of
the global batch, as in torchft's DistributedSampler. So the samples of a missing group are not trained on.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bench.commits import CommitLog
from bench.tiny import GLOBAL_BATCH, STEPS, Work, build, digits_like

log = CommitLog()
log.imported()
work = Work()
group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])

model, inner = build()


def state_dict() -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": inner.state_dict()}


def load_state_dict(saved: dict[str, Any]) -> None:
    model.load_state_dict(saved["model"])
    inner.load_state_dict(saved["optimizer"])


# The replica group's own store. In the example torchrun has it.
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(milliseconds=int(sys.argv[1]))),
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    min_replica_size=1,
    timeout=timedelta(seconds=30),
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    replica_id=f"group_{group}",
)
parallel = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, inner)
x, y = digits_like()
share = GLOBAL_BATCH // groups

while manager.current_step() < STEPS:
    optimizer.zero_grad()  # asks the lighthouse for a quorum, whose answer may come during the step
    work.step()
    work.samples(share)
    begin = manager.current_step() * GLOBAL_BATCH + group * share
    ids = torch.arange(begin, begin + share) % len(x)
    torch.nn.functional.cross_entropy(parallel(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
    before = manager.current_step()
    optimizer.step()  # does nothing if the reduction failed
    if manager.current_step() > before:
        # The quorum's number has no accessor; the pinned version has this attribute.
        log.committed(rank=group, step=before + 1, epoch=manager._quorum_id, world=manager.num_participants())
