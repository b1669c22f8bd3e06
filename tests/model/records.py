"""The records that a state of the protocol is made of, the rules that can be switched off, and a scenario's bounds.

Plain tuples, so that states hash and compare fast. A generation is named by the *index* of its announcement, not by
its number: without PERSIST two announcements can carry one number, which is the point. -1 stands for "none".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

PERSIST = "PERSIST"
"""A generation is written to status by compare-and-swap before it is announced; without: announced, written later."""
STATE = "STATE"
"""States are named and ordered by (generation of the last commit, step); without: by the step alone."""
TORN = "TORN"
"""State is invalid from the first byte of a copy to the last; left in between, the own snapshot is taken instead."""
WITNESS = "WITNESS"
"""A group trains only if its all-gather covers every older generation that may have trained."""
COPIES = "COPIES"
"""Who adopted a generation that never stepped may hold the last copy of an older state: to prove that state lost, it must be
lost, too."""
LINGER = "LINGER"
"""An excluded member keeps its state until everyone in the newest generation has adopted."""
FINISH = "FINISH"
"""A finished rank keeps its state until the operator's stop, sent when all of one generation are finished."""
RESAY = "RESAY"
"""Agents say their trainer's condition again and again; without: a fault is reported once."""
INC = "INC"
"""A process forms a generation at most once; a restarted one waits for a newer generation."""
CUTALL = "CUTALL"
"""A planned change: leave after the step in which *all* ranks know; without: in which any does."""
BACKUP = "BACKUP"
"""A state that was read from a snapshot may be older than what its worker has committed, so it is no witness of that."""
MAD = "MAD"
"""The agent remembers the newest generation its trainer adopted: who adopted j and lost the state is no witness."""
SEAL = "SEAL"
"""Who has left generations for good says up to which, and with what state; the announcement carries these as witnesses.
What a seal closes is rule HEARD's, whose switch is in live/."""
LOST = "LOST"
"""To have adopted j and lost that state proves loss, like a deleted pod."""
CLIQUE = "CLIQUE"
"""A set that failed to form over a cut link is not announced again."""

ALL_RULES = frozenset(
    {PERSIST, STATE, TORN, WITNESS, COPIES, LINGER, FINISH, RESAY, INC, CUTALL, BACKUP, MAD, SEAL, LOST, CLIQUE}
)

# Phases of a trainer process. Letters, because a state is hashed a million times.
DEAD = "D"
IDLE = "I"  # attached, in no group: fresh, interrupted or excluded
FORMING = "F"
COPYING = "C"
COMPUTING = "R"  # adopted; forward and backward of the next step
REDUCING = "W"  # has contributed to the step's all-reduce
FINISHED = "X"  # committed the last step, keeps group and state
EXITED = "E"

TORN_MARK = "T"
"""Last element of a history that was left half overwritten and does not know it (TORN off)."""

History = tuple["int | str", ...]
"""One element a committed step: the index of the announcement in which it was committed. Two histories are equal if
and only if the parameters are."""
Member = tuple[int, int]
"""(slot, pod uid)."""


class Arrival(NamedTuple):
    """What a member brings to a generation's all-gather."""

    step: int
    lineage: int  # announcement of the last commit
    is_valid: int
    history: History | None
    adopted: int  # announcement that the state was adopted in
    agent_adopted: int  # newest announcement that the agent knows its trainer to have adopted
    is_backup: int  # the state was read from a snapshot


class Seal(NamedTuple):
    """What a process outside any group promises and holds (rules SEAL, HEARD)."""

    member: Member
    left_up_to: int  # generation number
    arrival: Arrival


class Contribution(NamedTuple):
    """What a rank puts into a step's all-reduce."""

    step: int
    knows_newer: int


class Announcement(NamedTuple):
    generation: int
    members: tuple[Member, ...]
    is_planned: int
    seals: tuple[Seal, ...]


class Operator(NamedTuple):
    is_up: int
    newest: int  # announcement that it believes newest
    faults: int  # slots whose fault it was told and remembers, a bit mask (RESAY off)


class Worker(NamedTuple):
    uid: int
    has_pod: int
    is_connected: int
    heard: int  # newest announcement that the agent has heard
    phase: str
    is_stopped: int  # SIGSTOP
    entered: int  # announcement that this process is in, or left last
    history: History | None  # None: no state at all
    is_valid: int
    adopted: int  # announcement that `history` was adopted in
    snapshot: tuple[History, int] | None  # history, adopted
    last_formed: int  # newest announcement that any process of this pod has entered
    has_fault_to_report: int
    is_reentered: int  # entered a generation that an earlier process of the pod was in (INC off)
    agent_adopted: int
    is_backup: int  # `history` was read from the snapshot, and nothing was committed or copied since


class Group(NamedTuple):
    """The meeting place of one announcement: its store and its collectives."""

    arrivals: tuple[Arrival | None, ...]
    contributions: tuple[Contribution | None, ...]
    has_committed: int


class Budget(NamedTuple):
    """Faults that may still happen, by kind and in all."""

    crash: int = 0
    pod: int = 0
    stop: int = 0
    cut_off: int = 0
    operator: int = 0
    link: int = 0
    total: int = 0


class State(NamedTuple):
    operators: tuple[Operator, ...]
    persisted: int  # announcement named by status.membership
    announcements: tuple[Announcement, ...]
    workers: tuple[Worker, ...]
    groups: tuple[Group, ...]
    acknowledged: History  # what the operator was told is trained
    budget: Budget
    cut_links: int  # bit mask of slot pairs


@dataclass(frozen=True)
class Scenario:
    """The bounds of one model: how many of what, which faults, and which rules are on."""

    rules: frozenset[str] = ALL_RULES
    workers: int = 2
    members: tuple[int, ...] | None = None
    """Slots of generation 1; absent: all."""
    steps: int = 2
    max_announcements: int = 3
    """Including generation 1."""
    min_members: int = 1
    faults: Budget = field(default_factory=Budget)
    announces: Literal["any", "seen"] = "any"
    """any: the operator may announce any set at any time, which covers every timeout. seen: only with a cause."""
    leaders: int = 1
    """2: a paused leader and its successor, both acting."""
    stale_reads: bool = False
    """An operator that restarts may read any earlier status, as a cache may show it; only a refused write reads the newest."""
    snapshots: bool = False
    exits: bool = False
    """Whether excluded and finished processes ever exit."""
    heals: bool = True
    """Whether a worker cut off from the operator may come back."""
    replaces: bool = True
    """Whether the operator replaces lost pods and takes joiners in by itself."""
    has_planned: bool = False
    stale_store: bool = False
    """INC off only: a process that enters a generation a second time finds the old keys and takes itself for formed."""
    liveness: Literal["bounded", "strict", "left"] = "bounded"
    """bounded: a state that used up its announcements counts as live. strict: it does not, and is judged as well.
    left: it does not, but only states with an announcement left are judged."""
