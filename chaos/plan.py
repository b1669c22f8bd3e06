"""Makes the job of a seed and its faults, in their order. Pure: a seed gives the same on every machine.

A plan names rules, not processes: "the agent of the third worker in three" is found when its moment has come.
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
"""Moments at which a fault is injected. `Fault.moment` explains them."""
RECOVERING = "recovering"
"""Never planned, but met instead of a planned moment: no commit has come since the last fault, and members do not change."""
MOMENTS = (SETTLED, RECOVERING, FORMING, ADOPTING, SCALING, CHECKPOINT, END, FINISHING)
MAX_WORKERS = 5
WHOLE, SPLIT = "whole", "split"
"""Sorts of jobs (`--model`). In a whole job each process has all of the model. A seed gives another job in each sort."""
END_FAULTS = 3
"""Number of faults that come in a job's last steps, if it has at least three times as many."""
END_STEPS = 10
EVALUATE_EVERY = 10


@dataclass(frozen=True)
class Shape:
    """The split of a model, and the workers that hold it."""

    mesh: str
    """Arguments of `regroup.mesh()`: "shard=2 tensor=2"."""
    processes: int  # of a worker
    workers_per_group: int
    most_groups: int
    """Most copies of the model in a job: a process takes memory and time of two cores."""
    schedule: str = ""
    """Schedule of the pipeline. Empty if there is none."""

    @property
    def group_size(self) -> int:
        """Number of processes that hold one copy of the model."""
        return self.processes * self.workers_per_group


SHAPES = (
    Shape("shard=2", 2, 1, 3),
    Shape("shard=2", 1, 2, 3),
    Shape("tensor=2", 2, 1, 3),
    Shape("shard=2 tensor=2", 4, 1, 2),
    Shape("pipeline=2", 2, 1, 3, "gpipe"),
    Shape("pipeline=2", 1, 2, 3, "1f1b"),
    Shape("pipeline=2", 2, 1, 3, "interleaved"),
    Shape("pipeline=2", 2, 1, 3, "zero_bubble"),
    Shape("pipeline=2 shard=2", 4, 1, 2, "1f1b"),
    Shape("tensor=2 pipeline=2", 4, 1, 2, "interleaved"),
)
"""Seeds take the shapes in turn, so that ten jobs in a row have all. A session refuses "zero_bubble" with another dimension."""


@dataclass(frozen=True)
class Scenario:
    """The job that takes the faults."""

    tier: str
    processes: int
    workers: int
    min_workers: int | None
    """None for a job of fixed size."""
    shape: Shape | None = None
    """None if each process has all of the model."""
    evaluate_every: int = 0
    """Steps between two evaluations in job.collective(). 0: no evaluations."""

    @property
    def group_size(self) -> int:
        """Number of processes that hold one copy of the model."""
        return self.shape.group_size if self.shape else 1

    @property
    def workers_per_group(self) -> int:
        """Number of workers that join and leave together."""
        return self.shape.workers_per_group if self.shape else 1

    @property
    def max_workers(self) -> int:
        """Largest size of an elastic job."""
        return self.shape.most_groups * self.shape.workers_per_group if self.shape else MAX_WORKERS

    @property
    def elastic(self) -> bool:
        """True if the job may train with fewer workers than it wants."""
        return self.min_workers is not None

    def __str__(self) -> str:
        size = f"{self.min_workers} to {self.max_workers} workers" if self.elastic else "fixed size"
        mesh = " ".join(filter(None, [self.shape.mesh, self.shape.schedule])) if self.shape else ""
        split = f", {mesh}, {self.workers_per_group} workers a group" if self.shape else ""
        evaluated = f", evaluated every {self.evaluate_every} steps" if self.evaluate_every else ""
        return f"{self.tier} tier, {self.workers} workers of {self.processes}, {size}{split}{evaluated}"


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, its moment and its target."""

    kind: str
    moment: str
    """Planned moment. It may not come: `Injected.moment` is the moment that the fault met.

    - settled: `delay_s` after the job has recovered from the last fault.
    - forming, adopting: while the change of members that the last fault caused is at that point.
    - scaling: `delay_s` into a resize, or when its generation forms.
    - checkpoint: while a checkpoint is written.
    - end: in the last ten steps. finishing: after them.
    """
    delay_s: float
    lasts_s: float
    target: float
    """Number in [0, 1) that chooses the target among the candidates, in the order of their slots."""
    number: int
    """Random number for the kind: the size to scale to, a way to damage a checkpoint, or whether a pod gets a grace."""
    whole_first: bool
    """True if the fault waits until the job has all of its workers again."""

    def pick(self, count: int, *, beside: int = 0) -> int:
        """Return the index of the target among `count` candidates, or of the candidate `beside` places after it."""
        return (int(self.target * count) + beside) % count

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind}{lasts} ({self.moment})"


def scenario(seed: int, *, cluster: bool = False, model: str = WHOLE) -> Scenario:
    """Return the job of a seed."""
    if model == SPLIT:
        return _split_scenario(seed)
    rng = random.Random(f"job {seed}")
    tier = SCRIPT if rng.random() < 0.25 else SESSION
    processes = 2 if rng.random() < 0.33 else 1
    workers = rng.choice([2, 3] if processes == 2 or cluster else [2, 3, 4])
    elastic = rng.random() < 0.75
    return Scenario(tier, processes, workers, rng.choice([1, 1, 2]) if elastic else None)


def _split_scenario(seed: int) -> Scenario:
    rng = random.Random(f"split job {seed}")
    shape = SHAPES[seed % len(SHAPES)]
    # One copy in one job of four: a part that is lost is read from a checkpoint there.
    groups = rng.choice([1, 2, 2, shape.most_groups])
    least = rng.choice([1, 1, min(2, groups)])
    elastic = rng.random() < 0.75
    return Scenario(
        SESSION,
        shape.processes,
        groups * shape.workers_per_group,
        least * shape.workers_per_group if elastic else None,
        shape,
        # A pipeline cannot be called, so there is nothing to evaluate it with.
        EVALUATE_EVERY if rng.random() < 0.5 and not shape.schedule else 0,
    )


def faults(seed: int, count: int, job: Scenario, *, cluster: bool = False) -> list[Fault]:
    """Return the faults of a job. They are the first of an endless list, the last few of them moved to the job's end."""
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
    """Return the seconds that a fault lasts: 0.2 to 10 s, short ones far more often.

    Short faults hit moments that long ones only wait through. Faults of a machine last longer: 5 to 25 s without power,
    and 20 s without an API server.
    """
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
    """Return the number of steps of a job with `count` faults. It can commit between them, and ends soon after the last."""
    return 120 + 20 * count
