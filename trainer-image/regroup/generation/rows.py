"""Rows: a few bytes of each rank, which all ranks get. A step is decided by them.

They go over gloo. Below TREE_RANKS ranks they go round a ring, which is gloo's all-gather: each row passes every rank. From
TREE_RANKS on every rank sends its row to the first one, which broadcasts all of them along a tree. For 64 ranks these are seven
messages one after the other, and not 63 (docs/design/adr/0074-host-runs-ahead.md has the times).

On both ways a rank that has all rows knows that every rank gave its own. Every wait is one of `Groups.wait`: it ends when the rows
are there, when a connection has ended, or by the group's abort. So no rank waits for a first rank that has died.
"""

from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions

from .groups import Groups, Part

TREE_RANKS = 16
"""Number of ranks from which the tree took less time than the ring in each run of `bench.rows`."""


class Rows:
    """The rows of all ranks, on their way. All ranks make one, and call `wait`, in one order among their other collectives."""

    def __init__(self, groups: Groups | Part, mine: torch.Tensor) -> None:
        """Send this rank's row: [bytes], uint8 in host memory, of one length on all ranks. Does not wait. Raises what
        `Groups.failed` says."""
        self._groups = groups
        self._all = torch.empty(groups.world_size, len(mine), dtype=torch.uint8)
        self._is_tree = groups.world_size >= TREE_RANKS
        if self._is_tree:
            options: Any = GatherOptions()
            options.rootRank = 0
            rows = [list(self._all)] if groups.rank == 0 else []
            self._sent = groups.launch("gather", rows, [mine], options, control=True)
        else:
            self._sent = groups.launch("_allgather_base", self._all.view(-1), mine, control=True)

    def wait(self) -> torch.Tensor:
        """Return the rows in rank order: [ranks, bytes]. Raises what `Groups.failed` says."""
        self._groups.wait([self._sent])
        if self._is_tree:
            # Not any sooner: the first rank has nothing to send before the gather has ended, and what comes in between must have
            # one order on all ranks.
            options: Any = BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self._groups.wait([self._groups.launch("broadcast", [self._all], options, control=True)])
        return self._all
