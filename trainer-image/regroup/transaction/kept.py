"""Gradients that were reduced and not applied, because the rows of the step never came (rule KEEP).

Another rank may have had all rows, and have applied the step. Then a generation that continues from that state asks for these
gradients, and this rank can follow. They stay until the next apply, or until this rank holds another state than the one that they
were computed on.
"""

from dataclasses import dataclass
from typing import Any

from regroup.protocol.state import StatePair

from .hooks import Arguments


@dataclass(frozen=True)
class Kept:
    """One step that was reduced and not applied."""

    generation: int
    base: StatePair
    """The state that the gradients were computed on."""
    reduced: Any
    """The sums of the strategy (`DataParallel.take`)."""
    arguments: Arguments
    """The arguments of its commit."""

    @property
    def makes(self) -> StatePair:
        """Name of the state that their apply would make."""
        return StatePair(self.generation, self.base.step + 1)


class Shelf:
    """The kept steps of one process: one for each generation that broke at this point without a commit in between."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    def add(self, kept: Kept) -> None:
        self._kept.append(kept)

    def clear(self) -> None:
        """Drop all: a step was applied, and a rank that needs an older one copies."""
        self._kept = []

    def names(self, held: StatePair | None) -> tuple[tuple[int, StatePair], ...]:
        """Return (generation, base) of what can be applied to the state that is held; forget the rest."""
        self._kept = [kept for kept in self._kept if kept.base == held]
        return tuple((kept.generation, kept.base) for kept in self._kept)

    def find(self, held: StatePair | None, wanted: StatePair) -> Kept | None:
        """Return what makes the wanted state of the one that is held (rule EXACT)."""
        return next((kept for kept in self._kept if kept.base == held and kept.makes == wanted), None)
