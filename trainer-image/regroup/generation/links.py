"""The links of a parameter server in one generation: two ranks each, with connections of their own.

There is one between the server, rank 0, and every other rank, and a second one between server and standby, because a copy of a
version may be on its way while the standby waits for an answer. As on the edges of a pipeline a tensor goes over it by a broadcast
(docs/design/adr/0038-pipelines.md), so both ends must send and receive in one order. A header says how much follows it.

`Link.wait` ends with the generation or when a connection ends. Whoever waits for several links looks at each (`Link.take`) and lets
`Pauses.pause` find out whether anybody is gone.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from regroup.bits import float_bits, signed
from regroup.errors import PeerLost
from regroup.protocol.local import Assignment

from .broadcast import from_rank
from .groups import FORGOTTEN_S, Groups, Part, Pending
from .pauses import pause_s

COPIES = "copies"
"""Name of the link on which versions go to the standby."""
_LONGEST_S = 0.002
_LOOK_S = 0.02
"""Nobody is taken to be gone any sooner: most answers come by then."""


def name_of(rank: int) -> str:
    """Return the name of the link between the server and another rank."""
    return f"server and {rank}"


def parts(assignment: Assignment, standby: int | None) -> dict[str, tuple[int, ...]]:
    """Return the two ranks of each link of this rank, by name. In one order on all ranks."""
    rank = assignment.rank
    others = range(1, assignment.world_size) if rank == 0 else (rank,)
    found: dict[str, tuple[int, ...]] = {name_of(other): (0, other) for other in others}
    if standby is not None and rank in (0, standby):
        found[COPIES] = (0, standby)
    return found


class Link:
    """This process's end of a link. What one end sends comes at the other in the same order."""

    def __init__(self, groups: Groups, name: str) -> None:
        self._part: Part = groups.part(name)
        self._groups = groups
        self._sent: list[tuple[Pending, torch.Tensor]] = []
        """On its way, and what it reads from."""
        self._coming: list[Pending] = []

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors of host memory, which must stay as they are. Does not wait. Raises what `Groups.failed` says."""
        self._sent = [one for one in self._sent if not one[0].work.is_completed()]
        for tensor in tensors:
            if tensor.numel():
                self._sent.append((self._part.launch("broadcast", [tensor], from_rank(self._part.rank)), tensor))

    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let what comes next be received into these. Does not wait."""
        self._coming += [
            self._part.launch("broadcast", [tensor], from_rank(1 - self._part.rank))
            for tensor in tensors
            if tensor.numel()
        ]

    def take(self) -> bool:
        """Return whether all that was expected has come. Does not wait. Raises what `Groups.failed` says."""
        self._groups.check()
        if not all(one.work.is_completed() for one in self._coming):
            return False
        coming, self._coming = self._coming, []
        self._part.wait(coming)
        return True

    def wait(self) -> None:
        """Wait until all that was expected has come. Raises what `Groups.failed` says."""
        coming, self._coming = self._coming, []
        self._part.wait(coming)

    def flush(self) -> None:
        """Wait until the other end has got everything. Raises what `Groups.failed` says."""
        sent, self._sent = self._sent, []
        self._part.wait([one for one, _ in sent])


class Pauses:
    """Short sleeps of a process that looks at several links in turn: longer ones the longer nothing comes."""

    def __init__(self, groups: Groups | None) -> None:
        self._groups = groups
        self._lost_since_s: float | None = None
        self._idle_since_s: float | None = None
        """Since when nothing has come."""
        self._began_s: float | None = None
        """Since when this process has been waiting for others."""

    def end(self) -> None:
        """It waits no more."""
        self._idle_since_s = None
        if self._groups is not None and self._began_s is not None:
            self._groups.waited_s += time.monotonic() - self._began_s
            self._groups.waits_since_s = self._began_s = None

    def pause(self, *, idle: bool) -> None:
        """Sleep, if nothing has come. Raises PeerLost where a connection has ended and its messages do not fail, as gloo may forget
        them, and Aborted."""
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


def read(header: torch.Tensor) -> Iterator[int]:
    """Return the numbers of a header, in turn."""
    return iter(header.tolist())
