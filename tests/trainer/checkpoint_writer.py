"""Run as a program: write one checkpoint that no rank ever acknowledges, until killed. Usage: checkpoint_writer.py DIR MIB"""

import sys

import torch

from regroup.checkpoint import Checkpointer
from regroup.protocol.state import StatePair

if __name__ == "__main__":
    directory, mib = sys.argv[1], int(sys.argv[2])
    checkpointer = Checkpointer(directory, every_s=0, job_uid="job-1")
    tree = {"model": {str(i): torch.ones(1 << 18) for i in range(mib)}, "optimizer": {}, "state": {}}
    checkpointer.save(
        tree, pair=StatePair(1, 20), generation=1, uid="aaaa1111", parent_generation=0, start_step=0,
        acknowledged=lambda: False,
    )  # fmt: skip
    checkpointer.wait()
