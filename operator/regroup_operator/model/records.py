"""Records of what the operator observes: pods as the informer slims them, agents' sessions as the endpoint knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from regroup.protocol.state import Condition, Seal
from regroup.protocol.wire import REPORT_EVERY_S, Adopted, Draining, Fault, Progress, ScriptProgress, Stacks
from regroup_operator.api.members import MemberId
from regroup_operator.api.names import role_place

UNSEEN_CODE = 255
"""Exit code with which container runtimes report an end that nobody saw."""

EVICTED, PREEMPTED = "Evicted", "Preempted"
"""Values of Pod.disrupted: why a pod was ended from outside."""

Key = tuple[str, str]
"""(namespace, name) of a job: the unit of the work queue."""
PodPlace = int | str
"""A worker's slot, or the place of a role (`names.role_place`)."""


@dataclass(frozen=True)
class Pod:
    """A worker pod, slim. `slot` and `attempt` come from its name `<job>-worker-<slot>-<attempt>`."""

    namespace: str
    name: str
    uid: str
    job: str
    job_uid: str
    """UID of the controller ownerReference: the only proof that a pod is a job's."""
    slot: int
    attempt: int
    phase: str = "Pending"
    """Pending, Running, Succeeded, Failed."""
    ip: str = ""
    node: str = ""
    node_ready: bool = True
    node_unready_since_s: float | None = None
    """When its node was first seen not to be ready, on the controller's monotonic clock; None: it is ready."""
    node_starts: bool = False
    """Its node is not ready by its kubelet's own word (Ready is False, not Unknown): a kubelet says so while it starts."""
    terminating: bool = False
    running_since_s: float | None = None
    """When the trainer container was first seen running, on the controller's monotonic clock; None: it is not."""
    container_restarts: int = 0
    last_exit_code: int | None = None
    """Exit code of the trainer container's last termination."""
    memory_limit: str = ""
    """The trainer container's, as the template writes it; empty: none."""
    init_failed: str = ""
    """Name of the init container that has failed and is not over; empty: there is none. Native sidecars are none."""
    init_failures: int = 0
    """Number of times that its init containers were started again; one more where the last end of `init_failed` was a failure."""
    init_exit_code: int | None = None
    """Exit code of its last end."""
    init_message: str = ""
    """Last line of its termination message, which is that of its log if its terminationMessagePolicy says so."""
    unset_since_s: float | None = None
    """Since when the pod has a node, and its kubelet has not set it up (volumes, network), monotonic; None: it has."""
    last_exit_reason: str = ""
    """The kubelet's reason for it: Error, OOMKilled, Unknown, ContainerStatusUnknown, ..."""
    boot_id: str = ""
    """Boot ID of the node, as last heard: another one after each boot. Empty: not known."""
    waiting_reason: str = ""
    """Reason for which a container waits: ErrImagePull, ImagePullBackOff, CrashLoopBackOff, CreateContainerConfigError, ..."""
    waiting_message: str = ""
    unschedulable: str = ""
    """Message of PodScheduled=False, else empty."""
    unscheduled_reason: str = ""
    """Its reason: Unschedulable, or SchedulingGated while a queue holds the pod back."""
    status_reason: str = ""
    """status.reason: Evicted, Preempting, UnexpectedAdmissionError, ..."""
    status_message: str = ""
    """status.message of a pod that has failed, its beginning."""
    disruption: str = ""
    """Reason of condition DisruptionTarget=True: PreemptionByScheduler, EvictionByEvictionAPI, DeletionByTaintManager, ..."""
    drain_taint: str = ""
    """Key of a taint that announces the end of its node (settings.drain_taints), and that came after the pod. Empty: there is no
    such taint, or the pod's template tolerates it by its key."""
    role: str = ""
    """Name of its role in spec.roles; `slot` is then its index. Empty: a worker."""
    spec_digest: str = ""
    """`api.worker_digest` (of a role: `role_digest`) of the spec that the pod was made from; empty: not known."""

    @property
    def alive(self) -> bool:
        """True while the pod may still hold a running agent."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def never_ran(self) -> bool:
        """True if the pod failed before its trainer container ran: its kubelet refused it (UnexpectedAdmissionError, OutOfcpu,
        NodeAffinity, ...), or ended it while its image was pulled."""
        return self.phase == "Failed" and self.last_exit_code is None and self.container_restarts == 0

    @property
    def end_unseen(self) -> bool:
        """True if nobody saw how the trainer container ended: node or container runtime stopped first. Runtimes then report
        exit code 255 (containerd with reason Unknown, CRI-O with Error), which the agent itself never returns."""
        return self.last_exit_code == UNSEEN_CODE or self.last_exit_reason == "ContainerStatusUnknown"

    @property
    def disrupted(self) -> str:
        """EVICTED or PREEMPTED once somebody has decided to end the pod for that, else empty. The deletion of an object by a user
        is neither, nor is the shutdown of a node."""
        if self.disruption == "PreemptionByScheduler" or self.status_reason == "Preempting":
            return PREEMPTED
        evicted = self.disruption in ("EvictionByEvictionAPI", "DeletionByTaintManager")
        return EVICTED if evicted or self.status_reason == "Evicted" else ""

    @property
    def notice(self) -> str:
        """The reason for which it is asked to leave before anybody has deleted it or told its agent, as a clause; empty: it is
        not."""
        if not self.alive or self.terminating:
            return ""
        if self.drain_taint:
            return f"its node {self.node} has taint {self.drain_taint}"
        return f"its condition DisruptionTarget says {self.disruption}" if self.disruption else ""

    @property
    def num_ends(self) -> int:
        """Number of ends of its trainer container, as far as the API shows them."""
        return self.container_restarts + (self.phase == "Failed" or self.disrupted != "")

    @cached_property
    def id(self) -> MemberId:
        """The pod's name within its job."""
        return MemberId(self.slot, self.attempt)

    @property
    def place(self) -> PodPlace:
        """The place that it is made for."""
        return role_place(self.role, self.slot) if self.role else self.slot

    @property
    def usable(self) -> bool:
        """True if the pod may be (or become) a member."""
        return self.alive and not self.terminating


@dataclass(frozen=True)
class Silence:
    """An agent has heard nothing of another worker (adr/0057)."""

    pod_uid: str
    since_s: float
    """Since when, on the controller's monotonic clock, or earlier."""
    age_s: float
    """Seconds that it had lasted when the agent said so."""


@dataclass(frozen=True)
class AgentSession:
    """All that the membership endpoint knows of one agent; replaced whole at each report. Times are monotonic seconds."""

    pod_uid: str
    boot: str
    connected: bool
    condition: Condition
    condition_at_s: float
    """When `condition.phase`, generation or incarnation last changed."""
    heard_at_s: float
    """Time of the agent's last report."""
    seal: Seal | None = None
    store_port: int = 0
    ports: tuple[int, ...] = ()
    """Ports that its agent keeps for the processes of the next generation; empty: their framework needs none."""
    closed_at_s: float | None = None
    """Time at which the stream closed; None while it is open."""
    closed_step: int = 0
    """Newest step known when the stream closed: only progress two above it proves life (rule FENCE)."""
    progress: Progress | None = None
    first_progress: Progress | None = None
    """The report of the first commit in `progress_generation` (it carries first_step_ms)."""
    progress_generation: int = 0
    progress_at_s: float | None = None
    """Time at which its step was committed; progress_told_s: time at which that was first heard."""
    progress_told_s: float = 0.0
    report_every_s: float = REPORT_EVERY_S
    """Seconds between two reports of progress, if it is one of the two lowest members, by the last answer."""
    progress_due_s: float | None = None
    """Time of its next report of progress, if a step is committed by then; None: a second after the last one was told."""
    step_s: float | None = None
    """Mean duration of the steps between the last two reports of progress."""
    script: ScriptProgress | None = None
    """The last word of an unmodified script on its progress. It proves no life, and no decision on membership reads it."""
    script_generation: int = 0
    script_at_s: float = 0.0
    """Time at which the script's progress last changed."""
    adopted: Adopted | None = None
    adopted_generation: int = 0
    """Generation that all of the worker's processes have adopted, by the newest report."""
    fault: Fault | None = None
    fault_generation: int = 0
    fault_at_s: float | None = None
    draining: Draining | None = None
    rebooted_at_s: float | None = None
    """Time at which another agent process in the same pod said hello; None: this is the first one."""
    exits: tuple[ProcessExit, ...] = ()
    """Trainer processes that ended by themselves, oldest first, at most the last 32."""
    last_exits: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Generation and incarnation of the last exit that counted, by local rank."""
    num_exits: int = 0
    """Number of all exits in this record's life."""
    told_generation: int = 0
    """Newest generation sent on the stream that is open now."""
    told_finish: int = 0
    """The newest generation whose end was sent on the stream that is open now."""
    told_tier: str = ""
    told_outcome: str = ""
    """Outcome of the last `stop` on the stream that is open now; empty: there was none."""
    told_stop_at_s: float | None = None
    """Time at which an agent of this pod was first told to stop."""
    start_s: float | None = None
    """Seconds that its processes' last start took until all had attached; None: it has not been seen."""
    busy_since_s: tuple[float, ...] = ()
    """Times at which each of `condition.busy` began."""
    busy_ended_s: float = float("-inf")
    """Time at which the last of them was over."""
    stacks: Stacks | None = None
    """Its processes' last stacks, of `stacks_generation`, told at `stacks_at_s`."""
    stacks_generation: int = 0
    stacks_at_s: float | None = None
    asked_stacks_at_s: float | None = None
    """Time at which `dumpStacks` was last sent to this agent."""
    killed: tuple[int, ...] = ()
    """Incarnations of the processes that it was last told to kill, at `killed_at_s`."""
    killed_at_s: float = float("-inf")
    asked_at_s: float | None = None
    """Time at which `progress?` or `ping` was last sent to this agent."""
    unanswered_since_s: float | None = None
    """Time at which the first of them was sent that nothing has followed; None: the agent has spoken since."""
    observed_port: int = 0
    """Port at which other agents see whether its pod's kernel answers; 0: there is none."""
    unheard: tuple[Silence, ...] = ()
    """Workers that it observes and has heard nothing of, by its last report."""
    saved_at_s: float | None = None
    """Time at which it last saw the script complete a checkpoint; None: it has seen none."""

    def but(self, **fields: Any) -> AgentSession:
        """Return this session with some fields changed. The endpoint does this for each report: `dataclasses.replace` calls the
        constructor with all fields, which takes as long as reading the report."""
        assert fields.keys() <= self.__dict__.keys(), fields
        changed = object.__new__(AgentSession)
        changed.__dict__.update(self.__dict__)
        changed.__dict__.update(fields)
        return changed

    @property
    def told_stop(self) -> bool:
        """True if it was told to stop on the stream that is open now."""
        return bool(self.told_outcome)

    def hung(self, generation: int) -> str:
        """Return why a process of this generation was killed because it hung; empty where none was."""
        return next((e.hung for e in reversed(self.exits) if e.hung and e.generation == generation), "")


@dataclass(frozen=True)
class ProcessExit:
    """A trainer process that ended by itself with a non-zero code or a signal (negative), or that hung and was killed."""

    at_s: float
    incarnation: int
    local_rank: int
    exit_code: int
    last_line: str = ""
    generation: int = 0
    """In which it was, or which it was started for."""
    alone: bool = False
    """It was started after the one before it in its place had failed, and its worker has entered no generation since."""
    tail: str = ""
    """Last lines of its traceback, or of its stderr."""
    reason: str = ""
    """OOMKilled, CannotRun, or empty."""
    detail: str = ""
    """The numbers behind `reason`; of CannotRun the library's sentence."""
    hung: str = ""
    """The reason for which its agent killed it, on the operator's word; empty: it ended by itself."""
    number: int = 1
    """The exit's number in its pod (wire.Fault.ended). It grows with each exit."""


@dataclass(frozen=True)
class Settings:
    """Times of the membership policy, seconds; chart values of the same names."""

    first_wait_s: float = 30.0
    """The first generation starts with fewer than spec.replicas workers this long after minReplicas are ready."""
    join_quiet_s: float = 1.0
    """A planned generation waits until this long after the last worker became ready ..."""
    join_max_s: float = 5.0
    """... but not longer than this after the first one did; both longer where it has many members (decision.JOIN_MEMBERS)."""
    planned_timeout_s: float = 30.0
    """A planned generation that its members have not all entered by then (at least three steps) is dropped for a forced one."""
    settle_s: float = 0.25
    """Seconds for which the culprit's own report is waited for after a broken collective."""
    form_timeout_s: float = 20.0
    """A forced generation that its members have not all entered by then (at least three steps) is announced anew, without those
    that did not enter. So is one that they have not formed so long after the last one entered. Doubled for each generation in a
    row that did not form."""
    adopt_timeout_s: float = 60.0
    """The same for a generation that has formed, while its members copy the state or read a checkpoint. Doubled, too."""
    start_timeout_s: float = 600.0
    """Processes that have not attached by then are started again, where no start was seen that says what to expect."""
    late_timeout_s: float = 60.0
    """A worker that has not come to the newest generation by then is restarted in place, and replaced so long after that."""
    replace_after_s: float = 30.0
    """A worker whose agent cannot be reached is replaced so long after it was called lost, on a node that is Ready, too."""
    term_grace_s: float = 20.0
    """In the first seconds of an operator's term a missing stream is unknown, not lost."""
    hello_timeout_s: float = 20.0
    """A running worker whose agent has not called by then makes AgentsConnected false."""
    progress_write_s: float = 10.0
    """Progress alone is written to the status at most this often, per job."""
    probe_s: float = 3.0
    """Keepalive probes delay the sight of a dead peer by this much; it is taken off disconnectSeconds."""
    resync_s: float = 600.0
    hang_s: float = 300.0
    """Without spec.recovery.hangSeconds a step is never called hung before this, however short the job's steps are."""
    first_step_s: float = 1800.0
    """The first step of a process may take this long: it compiles, and fills its caches."""
    checkpoint_s: float = 1800.0
    """A script waits for one checkpoint this long at most, the last one or that after a roll-back; then it goes on without."""


@dataclass(frozen=True)
class Observation:
    """Everything that a plan is a function of, but the job itself and the clock."""

    pods: tuple[Pod, ...]
    sessions: dict[str, AgentSession] = field(default_factory=dict)
    """Sessions by pod UID."""
    term_started_s: float = 0.0
    admitted_by_s: float = 0.0
    """Time at which the last of the agents of the term's start can have been admitted, monotonic. It follows from the rate of
    TokenReviews. If none are needed, it is the term's start."""
    waiting: frozenset[str] = frozenset()
    """UIDs of pods whose agents wait to be admitted: they are alive."""
    refusals: dict[str, str] = field(default_factory=dict)
    """The sentence with which the agent was turned away, by pod UID."""
    roles: tuple[Pod, ...] = ()
    """The pods of spec.roles."""
    num_out_of_reach: int = 0
    """Number of agents of all jobs that have lost their stream although their containers run on nodes that are ready. 0: they are
    few, so that the operator is not the likelier cause (reach.py)."""
