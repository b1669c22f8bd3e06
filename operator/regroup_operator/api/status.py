"""The fields that the operator writes under `status`: the job's memory, and what people read of it.

`membership`, `released`, `lineage`, `restarts` and `checkpoint` are memory: the plan continues from them after any
crash, and they change by compare-and-swap only. `progress`, `samples`, `incidents`, `conditions` and `summary` are for
people and machines that look.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from regroup_operator.api.base import Timestamp, WrittenModel
from regroup_operator.api.conditions import Condition

State = Literal[
    "Pending",
    "Starting",
    "Running",
    "Recovering",
    "Waiting",
    "Finishing",
    "Completing",
    "Suspending",
    "Suspended",
    "Succeeded",
    "Failed",
]

MAX_LINEAGE = 32
MAX_INCIDENTS = 10
MAX_CURVE_POINTS = 64
MAX_CURVE_BYTES = 2000
"""Size of status.progress.curve in JSON."""


class Store(WrittenModel):
    """The key-value store through which the members of a generation find each other."""

    host: str
    """IP address of the pod that hosts the key-value store."""

    port: int = Field(ge=1, le=65535)
    """TCP port of the store."""

    slot: int = Field(ge=0)
    """Slot of the worker that hosts the store and publishes the member list in it."""


class OlderGeneration(WrittenModel):
    """An earlier generation whose state may still be the newest one somewhere."""

    generation: int
    """Number of the generation."""

    uid: str
    """Random identity of the generation."""

    members: str
    """Members of the generation, in the notation of membership.members."""


class Membership(WrittenModel):
    """The newest generation: a numbered, immutable list of the workers that train together."""

    generation: int = Field(ge=1)
    """Number of the generation. It is never reused for another list of members."""

    uid: str
    """Random identity of the generation. Every key in its store contains it."""

    kind: Literal["planned", "forced"]
    """planned: members change at a step boundary. forced: the current step was interrupted, because a member was lost."""

    digest: str
    """Digest of the generation's document, with which its members verify that they read the right one."""

    start_step: int | None = None
    """Step at which the generation began. Set when the first member has taken over the state."""

    adopted: bool = False
    """True once every member has taken over the generation's state. Older generations are then irrelevant."""

    world_size: int = Field(ge=1)
    """Number of training processes."""

    members: str
    """Members as ranges of slots: "0-3,5.2" means slots 0 to 3, and pod 2 of slot 5 (<job>-worker-5-2). They are in the order of
    their ranks; with spec.workersPerGroup above 1 group after group."""

    store: Store | None = None
    """The key-value store through which the members find each other."""

    suspended: bool | None = None
    """True: the job was suspended in this generation, and none of its pods is left."""

    resumed_in: int | None = None
    """Number of the generation with which the job was resumed last."""

    older: list[OlderGeneration] = Field(default_factory=list)
    """Generations whose state may still be needed: the last one that all of its members adopted, and those after it."""

    lost: list[str] = Field(default_factory=list)
    """UIDs of pods of older generations that no longer exist."""


class LineageEntry(WrittenModel):
    """A generation that trained, and the step at which it began."""

    generation: int
    """Number of the generation."""

    start_step: int
    """Step at which the generation began. Checkpoints of earlier generations beyond this step are not read."""


CurvePoint = Annotated[str, Field(max_length=64)]


class Progress(WrittenModel):
    """Progress of the job, as the members last reported it."""

    step: int | None = None
    """Last step that every member has committed and that the failure of a member cannot undo. Of a script without the library the
    step that it says itself."""

    total_steps: int | None = None
    """Total number of steps, as the script passed it to job.steps(), or says it."""

    loss: float | None = None
    """Loss of this step. On a GPU it is the loss of the step before, until the job has finished."""

    source: str | None = None
    """The source of the progress of a script without the library. Logged: from lines that match spec.progress.log. Reported: the
    script posts it by Kubeflow's protocol. Counted: optimizer steps are counted in its processes. Absent with the library."""

    optimizer_steps: int | None = None
    """Number of optimizer steps since the script's processes started, if source is Counted. It is not the script's own step: it
    begins at 0 after each restart, and knows nothing of gradient accumulation."""

    percent: float | None = None
    """Share of the work that is done, as a script without the library says it."""

    remaining_seconds: int | None = None
    """Time left when this was reported, at the script's pace since its processes started. Absent with the library, and where the
    script does not say how much there is to do."""

    samples_per_second: float | None = None
    """Committed samples per second."""

    noise_scale: float | None = None
    """Gradient noise scale, an average over about the last 100 steps. Its unit is that of the weights that the script passes to
    step.backward() (samples or tokens). Absent unless the script passes noise_scale=True to regroup.session()."""

    step_time: str | None = None
    """Mean duration of a step over the workers and their last steps, with its largest parts in percent. An example is
    "0.84 s: backward 61 %, waits 22 % (worker 3 is slowest: fetching data 0.3 s)". A worker is named if others wait for it. The
    reference page of the library explains the parts. Absent without the library, and until a step was measured."""

    at: Timestamp | None = None
    """Time of the report."""

    curve: list[CurvePoint] | None = Field(default=None, max_length=MAX_CURVE_POINTS)
    """The way to this step: at most 64 points, oldest first, evenly spaced in time and together at most 2 KB. Each is
    "STEP SECONDS LOSS", with seconds since startTime. The loss is absent where it is not known. No step that was
    rolled back is in it."""


class RoleStatus(WrittenModel):
    """The pods of one role."""

    name: str
    """Name of the role."""

    replicas: int
    """Number of pods wanted."""

    ready: int
    """Number of pods whose containers run."""

    succeeded: list[int] | None = None
    """Indices of the pods that have succeeded. They are not replaced."""

    awaited: int | None = None
    """Number of pods that have to succeed before the job is Complete. Absent: the job does not wait for the role."""

    message: str | None = None
    """The reason why a pod cannot start. Absent: none is known."""


class Finished(WrittenModel):
    """The generation whose members have committed the last step, and which of their scripts have returned 0."""

    generation: int
    """Number of the generation."""

    workers: int
    """Number of its workers."""

    at: Timestamp
    """Time at which the operator heard of it."""

    step: int = 0
    """Number of steps that were committed; 0 for a script without the library."""

    members: str = ""
    """Its members in the order of their ranks, as in status.membership."""

    done: str = ""
    """The members whose script has returned 0 in every process. The job is Complete once all have."""


class EndTakenBack(WrittenModel):
    """The end of the steps that was taken back, because all workers have to run the script again."""

    generation: int
    """Number of the generation that had committed all steps."""

    at: Timestamp
    """Time from which spec.runPolicy.finishSeconds counts: status.finished.at of then."""

    step: int = 0
    """Number of steps that were committed; 0 for a script without the library."""


class Growth(WrittenModel):
    """The size that the job has now, and when spec.replicas last changed it."""

    replicas: int
    """Workers, without spares."""

    changed_at: Timestamp | None = None
    """Time at which the size changed. Absent: it has not changed since the job began to train."""


class RefusedSize(WrittenModel):
    """A number of workers that a script without the library does not run with (adr/0081)."""

    workers: int
    """Number of workers with which the script failed before it had trained."""

    back_to: int
    """Number of workers with which the script had trained. The job goes back to it if it wanted the refused number."""

    wanted: int
    """Number of workers that the job wanted then. The refusal ends once the job wants another number."""

    generation: int
    """Number of the generation that failed."""

    at: Timestamp
    """Time of the failure."""

    message: str
    """The failure, in one sentence."""

    @property
    def size(self) -> int:
        """Number of workers that the job is to have while the refusal holds. If a loss led to the refused number, the job still
        wants what it wanted."""
        return self.back_to if self.workers == self.wanted else self.wanted

    @property
    def permitted(self) -> list[int] | None:
        """Numbers of workers that may train while the refusal holds, ascending; None: all up to `size`. Below `size`, where a
        number was refused, none is tried but the one with which the script has trained."""
        return sorted({self.size, min(self.size, self.back_to)}) if self.workers < self.size else None


MAX_REFUSED_SIZES = 16
"""Refused numbers of workers that the status keeps. The oldest is forgotten, and costs a restart if it is wanted again."""


class EarlierRefusal(WrittenModel):
    """A number of workers that the script has refused."""

    workers: int
    """Number of workers."""

    at: Timestamp
    """Time of the failure."""


class Goodput(WrittenModel):
    """The part of the job's time that went into steps that count. Only for scripts that use the library."""

    percent: int
    """productiveSeconds in percent of the time since startTime, without the time for which the job was suspended."""

    productive_seconds: float
    """Duration of all committed steps, each counted once. Not in it: what was redone, starts, waits for a generation, and hangs."""

    step: int
    """Up to this step they are counted."""

    suspended_seconds: float = 0.0
    """Seconds for which the job was suspended."""


class CheckpointStatus(WrittenModel):
    """The newest complete durable checkpoint of the job."""

    generation: int
    """Generation that wrote the checkpoint."""

    step: int
    """Number of committed steps in the checkpoint."""

    directory: str
    """Directory of the checkpoint, relative to the checkpoint directory of the job."""

    kept: list[str] = Field(default_factory=list)
    """Directories of the checkpoints that are kept, oldest first."""

    at: Timestamp | None = None
    """Time at which the checkpoint was complete."""


class ResumedFrom(WrittenModel):
    """The checkpoint of an earlier job that this one has begun with (spec.checkpoint.resumeFrom)."""

    path: str
    """Path of the checkpoint in the job's workers."""

    step: int
    """First step of the job: the number of committed steps in the checkpoint."""

    digest: str
    """SHA-256 of the checkpoint's COMMIT.json. Until the job has a checkpoint of its own, it reads no checkpoint with
    another digest."""


class MemorySnapshotStatus(WrittenModel):
    """The state that every worker holds in its memory snapshot."""

    step: int
    """Newest step that every worker has in its memory snapshot: a loss of all processes at once goes back no further."""


class JudgedExits(WrittenModel):
    """Failures that recovery.onExit has judged already, so that the next operator does not judge them again."""

    generation: int = 0
    """The newest generation in which something failed."""

    rule: str | None = None
    """The rule that the first failure of the generation matched. Absent: none."""

    failed: dict[str, int] = Field(default_factory=dict)
    """Workers that failed in the generation (the last 64), each with the incarnation of its processes at that time; 0: its whole
    container ended."""

    ends: dict[str, int] = Field(default_factory=dict)
    """Ends of the trainer container that have been seen, by pod, evictions included. Pods without one are left out."""


class SeenExits(WrittenModel):
    """Exits of processes that have been seen. Agents report them again to the next operator, which does not count them again."""

    newest: dict[str, int] = Field(default_factory=dict)
    """The number of the newest exit, by worker and the end of its pod's UID. Pods without one are left out."""

    generation: int | None = None
    """Tier Script: the newest generation of which an exit has been counted."""


PROCESS_CAUSES = ("ExitCode", "Signal", "OOMKilled", "Hung")
POD_CAUSES = ("PodFailed", "NodeNotReady", "Deleted", "Unresponsive")
"""Keys of status.restarts.causes."""


class Restarts(WrittenModel):
    """Numbers of processes, pods and generations that had to start again."""

    total: int = 0
    """Sum of processes and pods; the column Restarts."""

    processes: int = 0
    """Training processes that ended by themselves with a non-zero code or a signal, and trainer and init containers that failed."""

    pods: int = 0
    """Pods that were lost and replaced once training had begun. Those that were asked to leave and handed over do not count, nor do
    evictions and preemptions."""

    causes: dict[str, int] | None = None
    """Processes and pods by why they had to start again. Processes: ExitCode, Signal, OOMKilled, Hung (the operator had it killed).
    Pods: PodFailed, NodeNotReady, Deleted, Unresponsive (its agent)."""

    generations: int = 0
    """Generations after the first."""

    recent: list[Timestamp] = Field(default_factory=list)
    """Times of the counted failures inside recovery.windowSeconds, oldest first. Failures of one second have one time; with windows
    longer than 1000 seconds, those of one thousandth of the window."""

    recent_counts: list[int] | None = None
    """Number of failures that each of recent stands for. Absent if each is one."""

    ignored: int | None = None
    """Failures that a rule of recovery.onExit with the action Ignore matched. They are in no other count."""

    judged: JudgedExits | None = None
    """Failures that recovery.onExit has judged already. Absent without rules. Do not edit."""

    exits: SeenExits | None = None
    """Exits of processes that have been seen. Absent before the first one. Do not edit."""


class Samples(WrittenModel):
    """The samples that the committed steps used."""

    committed: int = 0
    """Number of samples in committed steps."""

    digest: str = ""
    """Digest of the sample ids. It is the same for any history of failures and resizes."""


class Incident(WrittenModel):
    """One change of membership: what happened, what was decided, and how long each part took."""

    generation: int
    """Number of the generation that resulted."""

    at: Timestamp
    """Time of the detection, however long it then took until enough workers were there. Where the operator was replaced meanwhile:
    of the last commit."""

    decision: str
    """One sentence: what happened, and what the operator decided."""

    cause: str | None = None
    """Cause in CamelCase, for example ProcessExited, PodDeleted, Disconnected, Resized."""

    culprit: str | None = None
    """The worker that caused the incident."""

    rule: str | None = None
    """The rule of recovery.onExit that the first failure of the generation before matched."""

    workers_before: int | None = None
    """Number of workers of the generation before."""

    workers: int | None = None
    """Number of workers of the generation that resulted."""

    detect_ms: float | None = None
    """Time from the failure to its detection, in milliseconds; for a silent worker, from its last progress. Absent if the
    failure itself was not observed."""

    decide_ms: float | None = None
    """Time from the detection to the decision, in milliseconds: the wait for enough workers is part of it."""

    persist_ms: float | None = None
    """Time to write the generation to this status, in milliseconds."""

    form_ms: float | None = None
    """Time for the members to connect and build their process groups, in milliseconds."""

    transfer_ms: float | None = None
    """Time to copy the state to members that lacked it, in milliseconds."""

    first_step_ms: float | None = None
    """Time from then until the first committed step, in milliseconds."""

    start_ms: float | None = None
    """Tier Script only: time from the announcement until all processes of the generation run, in milliseconds."""

    steps_redone: int | None = None
    """Number of steps that were redone."""

    stacks: list[str] | None = None
    """For a hang: where each rank was, ranks outside any collective first. The logs have the complete stacks."""


class Summary(WrittenModel):
    """Texts for the columns of kubectl get. Programs should read conditions and numbers instead."""

    state: str = ""
    """The phase, or the reason why the job was rejected."""

    ready: str = ""
    """Ready and wanted workers, for example "3/4"."""

    step: str = ""
    """The step. "+37" is the number of optimizer steps since the processes of a script started that says no step itself."""

    progress: str = ""
    """Share of committed steps, for example "37%"."""

    loss: str = ""
    """The loss, rounded."""

    eta: str = ""
    """Estimated time left, for example "1h12m". Empty unless Running."""


class JobStatus(WrittenModel):
    """The state of the job, as the operator last saw it."""

    observed_generation: int | None = None
    """The metadata.generation that this status was computed from."""

    observed_at: Timestamp | None = None
    """Time at which the operator last wrote this status. While a generation trains, it writes at least every ten seconds (less
    often with more than 200 jobs). If the time is older, no operator writes, and the status may be outdated."""

    phase: State | None = None
    """Summary of the conditions, for display. docs/reference/states.md explains each value."""

    accepted_spec: dict[str, Any] | None = None
    """The spec that a started job runs by, without its template, which cannot change. If a later edit is refused, or an operator
    knows a rule that this spec breaks, the job goes on by it."""

    template_digest: str | None = None
    """Digest of spec.template and of the templates of spec.roles with which the job started. While those in the spec have another
    one, no pod is made."""

    start_time: Timestamp | None = None
    """Time at which the first generation was announced. From then on the fields marked as immutable cannot change."""

    completion_time: Timestamp | None = None
    """Time at which the job succeeded or failed."""

    exit_code: int | None = None
    """Exit code of the script's process that condition Failed names, 128 + n for signal n. Absent: the job has not failed, or did
    not fail because of its script."""

    failed_pod: str | None = None
    """Name of the pod that condition Failed names and whose log says more. With cleanPodPolicy None it is kept for an hour.
    Absent: the job has not failed, or no log says why."""

    tier: Literal["Session", "Script"] | None = None
    """Session: the script uses the library, and its processes survive membership changes. Script: an unmodified script,
    whose processes start again in the same pods after each change. Absent until known."""

    replicas: int | None = None
    """Number of existing workers, for the scale subresource."""

    ready_replicas: int | None = None
    """Number of workers that are ready."""

    selector: str | None = None
    """Label selector of the workers, for the scale subresource."""

    membership: Membership | None = None
    """The newest generation: a numbered, immutable list of the workers that train together. Do not edit."""

    released: list[str] = Field(default_factory=list)
    """UIDs of pods that were told to stop. They never become members again."""

    lineage: list[LineageEntry] = Field(default_factory=list, max_length=MAX_LINEAGE)
    """The last generations that trained, oldest first."""

    progress: Progress | None = None
    """Progress of the job."""

    checkpoint: CheckpointStatus | None = None
    """The newest complete durable checkpoint."""

    resumed_from: ResumedFrom | None = None
    """The checkpoint of an earlier job that this one has begun with. Absent: the job began at step 0, or has not begun."""

    memory_snapshot: MemorySnapshotStatus | None = None
    """The state that every worker holds in its memory snapshot. Absent: none is kept, or some worker has none yet."""

    restarts: Restarts | None = None
    """Numbers of processes, pods and generations that had to start again."""

    roles: list[RoleStatus] | None = None
    """The pods of spec.roles. Absent: the job has none."""

    end_taken_back: EndTakenBack | None = None
    """Absent: no end was taken back, all steps are committed again, or a generation trains steps again."""

    finished: Finished | None = None
    """The generation that has committed all steps. Written then; without the library, once the script has returned 0 in the first
    member. From then on the operator makes pods only for members that are not done. Do not edit."""

    growth: Growth | None = None
    """The size that spec.elasticPolicy.growthCooldownSeconds counts from. Absent: it is not set."""

    last_good_size: int | None = None
    """Number of workers with which a script without the library last trained: it has run for 38 s, or has reported steps. Absent:
    with none yet, the script uses the library, or the job is of fixed size."""

    refused_size: RefusedSize | None = None
    """The number of workers that the script refused. Absent: none, or the job has wanted another number since."""

    refused_sizes: list[EarlierRefusal] | None = Field(default=None, max_length=MAX_REFUSED_SIZES)
    """The last 16 numbers of workers that the script has refused, oldest first. The job does not try them again. One is removed
    once the script has trained with it, or spec.elasticPolicy does not permit it any more. A suspension removes all."""

    goodput: Goodput | None = None
    """The part of the job's time that went into steps that count."""

    samples: Samples | None = None
    """The samples that the committed steps used."""

    incidents: list[Incident] = Field(default_factory=list, max_length=MAX_INCIDENTS)
    """Records of the last ten membership changes, oldest first."""

    longest_start_seconds: int | None = Field(default=None, ge=1)
    """Longest start of a worker's processes so far, in seconds, imports included. A start that takes four times as long, and
    at least a minute, is aborted and repeated."""

    agent_image: str | None = None
    """Image from which the workers' agent is copied."""

    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Accepted, PodsReady, AgentsConnected, Training, Degraded, CheckpointsSaved, SnapshotsTaken, Suspended, Complete, Failed."""

    summary: Summary | None = None
    """Texts for the columns of kubectl get. Programs should read conditions and numbers instead."""

    def condition(self, type: str) -> Condition | None:
        """Return the condition of a type, None if the status has none."""
        return next((one for one in self.conditions if one.type == type), None)
