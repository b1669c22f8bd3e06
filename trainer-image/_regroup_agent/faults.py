"""The faults that an operator may not have written to the status yet, and the choice of those to report again. Pure.

An operator that has answered a fault may die before it writes the fault to the status. Exits of processes are counted, so none
may be missed. They are reported again to the next operator, which finds in the status the ones that were counted (adr/0067).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from regroup.protocol import wire

MAX_UNANSWERED = 100
MAX_ANSWERED = 32
"""Number of answered exits that are kept to be reported again."""
ANSWERED_S = 600.0
"""Time for which an answered exit is kept. An operator that dies has a successor far sooner."""


@dataclass(eq=False)
class Kept:
    """One fault, and the monotonic time at which the agent first wanted to report it."""

    fault: wire.Fault
    at_s: float
    answered: bool = False


class Faults:
    """The faults of one agent, oldest first."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    def add(self, fault: wire.Fault, now_s: float) -> Kept:
        """Keep a fault that the caller is about to report."""
        kept = Kept(fault, now_s)
        self._kept.append(kept)
        self._forget(now_s)
        return kept

    def answered(self, kept: Kept, now_s: float) -> None:
        """Mark a fault as answered by an operator. Only an exit is kept after that."""
        kept.answered = True
        self._forget(now_s)

    def refused(self, kept: Kept) -> None:
        """Forget a fault that an operator has refused as invalid. It would be refused after each hello."""
        self._kept = [one for one in self._kept if one is not kept]

    def again(self, now_s: float, *, anew: bool, on_their_way: Collection[Kept] = ()) -> list[tuple[Kept, wire.Fault]]:
        """Return the faults to report now, each with its present age.

        `anew`: the operator may be another one than the last. It is told of answered exits as well.
        """
        self._forget(now_s)
        due = [kept for kept in self._kept if (anew or not kept.answered) and kept not in on_their_way]
        return [(one, replace(one.fault, observed_ms=one.fault.observed_ms + (now_s - one.at_s) * 1000)) for one in due]

    def _forget(self, now_s: float) -> None:
        waiting = [one for one in self._kept if not one.answered][-MAX_UNANSWERED:]
        exits = [one for one in self._kept if one.answered and one.fault.ended and now_s < one.at_s + ANSWERED_S]
        keep = {*waiting, *exits[-MAX_ANSWERED:]}
        self._kept = [one for one in self._kept if one in keep]
