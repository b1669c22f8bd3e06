"""Process sets: subsets of the ranks that run collectives by themselves."""

from __future__ import annotations

from collections.abc import Iterable

from regroup.horovod import world
from regroup.horovod.errors import HorovodInternalError
from regroup.horovod.handles import Handle
from regroup.horovod.negotiation import ADD_SET, GLOBAL_SET, REMOVE_SET, Request


class ProcessSet:
    """Names ranks. It can be used once `hvd.init` or `hvd.add_process_set` was called with it in all ranks."""

    process_set_id: int | None = None
    ranks: list[int] | None = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        ranks = sorted(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else None
        if ranks is None or any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks. An mpi4py Comm object has no meaning here."
            )
        self.ranks = ranks

    def size(self) -> int | None:
        """Return the number of its ranks, or None before it is added."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """Return the position of this process in the set, or None before it is added. Roots of broadcasts are global ranks."""
        return None if self.process_set_id is None else self._members().index(world.rank())

    def included(self) -> bool | None:
        """Return whether this process is in the set."""
        return None if self.ranks is None else world.rank() in self._members()

    def _members(self) -> list[int]:
        return list(range(world.size())) if self.process_set_id == GLOBAL_SET else list(self.ranks or ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (self.process_set_id, self.ranks) == (
            other.process_set_id,
            other.ranks,
        )

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL_SET


def init(comm: Iterable[int] | None = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Join the world. All ranks must call this. A second call does nothing until `shutdown`.

    Args:
        comm: Must be None or all ranks: the job decides which processes are in the world.
        process_sets: Process sets to add at once. Horovod's word "dynamic" means nothing here: sets can always be added.
    """
    is_first = not world.is_initialized()
    world.start(comm)
    if world.is_elastic():
        if process_sets is not None and not isinstance(process_sets, str):
            raise ValueError(
                "hvd.init takes no process sets in an elastic script. Call hvd.add_process_set after each reset."
            )
        return
    global_process_set.ranks = list(range(world.size()))
    if is_first and process_sets is not None and not isinstance(process_sets, str):
        for each in process_sets:
            add_process_set(each)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set and return it. All ranks must call this with the same ranks, which no other set may have."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    engine = world.engine()
    request = Request(ADD_SET, ADD_SET, ranks=tuple(process_set.ranks or ()))
    try:
        process_set.process_set_id = engine.ask(Handle(request, ())).wait()
    except HorovodInternalError as error:
        if engine.broken:
            raise
        raise ValueError(str(error)) from None
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set in all ranks, which must all call this. Return False for one that was not added, and the global one."""
    if process_set.process_set_id in (None, GLOBAL_SET):
        return False
    engine = world.engine()
    set_id, process_set.process_set_id = process_set.process_set_id, None
    assert set_id is not None
    engine.ask(Handle(Request(REMOVE_SET, REMOVE_SET, root=set_id), ())).wait()
    return True


def ask_in(process_set: ProcessSet) -> int:
    """Return the id of a set in which this process may ask for collectives. Raises ValueError if it may not."""
    world.engine()
    if process_set.process_set_id is None:
        raise ValueError(
            "The process set was not added, or was removed. Call hvd.add_process_set with it in all ranks."
        )
    if not process_set.included():
        raise ValueError(f"Rank {world.rank()} is not in the process set with the ranks {process_set.ranks}.")
    return process_set.process_set_id
