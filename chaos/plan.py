"""What a seed stands for: one job, and its faults in their order. Pure; the same on every machine.

A plan names rules, not processes: "the agent of the third worker in three" is looked up when its moment has come.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from chaos.kinds import KINDS, SCRIPT, SESSION, Kind

SETTLED, FORMING, ADOPTING, CHECKPOINT, SCALING, END, FINISHING = (
    "settled", "forming", "adopting", "checkpoint", "scaling", "end", "finishing",
)  # fmt: skip
"""Moments at which a fault is injected; see Fault.moment."""
RECOVERING = "recovering"
"""Never planned, but met instead of a planned moment: no commit since the fault before, and no change of members is seen."""
MOMENTS = (SETTLED, RECOVERING, FORMING, ADOPTING, SCALING, CHECKPOINT, END, FINISHING)
MAX_WORKERS = 5
END_FAULTS = 3
"""So many of a job's faults come in its last steps, if it has at least three times as many."""
END_STEPS = 10


@dataclass(frozen=True)
class Scenario:
    """The job that takes the faults."""

    tier: str
    processes: int
    workers: int
    min_workers: int | None
    """None: fixed size."""

    @property
    def elastic(self) -> bool:
        """Whether the job may train with fewer workers than it wants."""
        return self.min_workers is not None

    def __str__(self) -> str:
        size = f"{self.min_workers} to {MAX_WORKERS} workers" if self.elastic else "fixed size"
        return f"{self.tier} tier, {self.workers} workers of {self.processes}, {size}"


@dataclass(frozen=True)
class Fault:
    """One fault: what, when, to whom."""

    kind: str
    moment: str
    """settled: `delay_s` after the last one was recovered from. forming, adopting: while the change of members that the fault
    before caused is at that point. scaling: `delay_s` into a resize, or once its generation forms. checkpoint: while one is
    written. end: in the last ten steps. finishing: after them. The moment may not come: Injected.moment is the one that the
    fault met."""
    delay_s: float
    lasts_s: float
    target: float
    """In [0, 1): which of the candidates, in the order of their slots."""
    number: int
    """What the kind needs of a number: the size to scale to, a way to damage, whether a pod gets a grace."""
    whole_first: bool
    """Before it, the job must have had all of its workers again."""

    def pick(self, count: int, *, beside: int = 0) -> int:
        """Return the index of the target among `count` candidates, or of the next one but `beside`."""
        return (int(self.target * count) + beside) % count

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind}{lasts} ({self.moment})"


def scenario(seed: int, *, cluster: bool = False) -> Scenario:
    """Return the job of a seed."""
    rng = random.Random(f"job {seed}")
    tier = SCRIPT if rng.random() < 0.25 else SESSION
    processes = 2 if rng.random() < 0.33 else 1
    workers = rng.choice([2, 3] if processes == 2 or cluster else [2, 3, 4])
    elastic = rng.random() < 0.75
    return Scenario(tier, processes, workers, rng.choice([1, 1, 2]) if elastic else None)


def faults(seed: int, count: int, job: Scenario, *, cluster: bool = False) -> list[Fault]:
    """Return the faults of a job: the first of an endless list, the last few of them moved to the job's end."""
    drawn = list(islice(_draw(random.Random(f"faults {seed}"), job, cluster), count))
    late = END_FAULTS if count >= 3 * END_FAULTS else 0
    rng = random.Random(f"end {seed}")
    last = [_at_the_end(f, rng) for f in drawn[count - late :]]
    # Earlier steps first: "3 steps before the end" is over once the last step is made.
    return drawn[: count - late] + sorted(last, key=lambda f: (f.moment == FINISHING, -f.delay_s))


def _draw(rng: random.Random, job: Scenario, cluster: bool) -> Iterator[Fault]:
    kinds = [k for k in KINDS.values() if _fits(k, job, cluster)]
    weights = [k.weight for k in kinds]
    previous: Kind | None = None
    while True:
        kind = rng.choices(kinds, weights)[0]
        # Drawn whether they are used or not, so that a change of one kind does not move all faults after it.
        delay_s, lasts, target, where = (rng.random() for _ in range(4))
        number, whole = rng.randrange(1 << 16), rng.random() < 0.2
        moment = _moment(where, previous, job.tier)
        yield Fault(
            kind.name,
            moment,
            round(0.02 + 0.6 * delay_s**2, 3),
            _duration(kind, lasts),
            round(target, 4),
            number,
            whole and moment == SETTLED,
        )
        previous = kind


def _fits(kind: Kind, job: Scenario, cluster: bool) -> bool:
    if not (kind.cluster if cluster else kind.local) or job.tier not in kind.tiers:
        return False
    return job.elastic or not kind.elastic_only


def _duration(kind: Kind, u: float) -> float:
    """0.2 to 10 s, short ones far more often: they hit the moments at which the long ones are merely waited for. What stands for
    a machine lasts longer: 5 to 25 s without power, 20 s without an API server."""
    if not kind.lasts:
        return 0.0
    if kind.name in ("stop-api", "power-off"):
        return 20.0 if kind.name == "stop-api" else round(5.0 + 20.0 * u, 1)
    return float(round(0.2 * 50.0 ** (u * u), 2))


def _moment(u: float, previous: Kind | None, tier: str) -> str:
    if previous is None or u < 0.5:
        return SETTLED
    if previous.name == "scale":
        return SCALING if u < 0.8 else ADOPTING
    if u < 0.7:
        return FORMING
    # A script's own checkpoints cannot be seen from outside.
    return ADOPTING if u < 0.88 or tier == SCRIPT else CHECKPOINT


def _at_the_end(fault: Fault, rng: random.Random) -> Fault:
    moment = END if rng.random() < 0.6 else FINISHING
    lasts_s = min(fault.lasts_s, 2.0)
    delay_s = float(rng.randrange(END_STEPS)) if moment == END else fault.delay_s / 4
    return Fault(fault.kind, moment, delay_s, lasts_s, fault.target, fault.number, whole_first=False)


def steps_for(count: int) -> int:
    """Return how many steps a job with so many faults makes: enough to commit between them, and to end soon after the last."""
    return 120 + 20 * count
