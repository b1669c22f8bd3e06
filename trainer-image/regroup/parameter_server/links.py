"""The links of a parameter server in one generation. A link has two ranks, with connections of their own.

The server, rank 0, has a link to every other rank. Server and standby have a second one, because a copy of a version may be on its
way while the standby waits for an answer. A tensor goes over a link by a broadcast, as on the edges of a pipeline
(docs/design/adr/0038-pipelines.md). So both ends must send and receive in one order. A header says how much follows it.

`Link.wait` ends with the generation or when a connection ends. A process that waits for several links asks each of them
(`Link.take`), and `Pauses.pause` finds out whether a rank is lost.
"""

import time
from collections.abc import Sequence

import torch

from regroup.bits import float_bits, signed
from regroup.errors import PeerLost
from regroup.generation.broadcast import from_rank
from regroup.generation.groups import FORGOTTEN_S, Groups, Part, Pending
from regroup.generation.pauses import pause_s
from regroup.protocol.local import Assignment

COPIES = "copies"
"""Name of the link on which versions go to the standby."""
_LONGEST_S = 0.002
_LOOK_S = 0.02
"""Seconds without a message before the connections are looked at. Most answers come sooner."""


def name_of(rank: int) -> str:
    """Return the name of the link between the server and another rank."""
    return f"server and {rank}"


def parts(assignment: Assignment, standby: int | None) -> dict[str, tuple[int, ...]]:
    """Return the two ranks of each link of this rank, by name. The names have one order on all ranks."""
    rank = assignment.rank
    others = range(1, assignment.world_size) if rank == 0 else (rank,)
    found: dict[str, tuple[int, ...]] = {name_of(other): (0, other) for other in others}
    if standby is not None and rank in (0, standby):
        found[COPIES] = (0, standby)
    return found


class Link:
    """This process's end of a link. Tensors arrive in the order in which the other end sends them."""

    def __init__(self, groups: Groups, name: str) -> None:
        self._part: Part = groups.part(name)
        self._groups = groups
        self._sent: list[tuple[Pending, torch.Tensor]] = []
        """Broadcasts on their way, each with the tensor that it reads."""
        self._coming: list[Pending] = []

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors of host memory, which must stay as they are. Does not wait. Raises what `Groups.failed` says."""
        self._sent = [one for one in self._sent if not one[0].work.is_completed()]
        for tensor in tensors:
            if tensor.numel():
                self._sent.append((self._part.launch("broadcast", [tensor], from_rank(self._part.rank)), tensor))

    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receive the next tensors into these. Does not wait."""
        self._coming += [
            self._part.launch("broadcast", [tensor], from_rank(1 - self._part.rank))
            for tensor in tensors
            if tensor.numel()
        ]

    def take(self) -> bool:
        """Return whether all expected tensors have come. Does not wait. Raises what `Groups.failed` says."""
        self._groups.check()
        if not all(one.work.is_completed() for one in self._coming):
            return False
        coming, self._coming = self._coming, []
        self._part.wait(coming)
        return True

    def wait(self) -> None:
        """Wait until all expected tensors have come. Raises what `Groups.failed` says."""
        coming, self._coming = self._coming, []
        self._part.wait(coming)


class Pauses:
    """Short sleeps of a process that asks several links in turn. They get longer while nothing comes."""

    def __init__(self, groups: Groups | None) -> None:
        self._groups = groups
        self._lost_since_s: float | None = None
        self._idle_since_s: float | None = None
        """Monotonic time since which nothing has come."""
        self._began_s: float | None = None
        """Monotonic time since which this process waits for other ranks."""

    def end(self) -> None:
        """End the wait, and add it to the time that the process has waited for other ranks."""
        self._idle_since_s = None
        if self._groups is not None and self._began_s is not None:
            self._groups.waited_s += time.monotonic() - self._began_s
            self._groups.waits_since_s = self._began_s = None

    def pause(self, *, idle: bool) -> None:
        """Sleep if nothing has come (`idle`).

        Raises Aborted. Raises PeerLost if a connection ended FORGOTTEN_S ago and no message has failed: gloo may forget messages.
        """
        if not idle:
            self.end()
            return
        now_s = time.monotonic()
        if self._groups is not None and self._groups.waits_since_s is None:
            self._began_s = self._groups.waits_since_s = now_s
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        waited_s = now_s - self._idle_since_s
        time.sleep(pause_s(waited_s, _LONGEST_S))
        groups = self._groups
        if groups is None or waited_s < _LOOK_S:
            return
        groups.check()
        if groups.sockets.lost() is None:
            self._lost_since_s = None
            return
        now_s = time.monotonic()
        self._lost_since_s = now_s if self._lost_since_s is None else self._lost_since_s
        if now_s - self._lost_since_s > FORGOTTEN_S:
            raise PeerLost("A connection to another rank ended.", groups.who_is_lost())


def numbers(*values: int | float) -> torch.Tensor:
    """Return a message's header: int64, floats as their bits."""
    return torch.tensor([float_bits(value) if isinstance(value, float) else signed(value) for value in values])
