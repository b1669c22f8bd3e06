"""What the operator writes under `status`: the job's memory and its face.

`membership`, `released`, `lineage`, `restarts` and `checkpoint` are memory: the plan continues from them after any
crash, and they change by compare-and-swap only. `progress`, `samples`, `incidents`, `conditions` and `summary` are for
people and machines that look.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from regroup_operator.api.base import Timestamp, WrittenModel
from regroup_operator.api.conditions import Condition

State = Literal["Pending", "Starting", "Running", "Recovering", "Waiting", "Succeeded", "Failed"]

MAX_LINEAGE = 32
MAX_INCIDENTS = 10


class Store(WrittenModel):
    """Where a generation's members meet."""

    host: str
    """IP address of the pod that hosts the key-value store."""

    port: int = Field(ge=1, le=65535)
    """TCP port of the store."""

    slot: int = Field(ge=0)
    """Slot of the worker that hosts the store and publishes the member list in it."""


class OlderGeneration(WrittenModel):
    """An earlier generation whose state may still be the newest one somewhere."""

    generation: int
    """Its number."""

    uid: str
    """Its random identity."""

    members: str
    """Its members, spelled as in membership.members."""


class Membership(WrittenModel):
    """The newest generation: an immutable list of members. It exists because it stands here."""

    generation: int = Field(ge=1)
    """Number of the generation; never reused for another list of members."""

    uid: str
    """Random identity of the generation; part of every key in its store."""

    kind: Literal["planned", "forced"]
    """planned: changes at a step boundary. forced: interrupts, because a member was lost."""

    digest: str
    """Digest of the generation's document, by which its members know that they read the right one. It is never rebuilt: an
    operator that lacks the document issues the next generation."""

    start_step: int | None = None
    """Step that the generation began with; known once the first member has adopted the state."""

    adopted: bool = False
    """Whether every member has adopted the generation's state: no older generation can matter any more."""

    world_size: int = Field(ge=1)
    """Number of training processes."""

    members: str
    """Ranges of slot or slot.n, n from the pod's name with 0 left out: "0-3,5.2"."""

    store: Store | None = None
    """Where the members meet."""

    older: list[OlderGeneration] = Field(default_factory=list)
    """The last generation that all of its members adopted, and every one after it."""

    lost: list[str] = Field(default_factory=list)
    """UIDs of pods of older generations that are gone from the API."""


class LineageEntry(WrittenModel):
    """A generation that trained, and the step that it began with."""

    generation: int
    """Its number."""

    start_step: int
    """What a lower generation wrote beyond this step is never read."""


class Progress(WrittenModel):
    """How far the job is, as the members last reported it."""

    step: int | None = None
    """Last step that every member has committed and that no failure of a member can take back."""

    total_steps: int | None = None
    """Steps in all, when the script said so."""

    loss: float | None = None
    """Loss of that step."""

    samples_per_second: float | None = None
    """Committed samples per second."""

    at: Timestamp | None = None
    """When it was reported."""


class CheckpointStatus(WrittenModel):
    """The newest complete durable checkpoint of the job."""

    generation: int
    """Generation that wrote it."""

    step: int
    """Step whose state it holds."""

    directory: str
    """Its directory, relative to the checkpoint directory."""

    kept: list[str] = Field(default_factory=list)
    """Directories of the checkpoints that are kept, oldest first."""

    at: Timestamp | None = None
    """When it was complete."""


class Restarts(WrittenModel):
    """How often what had to start again."""

    total: int = 0
    """Processes and pods together; what the column Restarts shows."""

    processes: int = 0
    """Training processes that ended by themselves with a non-zero code or a signal, and containers that failed."""

    pods: int = 0
    """Pods that were replaced."""

    generations: int = 0
    """Generations after the first."""

    recent: list[Timestamp] = Field(default_factory=list)
    """Times of the counted failures inside recovery.windowSeconds, oldest first."""


class Samples(WrittenModel):
    """Which samples the committed steps used."""

    committed: int = 0
    """Number of samples in committed steps."""

    digest: str = ""
    """Digest of their ids; equal for any history of failures and resizes."""


class Incident(WrittenModel):
    """One change of membership: what happened, what was decided, and how long each part took."""

    generation: int
    """The generation that resulted."""

    at: Timestamp
    """When it was detected."""

    decision: str
    """What was done, in a few words."""

    cause: str | None = None
    """Why: for example ProcessExited, PodDeleted, Disconnected, Resized."""

    culprit: str | None = None
    """The worker, and its process where known, that caused it."""

    detect_ms: float | None = None
    """From the event to the operator's knowledge of it, in milliseconds; absent where nobody saw the event itself. For a worker
    that fell silent it counts from the last progress."""

    decide_ms: float | None = None
    """From knowledge to decision, in milliseconds."""

    persist_ms: float | None = None
    """Writing the generation to this status, in milliseconds."""

    form_ms: float | None = None
    """Members meeting and making their groups, in milliseconds."""

    transfer_ms: float | None = None
    """Copying the state to members that lacked it, in milliseconds."""

    first_step_ms: float | None = None
    """From formed to the first committed step, in milliseconds."""

    start_ms: float | None = None
    """Tier Script, where steps are not seen: from the announcement until all processes of the generation run, in
    milliseconds."""

    steps_redone: int | None = None
    """Steps that had to be done again."""

    stacks: list[str] | None = None
    """Of a hang: where the ranks were, one line each, those in no collective first. Their whole stacks are in the logs."""


class Summary(WrittenModel):
    """Texts made for the columns of kubectl get; read conditions and numbers instead."""

    state: str = ""
    """The phase, or for a job that was not accepted the reason."""

    ready: str = ""
    """Ready and wanted workers, "3/4"."""

    progress: str = ""
    """Share of the steps done, "37%"."""

    loss: str = ""
    """The loss, shortened."""

    eta: str = ""
    """Time left while Running, "1h12m"; else empty."""


class JobStatus(WrittenModel):
    """What is."""

    observed_generation: int | None = None
    """The metadata.generation that this status was made from."""

    observed_at: Timestamp | None = None
    """When the operator last wrote this status. While a generation trains that is every ten seconds at least (with more
    than 200 jobs less often): an older status may no longer be true, because no operator writes."""

    phase: State | None = None
    """Pending, Starting, Running, Recovering, Waiting, Succeeded or Failed; derived from the conditions, for
    display."""

    start_time: Timestamp | None = None
    """When the first generation was announced. From then on the template and others are immutable."""

    tier: Literal["Session", "Script"] | None = None
    """Session: the script uses regroup, membership changes happen inside its processes. Script: an unmodified script,
    its processes start again in the same pods. Absent until known."""

    replicas: int | None = None
    """Workers that exist; read by the scale subresource."""

    ready_replicas: int | None = None
    """Workers that are ready."""

    selector: str | None = None
    """Label selector of the workers; read by the scale subresource."""

    membership: Membership | None = None
    """The newest generation."""

    released: list[str] = Field(default_factory=list)
    """UIDs of pods that were told to stop; they are never members again."""

    lineage: list[LineageEntry] = Field(default_factory=list, max_length=MAX_LINEAGE)
    """The last generations that trained, oldest first."""

    progress: Progress | None = None
    """How far the job is."""

    checkpoint: CheckpointStatus | None = None
    """The newest complete durable checkpoint."""

    restarts: Restarts | None = None
    """How often what had to start again."""

    samples: Samples | None = None
    """Which samples the committed steps used."""

    incidents: list[Incident] = Field(default_factory=list, max_length=MAX_INCIDENTS)
    """The last ten changes of membership, oldest first."""

    longest_start_seconds: int | None = Field(default=None, ge=1)
    """The longest start of a worker's processes so far, imports included. One that takes four times as long, and at least a
    minute, is restarted."""

    agent_image: str | None = None
    """Image that the workers' agent came from."""

    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Accepted, PodsReady, AgentsConnected, Training, Degraded, Complete, Failed."""

    summary: Summary | None = None
    """Texts made for the columns of kubectl get."""
