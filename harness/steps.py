"""What the trainers themselves logged: one line for each committed step, stamped by the container runtime. Pure.

The tour judges by these lines, not by what the operator says of itself: their times are this machine's clock, the one by
which it sends its signals. Only rank 0 prints, so each step is there once, unless a generation did it again.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

_LINE = re.compile(r"(\S+) step (\d+)  loss (\S+)  generation (\d+)  ranks (\d+)$")


@dataclass(frozen=True)
class Step:
    """One committed step. `at_s` is in seconds since the epoch."""

    at_s: float
    number: int
    loss: str
    generation: int
    ranks: int


def parse(line: str) -> Step | None:
    """Return the step in a line of `kubectl logs --timestamps`, None for any other line."""
    found = _LINE.match(line.rstrip())
    if found is None:
        return None
    at, number, loss, generation, ranks = found.groups()
    return Step(datetime.fromisoformat(at).timestamp(), int(number), loss, int(generation), int(ranks))


class Steps:
    """Steps in the order of their times. Lines may be added from several threads, again and in any order."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], Step] = {}

    def add(self, step: Step) -> None:
        """Add a step, once."""
        self._steps.setdefault((step.generation, step.number), step)

    def __iter__(self) -> Iterator[Step]:
        return iter(sorted(self._steps.copy().values(), key=lambda s: s.at_s))

    @property
    def newest(self) -> Step | None:
        """The last step so far."""
        return max(self._steps.copy().values(), key=lambda s: s.at_s, default=None)

    def around(self, generation: int) -> tuple[Step, Step] | None:
        """Return the last step of a generation or an older one, and the first of a newer; None before there is one."""
        older = [s for s in self if s.generation <= generation]
        newer = [s for s in self if s.generation > generation]
        return (older[-1], newer[0]) if older and newer else None

    def intervals_s(self, *, since_s: float, until_s: float) -> list[float]:
        """Return the times from step to step that touch the span between two moments."""
        times = [s.at_s for s in self]
        return [b - a for a, b in itertools.pairwise(times) if a < until_s and b > since_s]

    def pauses_s(self, after: int) -> list[float]:
        """Return for each generation after `after` how long nobody stepped before it, less its predecessor's median step."""
        by_generation: dict[int, list[float]] = {}
        for step in self:
            by_generation.setdefault(step.generation, []).append(step.at_s)
        return [
            then[0] - before[-1] - _median_interval_s(before)
            for (_, before), (number, then) in itertools.pairwise(sorted(by_generation.items()))
            if number > after
        ]


def _median_interval_s(times: list[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0
