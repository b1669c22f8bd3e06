"""The records that a state of the model of model groups is made of, the rules that can be switched off, a scenario's bounds.

A generation is named by its number, from 1 on; 0 stands for "none". A *rank* is the one process of a worker; its place in
`State.ranks` is its slot, and slot mod 2 its inner index, for life. What a rank holds is the shard of its inner index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

REDUCED = "REDUCED"
"""A rank sends its row only after its own reductions are complete. Without: as soon as it has contributed."""
KEEP = "KEEP"
"""Reduced gradients that were not applied stay beside the state until the first apply in a later generation. Without: they are
zeroed when the step is interrupted."""
EXACT = "EXACT"
"""Kept gradients are named (generation, step, base) and applied only onto that base, where that state is the decided one. Without:
whoever has gradients of the step applies them."""
SERVE = "SERVE"
"""Roll forward first, then serve copies; only the decided state is copied. Without: whoever has arrived serves what it has."""
ROWS = "ROWS"
"""Who applied a step keeps its gathered rows with the state and hands them over. Without: who rolls forward has only its own."""
LOCAL = "LOCAL"
"""Nothing after the gather of the rows communicates. Without: the ranks of a model group wait for each other during apply."""
INNER = "INNER"
"""Rule WITNESS is asked for each inner index. Without: a member of whatever inner index is a witness of its whole generation."""
GUESTS = "GUESTS"
"""Every connected holder of state arrives, as member or as guest, and adoption waits for it. Without: members only."""

ALL_RULES = frozenset({REDUCED, KEEP, EXACT, SERVE, ROWS, LOCAL, INNER, GUESTS})

KEEP_UNTIL_BACKWARD = "KEEP until the next backward"
"""Not until the first apply in a later generation."""
ROWS_UNTIL_ROW = "ROWS until the next row"
"""Not until the next apply."""
INNER_ONCE = "INNER for the newest state only"
"""When a state is given up, INNER is not asked again for the next older one."""
COPIES_FORGOTTEN = "WITNESS without those who copied"
"""Who adopted a generation that never stepped, and so may hold a copy of an older one's state, need not be lost."""
ONE_SNAPSHOT = "one snapshot for each rank"
"""BACKUP: the snapshot before is not kept until every rank has the next one."""
WEAKER_FORMS = frozenset({KEEP_UNTIL_BACKWARD, ROWS_UNTIL_ROW, INNER_ONCE, COPIES_FORGOTTEN, ONE_SNAPSHOT})
"""Weaker forms of rules; each has a trace of its own."""

# Phases of a rank. Letters, because a state is hashed a hundred thousand times.
OUTSIDE = "I"
ARRIVED = "E"
COPYING = "K"  # receives a copy; what it held is beside until the last byte (rule TORN)
COMPUTING = "C"  # has adopted or applied, and contributes to its next step
REDUCED_STEP = "D"  # its reductions of the step are complete, its row is sent
APPLYING = "N"  # in the middle of apply (LOCAL off)
SERVING = "G"  # a guest: no rank, keeps its state, serves copies

History = tuple[int, ...]
"""The generation in which each step was reduced. Two shards are of the same state if and only if their histories are equal.
A negative element: that step was applied with the rank's own row in place of the gathered ones (ROWS off)."""
Name = tuple[int, int]
"""(generation of the last commit, step): what ranks can see of a history."""


GUEST = -1


class Place(NamedTuple):
    """Who a generation names in a slot."""

    uid: int
    group: int  # the model group: its members have different inner indexes; GUEST: no rank


class Pending(NamedTuple):
    """Reduced gradients that were not applied (rule KEEP)."""

    generation: int  # in which they were reduced
    base: History  # the state that they were computed on


class Arrival(NamedTuple):
    """What a member or a guest brings to a generation's store."""

    uid: int
    history: History | None
    pending: tuple[Pending, ...]
    adopted: int
    backups: tuple[History, ...]
    has_rows: int


POD = 16
"""Numbers of processes that a pod has."""


class Rank(NamedTuple):
    uid: int  # another one for each process; uid // POD is the pod
    is_up: int
    is_connected: int  # to the operator
    generation: int  # that it has entered last
    phase: str
    history: History | None  # None: no state
    pending: tuple[Pending, ...]
    adopted: int  # the newest generation that it has adopted
    backups: tuple[History, ...]  # in the agent's memory, newest first; outlive the process
    has_rows: int  # it keeps the rows that its last step was applied with


class Generation(NamedTuple):
    """A generation's document and its store. Every tuple has an item for each slot."""

    places: tuple[Place | None, ...]  # members, and (GUESTS) guests
    holders: tuple[int, ...]  # uid of who was connected and held state when it was announced; else -1
    arrivals: tuple[Arrival | None, ...]
    contributed: tuple[int, ...]  # the step that it has contributed to last
    rows: tuple[int, ...]  # the step that it has sent a row of last


class Budget(NamedTuple):
    """Faults that may still happen, by kind and in all."""

    crash: int = 0
    cut_off: int = 0
    pod: int = 0
    total: int = 0


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    generations: tuple[Generation, ...]
    acknowledged: History  # the newest state that every member of its generation has applied
    trained: int  # the newest generation that has applied a step
    budget: Budget


@dataclass(frozen=True)
class GroupScenario:
    """The bounds of one model: 2 model groups of 2 ranks at the start, slots 0 to 3; slot mod 2 is the inner index."""

    rules: frozenset[str] = ALL_RULES
    weaker: frozenset[str] = frozenset()
    """Rules that are on in a weaker form."""
    first: tuple[int, ...] = (0, 1, 2, 3)
    """Slots of generation 1; the others hold the same state and are left over."""
    steps: int = 1
    max_generations: int = 2
    """Including generation 1."""
    sets: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Which sets of slots generation 2, 3 ... may have; absent: every set of whole model groups that are connected."""
    spares: int = 0
    """Further slots, 4 and up, of connected processes without state."""
    restarts: bool = False
    """Whether a killed process starts again in its slot, with nothing."""
    snapshots: bool = False
    """Whether each rank's agent keeps copies of its shard in memory that outlives the process (rule BACKUP)."""
    faults: Budget = field(default_factory=Budget)
