"""Run as a program: write one checkpoint that no rank ever acknowledges, until killed. Usage: checkpoint_writer.py DIR MIB"""

import sys

import torch

from regroup.checkpoint import Checkpointer
from regroup.checkpoint.checkpointer import Origin
from regroup.protocol.state import StatePair

if __name__ == "__main__":
    directory, mib = sys.argv[1], int(sys.argv[2])
    checkpointer = Checkpointer(directory, every_s=0, job_uid="job-1")
    tree = {"model": {str(i): torch.ones(1 << 18) for i in range(mib)}, "optimizer": {}, "state": {}}
    checkpointer.save(
        tree, pair=StatePair(1, 20), origin=Origin(1, "aaaa1111", 0, 0),
        acknowledged=lambda: False,
    )  # fmt: skip
    checkpointer.wait()
