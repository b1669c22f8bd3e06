"""How long things take in a simulated job, drawn from a random generator of the world's own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

Span = tuple[float, float]


@dataclass
class Pace:
    """How long things take, seconds: each time something between the two bounds. By default nothing takes any time."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    start_s: Span = (0.0, 0.0)
    """From the start of a trainer process to its attaching."""
    form_s: Span = (0.0, 0.0)
    adopt_s: Span = (0.0, 0.0)
    checkpoint_s: Span = (0.0, 0.0)
    container_s: Span = (0.0, 0.0)
    reconnect_s: Span = (0.0, 0.0)
    watch_s: Span = (0.0, 0.0)
    """Until an operator's watch shows that the job's object has changed."""
    probe_s: float = 5.0
    """Until a kernel gives a connection up whose other end says nothing."""
    probe_late_s: Span = (0.0, 0.0)
    """How much later than that it does: the streams of one node do not end at one moment."""
    rest_s: float = 0.0
    """So long an operator does not plan the job again, as if it had thousands of workers (REST in controller.py)."""
    in_part: bool = False
    """Some ranks of a group that breaks may have committed the step in flight."""
    shuffles: bool = False
    """Who has something to do at one moment does it in any order."""

    def some(self, span: Span) -> float:
        return 0.0 if span[1] == 0.0 else round(self.rng.uniform(*span), 3)

    def toss(self, chance: float) -> bool:
        return self.rng.random() < chance
