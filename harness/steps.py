"""The trainers' own log: one line for each committed step, stamped by the container runtime. Pure.

The tour judges by these lines, not by the operator's reports. Their times are of this machine's clock, the same clock
that the tour reads when it sends a signal. Every rank prints, so the log goes on when a rank dies.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from harness.judge import Commit

_LINE = re.compile(r"(\S+) step (\d+)  loss (\S+)  generation (\d+)  ranks (\d+)$")


@dataclass(frozen=True)
class Step:
    """One committed step. `at_s` is in seconds since the epoch."""

    at_s: float
    number: int
    loss: str
    generation: int
    ranks: int
    pod: str


def parse(line: str, pod: str) -> Step | None:
    """Return the step in a line of `kubectl logs --timestamps` of a pod, None for any other line."""
    found = _LINE.match(line.rstrip())
    if found is None:
        return None
    at, number, loss, generation, ranks = found.groups()
    return Step(datetime.fromisoformat(at).timestamp(), int(number), loss, int(generation), int(ranks), pod)


class Steps:
    """The steps of a group in the order of their times. The time of a step is that of the first rank that printed it.

    Lines may be added from several threads, again and in any order.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int, str], Step] = {}

    def add(self, step: Step) -> None:
        """Add a step of a pod, once."""
        self._steps.setdefault((step.generation, step.number, step.pod), step)

    def __iter__(self) -> Iterator[Step]:
        first: dict[tuple[int, int], Step] = {}
        for step in sorted(self._steps.copy().values(), key=lambda s: s.at_s):
            first.setdefault((step.generation, step.number), step)
        return iter(first.values())

    def commits(self) -> list[Commit]:
        """Return all steps of all pods, for the judge. A pod has one process at a time."""
        return [Commit(s.pod, s.generation, s.number) for s in self._steps.copy().values()]

    def pods(self, generation: int) -> set[str]:
        """Return the pods that printed a step of a generation."""
        return {s.pod for s in self._steps.copy().values() if s.generation == generation}

    @property
    def newest(self) -> Step | None:
        """The last step so far, or None."""
        return max(self, key=lambda s: s.at_s, default=None)

    def first_after(self, generation: int) -> Step | None:
        """Return the first step of a newer generation, or None."""
        return next((s for s in self if s.generation > generation), None)

    def intervals_s(self, *, since_s: float, until_s: float) -> list[float]:
        """Return the times from step to step that touch the span between two moments."""
        times = [s.at_s for s in self]
        return [b - a for a, b in itertools.pairwise(times) if a < until_s and b > since_s]

    def pauses_s(self, after: int) -> list[float]:
        """Return the pause before each generation above `after`: the time without a step, less the median step before it."""
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
