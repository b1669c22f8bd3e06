"""The one elastic membership of this process, and what states and samplers ask of it and of Horovod's collectives.

A process is elastic if its agent gave it no rank: then a generation gives it one (docs/design/adr/0084). In any other process, such
as plain `python`, there is no member, and nothing here ever interrupts.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

import torch

from regroup.generation.groups import Groups
from regroup.horovod import functions, world
from regroup.horovod.errors import CHANGED
from regroup.horovod.process_sets import global_process_set
from regroup.protocol import env

from . import grouping
from .member import Held, Member

_member: Member | None = None


def member() -> Member | None:
    """Return this process's membership; None: the process is not elastic. Waits for the first generation."""
    if _member is None and world.is_elastic():
        world.current()
    return _member


def _attach() -> None:
    """Make this process a member, and wait for its first generation."""
    global _member
    if _member is None:
        _member = Member(os.environ[env.SOCKET], _connect)
        atexit.register(_close)
        _member.join()


def _connect(groups: Groups, order: list[int]) -> None:
    """Give Horovod's collectives the ranks of a new generation, in Horovod's order."""
    connected = world.follow(lambda: grouping.form(groups, order), grouping.NAME)
    global_process_set.ranks = list(range(connected.size))
    groups.at_abort(lambda: connected.engine.end(CHANGED))


def _close() -> None:
    world.end()
    if _member is not None:
        _member.close()


world.attach = _attach


def committed(state: Held) -> None:
    """Tell the membership of a commit. Raises as `Member.committed` does."""
    one = member()
    if one is not None:
        one.committed(state)


def check(state: Held) -> None:
    """Ask the membership for a change of the ranks. Raises as `Member.check` does."""
    one = member()
    if one is not None:
        one.check(state)


def place() -> tuple[int, int]:
    """Return Horovod's rank of this process, and the number of ranks; (0, 1) before `hvd.init()`."""
    return (world.rank(), world.size()) if world.is_initialized() else (0, 1)


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on all ranks."""
    return functions.broadcast_object(value) if world.is_initialized() else value


def broadcast_parameters(named: Mapping[str, torch.Tensor]) -> None:
    """Give all ranks rank 0's tensors, in place."""
    if world.is_initialized():
        functions.broadcast_parameters(named, root_rank=0)
