"""The records that a state of the liveness model is made of, the rules that can be switched off, a scenario's bounds.

Generations are named by their numbers, and `renumber.py` gives a state the lowest numbers that keep their order: so a job
that announces for ever goes round in a circle, which the search can find. 0 stands for "none".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

HEARD = "HEARD"
"""A seal closes every generation that the agent would refuse: all below the newest heard, and that one too for a
non-member. Without: only what the worker entered or left. A container restart must not forget it."""
WORDS = "WORDS"
"""A refused set is tried again as soon as any input of `decide` or of `_never_stepped` has changed. Without: the inputs
leave out up to where a member's seal closes."""
BEST = "BEST"
"""Where the list of older generations ends, every connected worker's seal is looked at, and who has not spoken is waited
for. Without: only the seals of members of an older generation."""
RETRY = "RETRY"
"""A refusal for an unreadable checkpoint is tried again after a pause; who could not read comes last, in the choice of
members as well as of the reader. Without: it counts as a refusal for want of a witness."""
DEADLINE = "DEADLINE"
"""Every standing has a deadline, forming included; whoever is late is restarted in place. Without: only a member that has
not entered is late, and it is only left out."""
HANDOVER = "HANDOVER"
"""Both pods of one slot are members of one generation when the only holder leaves. Without: one pod for each slot."""
JOIN = "JOIN"
"""Who trains is told of a planned generation once all that join have arrived in it. Without: at once, and a group stands still
for a joiner that hangs."""

ALL_RULES = frozenset({HEARD, WORDS, BEST, RETRY, DEADLINE, HANDOVER, JOIN})

# What a worker's process does. Letters, because a state is hashed a million times.
ABSENT = "P"  # there is no pod
STARTING = "D"  # its process has ended, the next one starts
READY = "R"  # attached, in no group
FORMING = "F"
TRAINING = "C"  # has adopted

NO_STATE = -1
WITNESS, CHECKPOINT, COLLECTIVE, EXIT = "w", "k", "c", "x"
"""Causes of a fault that an agent reports."""
NO_FAULT = ("", 0)
FORCED, PLANNED = "forced", "planned"

Member = tuple[int, int]
"""(place, pod uid)."""


class Seal(NamedTuple):
    """What a worker that is in no group promises and holds."""

    left: int
    """It enters no generation up to this one."""
    below: int
    """Nor one below this one; 0 without HEARD."""
    state: int
    state_adopted: int
    adopted: int

    def closes(self, generation: int) -> bool:
        return generation <= self.left or generation < self.below


class Word(NamedTuple):
    """The last report of an agent that the operator has taken in."""

    phase: str
    inside: int
    entered: int
    adopted: int
    heard: int
    seal: Seal | None
    fault: tuple[str, int]  # cause, generation


class Worker(NamedTuple):
    """A place for one pod: its agent and its process. A state of training is named by the generation of its last commit;
    one commit a generation is enough. 0: the first state."""

    uid: int
    phase: str = STARTING
    is_connected: int = 1
    hangs: int = 0  # its process does nothing more, for ever; its agent answers
    drains: int = 0
    heard: int = 0
    is_member: int = 0  # of the newest generation it heard
    inside: int = 0
    entered: int = 0
    adopted: int = 0
    left: int = 0
    state: int = NO_STATE
    state_adopted: int = 0
    fault: tuple[str, int] = NO_FAULT
    stream_from: int = 0  # what was announced before this stream was opened does not come on it


class Name(NamedTuple):
    """A part of what a refused set is remembered by (`names_of`)."""

    role: str  # member, seal, lost
    place: int
    uid: int
    held: tuple[int, int, int] | None = None  # state, its generation, adopted: of a seal
    adopted: int = 0
    closes: tuple[bool, ...] = ()


class Arrival(NamedTuple):
    state: int
    state_adopted: int
    adopted: int


class Group(NamedTuple):
    """A generation's document and its store, as long as somebody may be in it."""

    number: int
    members: tuple[Member, ...]
    kind: str
    older: tuple[tuple[int, tuple[Member, ...]], ...]
    seals: tuple[tuple[Member, Seal], ...]
    unspoken: tuple[Member, ...]  # pods that have given no seal (BEST)
    lost: tuple[Member, ...]
    reader: int  # the place that reads the checkpoint
    arrivals: tuple[Arrival | None, ...]
    contributed: int = 0  # bit masks of places
    committed: int = 0

    def awaits_joiners(self) -> bool:
        """Whether a member that was none of the generation before has not arrived."""
        before = self.older[0][1] if self.older else ()
        return any(self.arrivals[member[0]] is None for member in self.members if member not in before)


class Budget(NamedTuple):
    """Faults that may still happen, by kind and in all."""

    crash: int = 0
    all_crash: int = 0
    container: int = 0
    pod: int = 0
    hang: int = 0
    stream: int = 0
    operator: int = 0
    scale: int = 0
    drain: int = 0
    slow: int = 0
    disk: int = 0
    lost: int = 0
    total: int = 0


class State(NamedTuple):
    workers: tuple[Worker, ...]
    told: tuple[Word | None, ...]
    groups: tuple[Group, ...]
    number: int
    members: tuple[Member, ...]
    kind: str
    is_adopted: int
    is_known: int  # the operator has the document in memory
    older: tuple[tuple[int, tuple[Member, ...]], ...]
    tried: tuple[Name, ...]
    could_not_read: (
        int  # bit mask of places that failed to read the checkpoint since the last adopted generation (RETRY)
    )
    replicas: int
    minimum: int
    unreadable: int  # bit mask of places that cannot read the checkpoint
    acknowledged: tuple[int, ...]  # generations whose step every member committed, as far as somebody still holds it
    trained: int  # the newest generation that committed
    budget: Budget


@dataclass(frozen=True)
class LiveScenario:
    """The bounds of one model."""

    rules: frozenset[str] = ALL_RULES
    slots: tuple[int, ...] = (0, 1)
    """The slot of each place; two places of one slot: a pod and its successor."""
    replicas: int = 2
    minimum: int = 1
    minimums: tuple[int, ...] = (1,)
    """What minReplicas may be changed to."""
    faults: Budget = field(default_factory=Budget)
    has_late_reports: bool = False
    """Whether the operator acts on reports that are no longer true."""
    has_late_generations: bool = False
    """Whether the generation before the newest may still be on its way."""
    has_checkpoint: bool = False
    """Whether the status names a checkpoint (of the first state), so that who holds nothing must read it."""
