"""The options of a broadcast, which tell torch the sending rank."""

from typing import Any

import torch


def from_rank(root: int) -> Any:
    """Return the options of a broadcast of one tensor from a rank of the group."""
    options = torch._C._distributed_c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options
