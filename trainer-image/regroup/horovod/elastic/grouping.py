"""Torch's world in an elastic process: the ranks of a generation in Horovod's order, made anew in each generation.

Its connections belong to the generation (`Groups`), so every wait on them ends when the generation does. Process sets of the
script's are groups of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from regroup.generation.groups import Groups, Part
from regroup.generation.living import LivingGroup

NAME = "regroup_horovod"
"""Torch's name of the backend."""
_now: tuple[Groups, Sequence[int]] | None = None
"""Groups of the generation, and its ranks in Horovod's order."""


def form(groups: Groups, order: Sequence[int]) -> Any:
    """Make torch's world and return it. All ranks of the generation call it with the same order. Raises GroupBroken."""
    global _now
    leave()
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    _now = groups, order
    rank = list(order).index(groups.rank)
    with groups.waiting():
        dist.init_process_group(NAME, store=PrefixStore("world", HashStore()), rank=rank, world_size=len(order))
    return dist.group.WORLD


def leave() -> None:
    """End torch's world, if there is one. Its connections are the generation's to end."""
    global _now
    _now = None
    if dist.is_initialized():
        dist.destroy_process_group()


def _create(options: Any, _backend_options: Any) -> LivingGroup:
    """Return a new group of torch's: the world, or that of a process set. Called on each of its ranks."""
    assert _now is not None
    (groups, order), name = _now, str(options.group_id)
    inner = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    ranks = tuple(order[one] for one in inner)
    with groups.sockets.opening():
        backend, _ = groups.open_among(ranks, f"horovod/{name}")
    group = LivingGroup(name, inner, options.group_rank)
    group.bind(groups, Part(groups, name, ranks, backend))
    return group
