"""The faults that an operator may not have written to the status yet, and which of them are reported again. Pure.

An answer says that an operator has heard of a fault. It may die before it has written that to the status. So the exits of
processes, which are counted, are reported again to the next operator: it finds in the status which of them were seen (adr/0067).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from regroup.protocol import wire

MAX_UNANSWERED = 100
MAX_ANSWERED = 32
"""So many exits are reported again although they were answered."""
ANSWERED_S = 600.0
"""For so long: an operator that dies leads again, or is followed by another one, far sooner."""


@dataclass(eq=False)
class Kept:
    """One fault and when it was first reported, or was to be. Times are monotonic seconds."""

    fault: wire.Fault
    at_s: float
    answered: bool = False


class Faults:
    """The faults of one agent, oldest first."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    def add(self, fault: wire.Fault, now_s: float) -> Kept:
        """Keep a fault; it is about to be reported."""
        kept = Kept(fault, now_s)
        self._kept.append(kept)
        self._forget(now_s)
        return kept

    def answered(self, kept: Kept, now_s: float) -> None:
        """An operator has heard of it."""
        kept.answered = True
        self._forget(now_s)

    def refused(self, kept: Kept) -> None:
        """Forget a fault that an operator could not use: each hello would be followed by its refusal."""
        self._kept = [one for one in self._kept if one is not kept]

    def again(self, now_s: float, *, anew: bool, on_their_way: Collection[Kept] = ()) -> list[tuple[Kept, wire.Fault]]:
        """Return what is to be reported now, with its age. `anew`: to an operator that may be another one than the last, and knows
        which exits were counted."""
        self._forget(now_s)
        due = [kept for kept in self._kept if (anew or not kept.answered) and kept not in on_their_way]
        return [(one, replace(one.fault, observed_ms=one.fault.observed_ms + (now_s - one.at_s) * 1000)) for one in due]

    def _forget(self, now_s: float) -> None:
        waiting = [one for one in self._kept if not one.answered][-MAX_UNANSWERED:]
        exits = [one for one in self._kept if one.answered and one.fault.ended and now_s < one.at_s + ANSWERED_S]
        keep = {*waiting, *exits[-MAX_ANSWERED:]}
        self._kept = [one for one in self._kept if one in keep]
