"""Ranks as threads of one process: what `Groups` does for a strategy, with tensors that are really exchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from regroup.generation.groups import Groups
from regroup.parallel.host import Scalar, read_together
from regroup.parallel.strategy import Agreed, Word
from regroup.transaction.agreement import gather
from regroup.transaction.header import Row

T = TypeVar("T")
_TIMEOUT_S = 20.0


class Told:
    """Rows of a strategy that is driven by hand: each rank has weight 1 and no loss. What a commit checks is not checked."""

    def __init__(self, groups: Groups | None) -> None:
        self._groups = groups
        self.rounds = 0
        self.parcels: torch.Tensor | None = None

    def __call__(
        self,
        asked: Sequence[Sequence[Scalar]],
        word: Callable[..., Word],
        meanwhile: Callable[[], None] | None = None,
        parcel: torch.Tensor | None = None,
    ) -> Agreed:
        self.rounds += 1
        row = Row(0, 0.0, 1.0, knows_newer=False, sample_hash=0, word=word(*read_together(*asked)))
        header, self.parcels = gather(self._groups, row, meanwhile, parcel)
        return Agreed(header.words, header.loss_sum, header.weight, self.parcels)


class _Done:
    def is_completed(self) -> bool:
        return True


class _Sent:
    work = _Done()

    def __init__(self, control: bool) -> None:
        self.control = control


class Ranks:
    """`run` calls a function for each rank at once, with groups in which the others are."""

    def __init__(self, world_size: int, device: torch.device | None = None) -> None:
        self._world_size = world_size
        self.device = device or torch.device("cpu")
        self._barrier = threading.Barrier(world_size, timeout=_TIMEOUT_S)
        self._parts: list[Any] = [None] * world_size
        self.calls: list[str] = []
        """Collectives that rank 0 took part in."""
        self.waits = 0
        """How often rank 0 waited for collectives of tensors on the device: as often the host waits for that."""

    def run(self, what: Callable[[Groups], T]) -> list[T]:
        """Return what each rank returned. Raises what the first one raised, once all have ended."""
        results: list[Any] = [None] * self._world_size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = what(cast(Groups, _Rank(self, rank, self._world_size)))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self._world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT_S)
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return results

    def exchange(self, rank: int, part: Any) -> list[Any]:
        self._barrier.wait()
        self._parts[rank] = part
        self._barrier.wait()
        return list(self._parts)


class _Rank:
    generation = 1
    is_applying = False
    waited_s = 0.0

    def __init__(self, ranks: Ranks, rank: int, world_size: int) -> None:
        self._ranks, self.rank, self.world_size = ranks, rank, world_size
        self.device = ranks.device

    def launch(self, method: str, *arguments: Any, control: bool = False) -> _Sent:
        if self.rank == 0:
            self._ranks.calls.append(method)
        if method == "allreduce":
            ((tensor,),) = arguments
            parts = self._ranks.exchange(self.rank, (method, tensor.clone()))
            assert {name for name, _ in parts} == {method}, parts
            tensor.copy_(torch.stack([part for _, part in parts]).sum(0))
        elif method == "alltoall_base":
            output, mine, incoming, outgoing, *_ = arguments
            parts = self._ranks.exchange(self.rank, (method, mine.clone().split(outgoing)))
            assert {name for name, _ in parts} == {method}, parts
            assert [len(part[self.rank]) for _, part in parts] == incoming
            output.copy_(torch.cat([part[self.rank] for _, part in parts]))
        elif method == "gather":
            lists, (mine,), options = arguments
            parts = self._ranks.exchange(self.rank, (method, mine.clone()))
            assert {name for name, _ in parts} == {method}, parts
            assert len(lists) == (self.rank == options.rootRank)
            for output, (_, part) in zip(lists[0] if lists else [], parts):
                output.copy_(part)
        elif method == "broadcast":
            (tensor,), options = arguments
            parts = self._ranks.exchange(self.rank, (method, tensor.clone()))
            assert {name for name, _ in parts} == {method}, parts
            tensor.copy_(parts[options.rootRank][1])
        else:
            assert method == "_allgather_base"
            output, mine = arguments
            parts = self._ranks.exchange(self.rank, (method, mine.clone()))
            assert {name for name, _ in parts} == {method}, parts
            output.copy_(torch.cat([part for _, part in parts]))
        return _Sent(control)

    def wait(self, pending: Any) -> None:
        self._ranks.waits += self.rank == 0 and not all(one.control for one in pending)

    def check(self) -> None:
        pass
