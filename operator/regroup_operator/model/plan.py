"""Records that a plan is made from besides the job and the observation, and those that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from regroup.protocol.document import Document
from regroup_operator.api.members import MemberId
from regroup_operator.api.status import JobStatus
from regroup_operator.model.pod_row import PodRow
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Pod, PodPlace

Part = TypeVar("Part")


@dataclass(frozen=True)
class Clock:
    """Now. `now_s`: monotonic seconds. `wall`: seconds since the epoch, for what people read."""

    now_s: float
    wall: float

    def wall_at(self, at_s: float) -> float:
        """Return the seconds since the epoch of a monotonic time."""
        return self.wall - (self.now_s - at_s)

    def at_s(self, wall: float) -> float:
        """Return the monotonic time of seconds since the epoch."""
        return self.now_s - (self.wall - wall)

    def stamp(self, at_s: float) -> str:
        """Return RFC 3339 UTC in whole seconds of a monotonic time."""
        return timestamp(self.wall_at(at_s))

    def timestamp(self, ago_s: float = 0.0) -> str:
        """Return RFC 3339 UTC in whole seconds, of now or of some time ago."""
        return timestamp(self.wall - ago_s)


def earliest(dues_s: Iterable[float | None], *, after_s: float) -> float | None:
    """Return the first of some times that is still to come; None: there is none. What is due has been looked at."""
    return min((at_s for at_s in dues_s if at_s is not None and at_s > after_s), default=None)


def timestamp(wall: float) -> str:
    """Return RFC 3339 UTC in whole seconds of seconds since the epoch."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(time: str) -> float:
    """Return seconds since the epoch of an RFC 3339 time."""
    return datetime.fromisoformat(time).timestamp()


@dataclass(frozen=True)
class Failure:
    """One counted failure. `at` is seconds since the epoch."""

    at: float
    worker: str
    exit_code: int | None
    last_line: str = ""
    tail: str = ""
    """Last lines of the traceback, or of stderr."""
    reason: str = ""
    """OOMKilled, CannotRun, or empty."""
    detail: str = ""
    """The numbers behind `reason`; of CannotRun the library's sentence."""
    namespace: str = ""
    pod: str = ""
    container: bool = False
    """The container ended, agent and all: its log is the previous container's."""
    init: str = ""
    """Name of the init container that failed; empty: it was none."""
    generation: int = 0
    incarnation: int = 0
    """Incarnation of the worker's processes when the failure was reported; 0: a whole container failed."""
    returned: str = ""
    """Tier Script: members of its generation whose script had returned 0 before, as ranges; empty: none had."""
    hung: bool = False
    """The operator had it killed, because it hung."""
    alone: bool = False
    """The process was started after the one before it in its place had failed, and its worker has entered no generation since."""

    @property
    def shell_code(self) -> int | None:
        """Its exit code as shells and Kubernetes have it, 128 + n for signal n; None: as of an evicted pod."""
        return 128 - self.exit_code if self.exit_code is not None and self.exit_code < 0 else self.exit_code

    @property
    def script_code(self) -> int | None:
        """The same code, if a process of the script ended by itself.

        None: a container or a pod failed, or the process was killed because it hung. None also stands for a process that ended too
        early with 0, which a shell would take for a success.
        """
        return None if self.container or self.hung else self.shell_code or None


@dataclass(frozen=True)
class Crash:
    """A crash that may repeat. `rounds`: (seconds since the epoch, generation) of the first and the last ones, oldest first;
    `count`: how many there were."""

    place: str
    rounds: tuple[tuple[float, int], ...]
    last: Failure
    count: int = 1
    workers: frozenset[str] = frozenset()
    """Workers whose processes ended in the newest round."""


@dataclass(frozen=True)
class JobCondition:
    """One condition, without its times."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class Verdict:
    """Reason and message of a condition: why the job has to fail, or why it cannot run."""

    reason: str
    message: str
    exit_code: int | None = None
    """status.exitCode: of the process of the script that the message names; None: it names none."""
    pod: str = ""
    """status.failedPod: name of the pod whose log the message points to; empty: it points to none."""


@dataclass(frozen=True)
class Spell:
    """A worker is late. `kind` says in which way (plan/generation/lateness.py)."""

    kind: str
    since_s: float
    restarted_s: float | None = None
    """The time at which its agent was told to restart its processes."""


@dataclass(frozen=True)
class Setback:
    """The setbacks of a worker that did not enter or not form a generation `count` times in a row, first at `since_s`. No
    generation names it before `until_s`. That was `bar_s` ahead when it was set."""

    count: int
    since_s: float
    until_s: float
    bar_s: float


@dataclass(frozen=True)
class PodEnds:
    """Pods that ended although nobody deleted them, since the job last got further (failures/pod_ends.py)."""

    by_slot: Mapping[int, tuple[float, ...]]
    """When they ended, seconds since the epoch, oldest first; of each slot the last ones."""
    last: str
    """A sentence on the pod that ended last."""
    last_pod: str = ""
    """The name of that pod."""
    rounds: int = 0
    """Number of times that more pods have ended than the job can do without."""
    base: tuple[int, int] | None = None
    """The job's least progress in the first of these rounds; None: not known."""
    low: tuple[int, int] | None = None
    """The same since the last round ended."""


@dataclass(frozen=True)
class IgnoredRow:
    """Failures in a row that a rule ignores, with no step committed in between. `at`: of the last, seconds since the epoch."""

    count: int
    at: float
    words: str
    """A sentence on the worker that ended last, and on the rule that counts nothing."""


class Urgency(IntEnum):
    """The time that the write of a status may wait."""

    LATER = 0
    """Only progress has changed: until settings.progress_write_s after the last write."""
    STARTING = 1
    """A number that people count changed in a job that starts. The write waits as long as plan/report/urgency.py says."""
    SOON = 2
    """Something that people count, or the words of a condition: the same, for a shorter time."""
    NOW = 3
    """Something that a decision or an announcement depends on, a phase, an event: not at all."""


class Counted(NamedTuple):
    """The ends of one pod that have been counted."""

    exits: int = 0
    """Number of exits of its processes, as its session counts them."""
    container_restarts: int = 0
    init_failures: int = 0
    boot_id: str = ""
    """The boot ID of its node when the container that runs now was first seen."""
    has_ended: bool = False
    """The pod itself has been seen to end."""
    is_disrupted: bool = False
    """Its eviction or preemption has been seen."""


class WorkerMemory(NamedTuple):
    """The memory of one pod. It lasts for as long as the API has the pod."""

    counted: Counted | None = None
    """None: the pod is new."""
    peer: tuple[int, str] | None = None
    """The generation in which it lost a peer, and the peer's pod UID (rule CLIQUE)."""
    spell: Spell | None = None
    """Its lateness; None: it is not late."""
    setback: Setback | None = None
    """Its setbacks; None: it kept no generation from forming."""
    cannot_read: bool = False
    """It could not read the checkpoint that must be, since the last adoption."""
    unplaced_s: float | None = None
    """The time since which it has been unschedulable (monotonic)."""
    is_noticed: bool = False
    """An event has said that it is asked to leave by a notice."""


class SlotMemory(NamedTuple):
    """The memory of one slot, whatever its pods are."""

    failed: PodRow | None = None
    """Pods in a row that failed before they ran."""
    disrupted: PodRow | None = None
    """Pods in a row that were evicted or preempted soon after their start, and count nothing."""
    given_back: PodRow | None = None
    """Pods in a row that were deleted because no node had room for them."""
    failed_on: str | None = None
    """The node on which its pod failed last."""
    bad_node: tuple[str, float] | None = None
    """The node on which its pods failed twice in a row, and when they last did (monotonic)."""


@dataclass(frozen=True)
class Issued:
    """The newest generation that this operator has issued, and how it went with those before."""

    document: Document | None = None
    """None: this operator has issued none."""
    announced_at_s: float | None = None
    persist_ms: float | None = None
    """Milliseconds that it took to write the generation to the status."""
    launches: bool = False
    """True if it was announced to workers without processes, as in Current."""
    attempts: int = 0
    """Generations in a row that this operator announced and not all members adopted."""
    without_commit: int = 0
    """Generations in a row before this one that broke before a step was committed, with all their processes alive."""
    tried: frozenset[str] | None = None
    """The names on which the verdict on its set depends (plan/generation/retry.py, names_of)."""


@dataclass(frozen=True)
class ScriptMemory:
    """The memory of a job whose script does not use the library."""

    failed: int = 0
    """The newest generation of which an exit has been counted."""
    left: tuple[int, ...] = ()
    """The generations that lost a member's pod or agent, oldest first. Also noted before the tier is known."""


@dataclass(frozen=True)
class JobMemory:
    """The memory of a job between two plans. It is lost with the operator, and safe to lose.

    plan/remember.py makes it from the results of the stages, and forgets pods and slots that are gone.
    """

    workers: Mapping[str, WorkerMemory] = field(default_factory=dict)
    """Memories of pods, by pod UID."""
    slots: Mapping[int, SlotMemory] = field(default_factory=dict)
    roles: Mapping[PodPlace, PodRow] = field(default_factory=dict)
    """Maps places of roles to the pods in a row that failed there."""
    issued: Issued = Issued()
    script: ScriptMemory = ScriptMemory()
    has_looked: bool = False
    """This operator has looked at the job before: what it sees now for the first time is new."""
    links: frozenset[frozenset[str]] = frozenset()
    """Pairs of pod UIDs that could not reach each other (plan/generation/links.py), until both train in one group."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Maps lost members of the newest generation to the time since which they are lost (monotonic; plan/facts/losses.py)."""
    created: frozenset[MemberId] = frozenset()
    """Pods that were asked for and counted, until they are seen."""
    crash: Crash | None = None
    """The crash that came last, while no step has been committed since."""
    ignored: IgnoredRow | None = None
    """Failures that recovery.onExit ignores again and again."""
    pod_ends: PodEnds | None = None
    """Pods that end again and again; None: there are none since the job last got further."""
    written_s: float | None = None
    """When the plan was made whose status was written last, or a little later where the write has taken long (monotonic)."""
    differs_since_s: Mapping[Urgency, float] = field(default_factory=dict)
    """Maps an urgency, STARTING or SOON, to a monotonic time. Since then the planned status has differed from the stored one in
    something that is at least so urgent."""

    def of_workers(self, part: Callable[[WorkerMemory], Part | None]) -> dict[str, Part]:
        """Return one part of the memories of pods, by pod UID. Pods without it are left out."""
        return {uid: found for uid, worker in self.workers.items() if (found := part(worker)) is not None}

    def of_slots(self, part: Callable[[SlotMemory], Part | None]) -> dict[int, Part]:
        """Return one part of the memories of slots. Slots without it are left out."""
        return {number: found for number, slot in self.slots.items() if (found := part(slot)) is not None}


@dataclass(frozen=True)
class Tell:
    """A command for one agent, to be sent after the status is written. `body` is one of wire.COMMANDS."""

    pod_uid: str
    body: Any


@dataclass(frozen=True)
class ProgressDue:
    """Steps are overdue at `due_s` (monotonic), unless members report more progress of one of these generations until then."""

    due_s: float
    generations: tuple[int, ...]


class CreateWorker(NamedTuple):
    """Make the pod of a slot, preferably not on `avoid_nodes`."""

    slot: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobPlan:
    """The actions of a plan, in this order: write the status (if it changed), tell, then create and delete pods."""

    status: JobStatus
    urgency: Urgency
    memory: JobMemory
    tell: tuple[Tell, ...] = ()
    create: tuple[CreateWorker, ...] = ()
    create_roles: tuple[tuple[str, int, int], ...] = ()
    """(role, index, attempt)."""
    delete: tuple[Pod, ...] = ()
    notes: tuple[EventNote, ...] = ()
    due_s: float | None = None
    """The time at which the job is planned again although nothing happens (monotonic); None: only an event helps. `progress_due` is
    separate."""
    progress_due: ProgressDue | None = None
    announced: bool = False
    expired: bool = False
    """The job has ended, and its time after that is over: it is deleted."""

    @property
    def written(self) -> dict[str, Any]:
        """The status as the API gets it."""
        return self.status.to_dict()
