"""A worker as the policies see it: its pod, its agent's session, and how it stands in the newest generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regroup.protocol.document import LineageEntry, OlderGeneration
from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId, gone_name
from regroup_operator.api.spec import largest_size
from regroup_operator.model.records import AgentSession, Pod, Settings
from regroup_operator.model.waits import UntilEvent


class Standing:
    """Values of Worker.standing: a member's place in the newest generation."""

    OUTSIDE = "outside"  # not a member
    PENDING = "pending"  # has not entered it yet (a planned generation: still trains in the one before)
    STARTING = "starting"  # its processes start with this generation's environment
    FORMING = "forming"  # forms or adopts
    TRAINING = "training"
    FINISHED = "finished"
    BROKEN = "broken"  # has left it, with its processes alive
    DIED = "died"  # a process of it ended: the worker has to restart in place
    HUNG = "hung"  # a process of it hangs, and is being killed
    SILENT = "silent"  # its stream is gone; not yet called lost
    LOST = "lost"


DISCONNECTED, UNRESPONSIVE = "Disconnected", "Unresponsive"
"""Worker.why of one that is lost because it cannot be reached."""
UNHEARD = "Unheard"
"""Worker.why of one that is lost because neither observers on other nodes nor the operator hear anything of it."""
RESIZED = "Resized"
"""Cause of the generation in which workers join or leave because the job changes its size, or is complete again."""
DRAINED = "Drained"
"""Worker.why of one that was asked to leave and has; the cause of the generation that goes on without it."""
RESUMED = "Resumed"
"""Cause of the generation with which a suspended job goes on."""
PLANNED_CAUSES = (RESIZED, DRAINED, RESUMED)
"""Causes of changes that no failure made. Workers that were missing may have joined in them."""
STARTED, OVERDUE = "Started", "Overdue"
CAUSES = (
    *PLANNED_CAUSES, STARTED, OVERDUE, DISCONNECTED, UNRESPONSIVE, UNHEARD, "Hung", "OOMKilled", "NodeRestarted",
    "ContainerRestarted", "ProcessExited", "CollectiveFailed", "PodDeleted", "PodFailed", "NeverConnected", "Stopped",
)  # fmt: skip
"""All causes of a generation, Worker.why among them: the words of `status.incidents[].cause`, and labels of a metric. None is an
agent's text."""

_IN_GROUP = (Phase.FORMING, Phase.ARRIVED, Phase.ADOPTING, Phase.TRAINING)


@dataclass(frozen=True)
class Worker:
    """A pod of the job with its agent, or a member whose pod the API no longer has. Such a member has no `pod`."""

    id: MemberId
    pod: Pod | None
    session: AgentSession | None
    standing: str
    available: bool
    """Could form a generation now: usable pod, open stream, all processes attached (script tier: agent ready)."""
    since_s: float
    """When the standing began, as far as is known."""
    lost_at_s: float | None = None
    """SILENT: when it is called lost if nothing is heard."""
    why: str = ""
    """LOST, DIED, BROKEN: CamelCase cause."""
    last_seen_s: float | None = None
    """LOST without a word: when it was last known to live."""
    silent_until_s: float | None = None
    """It may hold a state that it has not told of (rule BEST): how long that is waited for, at most. None: it has told, or
    is not waited for any more."""
    barred_until_s: float = 0.0
    """It kept generations from forming: until then it joins none that can do without it."""
    abandoned: bool = False
    """Another pod takes its slot as soon as that one can (plan/generation/lateness.py)."""

    @property
    def uid(self) -> str:
        """UID of its pod. Of a pod that the API no longer has it is the name that documents have for it, which is no UID."""
        return gone_name(self.id) if self.pod is None else self.pod.uid

    @property
    def connected(self) -> bool:
        """True while the agent's stream is open."""
        return self.session is not None and self.session.connected

    @property
    def has_yet_to_call(self) -> bool:
        """True for a member that has not opened a stream since the operator's start. It is on its way, and still stands as it did
        before."""
        return (
            self.standing == Standing.SILENT
            and (self.session is None or self.session.closed_at_s is None)
            and (not self.connected)
        )

    @property
    def draining(self) -> bool:
        """True once the worker is asked to leave: its end has begun, or a notice says that it will come (Pod.notice)."""
        return self.is_ending or (self.pod is not None and self.pod.notice != "")

    @property
    def is_ending(self) -> bool:
        """True once its pod is being deleted or its agent got SIGTERM: its grace period runs. Who has only a notice stays a member
        until another worker takes its place."""
        return (
            self.pod is None or self.pod.terminating or (self.session is not None and self.session.draining is not None)
        )

    @property
    def notice(self) -> str:
        """The notice for which it is asked to leave; empty if there is none, or if its end has begun."""
        return "" if self.pod is None or self.is_ending else self.pod.notice

    @property
    def may_hold(self) -> bool:
        """True for a worker that may hold the job's state. One that forms has no seal; its step says whether it brings anything."""
        session = self.session
        if session is None or session.condition.adopted == 0:
            return False
        if session.seal is not None:
            return session.seal.state is not None
        condition = session.condition
        return condition.phase not in (Phase.FORMING, Phase.ARRIVED, Phase.ADOPTING) or condition.step > 0

    @property
    def is_waiting(self) -> bool:
        """True for a worker whose processes are all attached and in no group: nothing keeps it from entering one."""
        return self.session is not None and self.session.condition.phase in (Phase.READY, Phase.BROKEN)

    @property
    def trains(self) -> bool:
        """True for a worker whose processes are in a group that trains, or have come to its end: of any generation."""
        return self.session is not None and self.session.condition.phase in (Phase.TRAINING, Phase.FINISHED, Phase.DONE)

    @property
    def has_left_loop(self) -> bool:
        """True for a worker whose script has left its loop, and may have changed the model: another generation starts it again."""
        return self.session is not None and self.session.condition.phase in (Phase.FINISHING, Phase.DONE)

    @property
    def is_in_group(self) -> bool:
        """True for a worker whose processes form a group or train in one: of any generation."""
        return self.session is not None and self.session.condition.phase in _IN_GROUP

    @property
    def is_on_its_way(self) -> bool:
        """True for a member that has entered the newest generation and not arrived at its store."""
        return (
            self.standing == Standing.FORMING
            and self.session is not None
            and self.session.condition.phase == Phase.FORMING
        )

    @property
    def is_member(self) -> bool:
        """True for a member of the newest generation."""
        return self.standing != Standing.OUTSIDE


@dataclass(frozen=True)
class Current:
    """The newest generation, as the status has it. `announced_at_s` is the start of the operator's term where another
    one announced it."""

    number: int
    uid: str
    kind: str
    members: tuple[MemberId, ...]
    adopted: bool
    """All members have adopted it (or a newer one needs no older state)."""
    announced_at_s: float
    older: tuple[OlderGeneration, ...] = ()
    lineage: tuple[LineageEntry, ...] = ()
    has_document: bool = True
    """The document is in memory: it can be told again. After a restart it cannot (the next number is taken instead)."""
    attempts: int = 0
    """Generations in a row, this one included, that not all members adopted."""
    launches: bool = False
    """Announced to workers without processes: each starts its processes for this generation, which takes as long as
    the script's imports. Otherwise the members were attached when it was announced."""
    incarnations: Mapping[str, int] = field(default_factory=dict)
    """Incarnations in the document, by pod UID; empty if this operator does not have the document."""
    suspended: bool = False
    """The job was suspended in it: none of its pods is left, and what comes next is a start, no recovery."""


@dataclass(frozen=True)
class Bounds:
    """The number of workers that the job wants and needs."""

    replicas: int
    minimum: int
    elastic: bool
    rejoin_s: float = 0.0
    session: bool = True
    """Tier Session: workers hold the job's state."""
    per_group: int = 1
    """Workers of a group: `replicas` and `minimum` are multiples of it, and members are chosen in whole groups."""
    spares: int = 0
    """Workers beyond `replicas` that wait to take a place."""
    permitted: Sequence[int] | None = None
    """Numbers of workers that may train, ascending; None: every number. `replicas` and `minimum` are among them."""

    def fitting(self, count: int) -> int:
        """Return how many of `count` workers, in whole groups, may train: at most `replicas`, and a permitted number."""
        return largest_size(self.permitted, min(count, self.replicas))

    @property
    def slots(self) -> int:
        """Number of slots that have workers. Any `replicas` of them may train."""
        return self.replicas + self.spares

    @property
    def groups(self) -> int:
        """Number of groups that the job wants."""
        return self.replicas // self.per_group

    @property
    def min_groups(self) -> int:
        """Number of groups that the job needs."""
        return self.minimum // self.per_group


@dataclass(frozen=True)
class Refusal:
    """Members of the newest generation refused to train. A set of the same `names` (plan/generation/retry.py, names_of)
    would refuse again: nothing has changed that it was made of. `unreadable`: a checkpoint could not be read, which may pass."""

    names: frozenset[str]
    unreadable: bool = False
    readers: frozenset[str] = frozenset()
    """Pod UIDs of workers that could not read it: who has not tried comes before them (rule RETRY)."""
    have_all_tried: bool = False
    """Every reachable worker has failed to read the checkpoint. After a pause all may try again."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The workers of a job and what is known of them, from which the next generation is decided."""

    workers: tuple[Worker, ...]
    bounds: Bounds
    now_s: float
    settings: Settings
    step_s: float = 0.0
    """Duration of a step of the job; 0: not known."""
    refusal: Refusal | None = None
    """Set if members of the newest generation refused to train."""
    hang: str = ""
    """A sentence that says that every rank hangs in a collective (plan/failures/hangs.py); empty: they do not."""
    links: frozenset[frozenset[str]] = frozenset()
    """Broken links, as plan/generation/links.py has them."""
    holds_growth: bool = False
    """The job does not grow now, because it waits for the script's next checkpoint."""
    without_commit: int = 0
    """Generations in a row, the newest included, that broke before a step was committed (plan/failures/no_commit.py)."""

    @property
    def members(self) -> tuple[Worker, ...]:
        """The members of the newest generation."""
        return tuple(w for w in self.workers if w.is_member)


@dataclass(frozen=True)
class Announce:
    """Issue the next generation with these members. `reason` and `message` explain it; cause and culprit are the incident's."""

    kind: str
    members: tuple[Worker, ...]
    reason: str
    message: str
    cause: str = ""
    culprit: str = ""
    detected_at_s: float = 0.0
    detect_s: float | None = None
    """Seconds for which the cause had been there by then. None: not known, or the fault report says it."""
    set_back: frozenset[MemberId] = frozenset()
    """Members that kept the generation before from forming."""


@dataclass(frozen=True)
class Wait:
    """Something is missing. `until`: when to look again if nothing happens, or the event that alone ends it."""

    reason: str
    message: str
    until: float | UntilEvent
    ask: frozenset[str] = frozenset()
    """Pod UIDs of workers that are asked whether they are there."""


@dataclass(frozen=True)
class Keep:
    """The newest generation stands. `until` as in Wait."""

    until: float | UntilEvent


Decision = Announce | Wait | Keep
