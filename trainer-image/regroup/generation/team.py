"""Some or all ranks of a generation, as the user's collectives see them (`regroup.collective` decides who they are).

A team ends with its generation's groups: their `abort` shuts its sockets down, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup

from . import nccl
from .backends import Backend
from .groups import Groups


@dataclass(frozen=True)
class Team:
    """A group of ranks. `nccl` is None on CPU, and where the team is not the whole generation."""

    groups: Groups
    rank: int
    world_size: int
    gloo: Backend
    nccl: Backend | None
    group: Any
    """A torch ProcessGroup, for `torch.distributed` calls with `group=`.

    Such a call waits as torch does. On CPU it may block for good if a peer dies in the moment in which a message to it is written.
    Then gloo 2.13 forgets the message (docs/design/adr/0009), and no membership change ends the call. `all_reduce` here does not
    have that hole.
    """

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the team, in place. Blocks. Raises what `Groups.failed` says."""
        if self.world_size == 1:
            self.groups.check_use()
            return
        backend = self.nccl if nccl.serves(tensor.device) and self.nccl is not None else self.gloo
        self.groups.wait([self.groups.start(backend, "allreduce", [tensor])])


def form_team(groups: Groups, ranks: Sequence[int], name: str) -> Team:
    """Return these ranks (this one among them) as a group of their own; all of them must ask for it together.

    `name` tells apart what one generation asks for. Blocks until all have come. Raises GroupBroken.
    """
    if len(ranks) == groups.world_size:
        return Team(groups, groups.rank, groups.world_size, groups.control, groups.nccl, groups.world)
    rank, size = list(ranks).index(groups.rank), len(ranks)
    with groups.waiting(), groups.sockets.opening():
        groups.check()
        gloo, keys = groups.open_among(ranks, f"team/{name}")
    group = ProcessGroup(PrefixStore("world", keys), rank, size)
    gloo.serve(group, "cpu", ProcessGroup.BackendType.GLOO)
    groups.keep(group, gloo)
    return Team(groups, rank, size, gloo, None, group)
