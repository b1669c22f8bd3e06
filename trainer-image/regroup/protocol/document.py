"""The generation document: everything that the members of one generation must agree on (rule 2).

The operator builds it, writes its digest to the job's status by compare-and-swap, then sends it to the store's host. The process
with local rank 0 there publishes it in the store. Every other member compares its digest with the one on its stream. If a framework
lists the members, all of their agents get the document (frameworks.LISTS_MEMBERS).
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

from . import codec
from .state import StatePair

FORCED = "forced"
"""The old group is broken: its members are interrupted at once."""
PLANNED = "planned"
"""The old group is healthy: its members leave together after a step (rule CUTALL)."""


@dataclass(frozen=True)
class Member:
    """One worker in one generation. Its ranks follow those of the members before it in the list."""

    slot: int
    pod: str
    pod_uid: str
    incarnation: int
    host: str
    processes: int
    ports: Optional[tuple[int, ...]] = None
    """A free port for each process; None: the framework of the job needs none."""


@dataclass(frozen=True)
class Store:
    """Address of the generation's TCPStore."""

    host: str
    port: int
    pod_uid: str


@dataclass(frozen=True)
class OlderGeneration:
    """An earlier generation that a state may still come from. `positions`: of each member its position in its group of workers, in
    the order of `pod_uids`. None: all are 0, since a worker is a group of its own."""

    number: int
    uid: str
    pod_uids: tuple[str, ...]
    positions: Optional[tuple[int, ...]] = None

    def position(self, pod_uid: str) -> int:
        """Return the position of a member, which says what its processes may hold. Raises KeyError for a worker that is none."""
        if pod_uid not in self.pod_uids:
            raise KeyError(pod_uid)
        return 0 if self.positions is None else self.positions[self.pod_uids.index(pod_uid)]


@dataclass(frozen=True)
class MemberSeal:
    """A seal, with the worker that gave it."""

    pod_uid: str
    left_up_to: int
    state: Optional[StatePair]
    adopted: int
    state_adopted: int = 0
    is_backup: bool = False
    position: Optional[int] = None
    """The worker's position in its group; None: 0."""


@dataclass(frozen=True)
class LineageEntry:
    """Generation g started its steps at `start_step`: a checkpoint of an earlier one beyond that step is fenced."""

    generation: int
    start_step: int


@dataclass(frozen=True)
class CheckpointRef:
    """The durable checkpoint that the job's status names."""

    generation: int
    step: int
    directory: str


@dataclass(frozen=True)
class Document:
    """The list of members of one generation, and what they agree on. The operator makes it.

    - `members` stand in the order of their groups, and by position inside a group. With p processes in a worker and W workers
      in a group, rank // (W * p) is the group. Then rank mod (W * p) is the process's place, which is the same in every
      generation.
    - `lost` has the pod UIDs of older members that the API no longer has.
    - `seals` has the seals of all workers.
    - `silent` has the pod UIDs of workers that may hold a state and have not said which (rule BEST). `silent_positions` has
      their positions; None means that all are 0.
    - `imported` is the digest of the checkpoint that the job began with, once a generation has read it.
    """

    number: int
    uid: str
    job_uid: str
    kind: str
    members: tuple[Member, ...]
    store: Store
    older: tuple[OlderGeneration, ...] = ()
    seals: tuple[MemberSeal, ...] = ()
    lost: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    lineage: tuple[LineageEntry, ...] = ()
    checkpoint: Optional[CheckpointRef] = None
    reason: str = ""
    silent_positions: Optional[tuple[int, ...]] = None
    imported: Optional[str] = None

    @property
    def world_size(self) -> int:
        """Number of trainer processes."""
        return len(self._by_rank)

    @cached_property
    def _by_rank(self) -> tuple[Member, ...]:  # of thousands of ranks each is asked for
        return tuple(member for member in self.members for _ in range(member.processes))

    def rank_offset(self, pod_uid: str) -> int:
        """Return the rank of the first process of a member. Raises KeyError for a worker that is not one."""
        rank = 0
        for member in self.members:
            if member.pod_uid == pod_uid:
                return rank
            rank += member.processes
        raise KeyError(pod_uid)

    def member_of_rank(self, rank: int) -> Member:
        """Return the member that a rank belongs to. Raises IndexError for a rank that nobody has."""
        if rank < 0:
            raise IndexError(rank)
        return self._by_rank[rank]

    def reader(self) -> Member:
        """Return the member whose first rank reads a checkpoint for all. It is another one in each generation, since a node's
        volume may be what cannot be read."""
        return self.members[self.number % len(self.members)]

    def readers(self, workers_per_group: int) -> tuple[Member, ...]:
        """Return the group of workers whose processes read a checkpoint for the others, each for those of its place. It is another
        group in each generation, for the same reason."""
        first = self.number % (len(self.members) // workers_per_group) * workers_per_group
        return self.members[first : first + workers_per_group]

    def digest(self) -> str:
        """Return the SHA-256 of the document's canonical JSON, in hex."""
        return self._digest

    @cached_property
    def _digest(self) -> str:  # each plan of a job asks for it
        return hashlib.sha256(codec.canonical(codec.to_json(self))).hexdigest()

    def store_prefix(self) -> str:
        """Return the key prefix in the store: no two generations share one."""
        return f"{self.job_uid}/{self.number}/{self.uid}"
