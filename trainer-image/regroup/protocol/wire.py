"""Operator <-> agent: reports and commands, JSON, one request for both (adr/0075).

An agent sends `POST /v1/namespaces/{ns}/pods/{pod}/stream`. The body has a `Report` a line, the first one with the body `Hello`.
The operator answers once it has taken the hello. Its answer has a line for each `Command`, and lines with `Answered`. Both sides
are open for as long as the agent lives.

Every report carries the worker's whole condition and seal; `body` says what happened just now. So the operator derives what to do
from conditions, and never from reports that it remembers (rule RESAY).
"""

import math
from dataclasses import dataclass, field
from typing import Any, Optional

from . import codec
from .document import CheckpointRef, Document
from .state import Condition, Seal, StatePair, Times

# --- reports: agent -> operator ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """First line of a stream; again on each reconnect."""

    TYPE = "hello"
    protocol: int
    processes: int
    faults: int = 0
    """So many of the next lines report faults again. The operator opens the stream after them: its first plan that sees the worker
    connected knows how its processes have ended (adr/0067)."""


@dataclass(frozen=True)
class Changed:
    """The condition changed in a way that no other report tells: starting, ready, forming, draining's end."""

    TYPE = "changed"


@dataclass(frozen=True)
class Adopted:
    """All of the worker's processes hold the generation's state. `source`: pod UID it came from, or `disk`, `nothing`, `self`.
    `imported` and `own_steps` are as AdoptedLocally has them."""

    TYPE = "adopted"
    start_step: int
    source: str
    state: Optional[StatePair] = None
    transfer_ms: float = 0.0
    rolled_back: bool = False
    imported: Optional[str] = None
    form_ms: Optional[float] = None
    """Milliseconds from the entry of the slowest process until its groups stood."""
    own_steps: bool = False


@dataclass(frozen=True)
class Progress:
    """A step was committed. `samples` and `digest` are absolute functions of the step (rule STATE)."""

    TYPE = "progress"
    step: int
    loss: Optional[float] = None
    samples: int = 0
    digest: str = ""
    total_steps: Optional[int] = None
    samples_per_second: Optional[float] = None
    first_step_ms: Optional[float] = None
    """Time from the adoption to the first commit of this generation; only in the report that follows that commit."""
    steps_redone: int = 0
    checkpoint: Optional[dict[str, Any]] = None
    """{generation, step, directory} of the newest durable checkpoint that this group committed."""
    checkpoint_problem: Optional[str] = None
    """One sentence that says what keeps the worker from saving; empty: nothing does. None: this worker does not write."""
    step_s: Optional[float] = None
    """Median duration of the last steps, as the process measured it; None before its second step."""
    longest_s: Optional[float] = None
    """The longest that the process needed between two commits of one generation, without pauses and waits for others."""
    age_ms: float = 0.0
    """Age of the commit when this was sent: not every commit is reported."""
    checkpoints_late: Optional[str] = None
    """One sentence that says why checkpoints come less often than was asked for; empty: they do not. None: this worker does not
    write."""
    snapshot_step: Optional[int] = None
    """Newest step that every worker has in its memory snapshot; None: there is none."""
    snapshot_problem: Optional[str] = None
    """One sentence that says what keeps this worker from taking memory snapshots; empty: nothing does. None: it takes none."""
    snapshots_late: Optional[str] = None
    """One sentence that says why memory snapshots come less often than was asked for; empty: they do not. None: it takes none."""
    times: Optional[Times] = None
    """Times of the process that waits least for others; None before the second step of a generation."""
    noise_scale: Optional[float] = None
    """The gradient noise scale, in the unit of weights; None: it is not measured, or not known yet."""
    generation: int = 0
    """Generation of the commit; 0: that of the condition. One process of a worker may have left it when another one has saved."""


LOGGED, REPORTED, COUNTED = "Logged", "Reported", "Counted"
"""The ways in which an unmodified script says how far it is (ScriptProgress.way)."""
MAX_REMAINING_S = 10 * 365 * 86_400.0
"""Longest time left that is told: a program that has just begun may seem to take for ever."""


@dataclass(frozen=True)
class ScriptProgress:
    """The words of an unmodified script on its progress.

    It is outside of the protocol's rules: no decision on membership, checkpoints or lineage follows from it, and it proves no life.
    """

    TYPE = "scriptProgress"
    incarnation: int
    """Incarnation of the newest process that has said something of it."""
    way: str
    """LOGGED, REPORTED or COUNTED. A counted step is the number of optimizer steps since the processes started."""
    step: Optional[int] = None
    total_steps: Optional[int] = None
    percent: Optional[float] = None
    """Share of the work that is done, 0 to 100, by the program's own word."""
    loss: Optional[float] = None
    step_s: Optional[float] = None
    """Seconds for one step, over the last changes of the number."""
    remaining_s: Optional[float] = None
    """Seconds until the end at the present pace, as the agent has measured it."""
    every_s: Optional[float] = None
    """Median time between two changes of what the program says; None before the second one."""
    longest_s: Optional[float] = None
    """The longest time between two of them."""
    age_ms: float = 0.0
    """Age of the last one when this was sent."""


CANNOT_RUN = "CannotRun"
"""Reason of a fault: no process of the job can run, whenever it is started (local.CannotRun)."""


@dataclass(frozen=True)
class Fault:
    """Something ended or broke. A process that ended has `exit_code` (negative: signal)."""

    TYPE = "fault"
    cause: str
    """One of: exit, hung (the agent killed it on the operator's word), collective, witness, checkpoint, error."""
    message: str = ""
    step: int = 0
    local_rank: Optional[int] = None
    exit_code: Optional[int] = None
    last_line: Optional[str] = None
    """The last line that the process wrote to stderr, its exception if it wrote one: at most 500 characters."""
    peer: Optional[str] = None
    """Pod UID that this worker lost, where it knows (rule CLIQUE)."""
    peer_rank: Optional[int] = None
    """Rank in the broken generation that this worker lost, where it knows: the operator has the document."""
    observed_ms: float = 0.0
    """Age of the observation when the report was sent."""
    tail: Optional[str] = None
    """Last lines of its traceback, or of its stderr: at most 1500 characters."""
    reason: Optional[str] = None
    """OOMKilled: a process of the container was killed for lack of memory. CANNOT_RUN: the library ended it, and it is not started
    again."""
    detail: Optional[str] = None
    """The numbers behind `reason`, in a few words; the library's sentence."""
    ended: int = 0
    """The number of an exit, 1 or more. It grows with each exit of a process of this pod, and names the exit for the pod's life. 0:
    this is no exit."""
    generation: int = 0
    """The newest generation that the worker was in then; 0: it was in none. The report's condition may be of a later one."""
    incarnation: int = 0
    """The incarnation that the worker had then."""


@dataclass(frozen=True)
class Draining:
    """The pod got SIGTERM: it wants to leave by `deadline_s` seconds from now."""

    TYPE = "draining"
    deadline_s: float


@dataclass(frozen=True)
class Finished:
    """All of the worker's processes committed the last step (script tier: exited 0)."""

    TYPE = "finished"
    step: int


@dataclass(frozen=True)
class ProcessStack:
    """The place where one process is."""

    COLLECTIVE = "collective"  # in a collective: it waits for other ranks
    WAITING = "waiting"  # for the next generation, or for the end
    OUTSIDE = "outside"  # in the script, and in no collective
    STOPPED = "stopped"  # by a signal or a debugger
    SILENT = "silent"  # it runs, but none of its threads answers

    local_rank: int
    incarnation: int
    place: str
    place_s: Optional[float] = None
    """Seconds that it has been there; None: they are not known."""
    where: str = ""
    """The innermost frame of the user's own code; what the kernel knows of a process that does not answer."""
    chain: str = ""
    """The main thread's calls in one line, innermost first, shortened."""
    pause: str = ""
    """Name of the pause that it is in."""


@dataclass(frozen=True)
class Stacks:
    """Answer to the command `dumpStacks`: every process of the worker. The whole stacks are in the pod's log."""

    TYPE = "stacks"
    processes: tuple[ProcessStack, ...]


REPORTS = codec.Registry(Hello, Changed, Adopted, Progress, ScriptProgress, Fault, Draining, Finished, Stacks)

REPORT_EVERY_S = 1.0
"""The two lowest members of a generation report progress this often at most; `Answered` may ask for less."""
SUSPECT_S = 0.5
"""An observer says so once it has heard nothing of a member for so long."""
SILENT_S = 1.5
"""An observer that has heard nothing of a member for so long counts, with a second one, as proof that it is lost."""


@dataclass(frozen=True)
class Unheard:
    """A member that this agent observes and that has stopped answering (adr/0057). Said again in every report until it answers."""

    pod_uid: str
    age_s: float
    """Seconds for which the observer had heard nothing when this was sent. Time in which it could not try does not count."""


@dataclass(frozen=True)
class Report:
    """The fields that every report carries, and its body (one of REPORTS)."""

    job_uid: str
    pod_uid: str
    boot: str
    condition: Condition
    seal: Optional[Seal]
    """Present where the worker is in no group: rule SEAL."""
    store_port: int
    """The fresh listening socket that the agent keeps for the next store; 0: none."""
    body: Any = field(default=None)
    observed_port: int = 0
    """The port that other agents try to connect to, to see whether this pod's kernel answers; 0: none."""
    unheard: tuple[Unheard, ...] = ()
    """Members that this agent observes and has heard nothing of for SUSPECT_S or longer."""
    saved_age_s: Optional[float] = None
    """Tier Script: seconds since the script last completed a checkpoint in REGROUP_CHECKPOINT_DIR. None: this agent saw none."""
    ports: Optional[tuple[int, ...]] = None
    """Ports that the agent keeps for its processes in the next generation, one for each. None: their framework needs none."""

    @property
    def incarnation(self) -> int:
        return self.condition.incarnation

    @property
    def generation(self) -> int:
        return self.condition.generation

    @classmethod
    def decode(cls, text: "bytes | str") -> "Report":
        """Parse a report. Raises ProtocolError."""
        data = codec.parse(text)
        report = codec.from_json(cls, data, "report")
        if not 0 <= report.store_port < 65536:  # it goes into the status, whose schema knows ports
            raise codec.ProtocolError(f"report.store_port ({report.store_port}) is no port. Send 0 to 65535.")
        if not 0 <= report.observed_port < 65536:
            raise codec.ProtocolError(f"report.observedPort ({report.observed_port}) is no port. Send 0 to 65535.")
        for port in report.ports or ():
            if not 0 < port < 65536:
                raise codec.ProtocolError(f"report.ports ({port}) is no port. Send 1 to 65535.")
        # The next generation is one more than the newest that anybody names, and a status has room for 63 bits.
        _check_counts(
            "report.condition", report.condition, ("incarnation", "generation", "step", "heard", "entered", "adopted")
        )
        if report.seal is not None:
            _check_counts("report.seal", report.seal, ("left_up_to", "adopted", "state_adopted"))
            if report.seal.state is not None:
                _check_counts("report.seal.state", report.seal.state, ("generation", "step"))
        body = REPORTS.decode(report.body)
        _check_counts(body.TYPE, body, _COUNTS.get(body.TYPE, ()))
        if isinstance(body, Adopted) and body.state is not None:
            _check_counts("adopted.state", body.state, ("generation", "step"))
        if isinstance(body, Fault) and not -(2**31) <= (body.exit_code or 0) < 2**32:
            raise codec.ProtocolError(f"fault.exitCode ({body.exit_code}) is no exit code. Send 0 to 255, or -signal.")
        if isinstance(body, ScriptProgress):
            _check_script_progress(body)
        if isinstance(body, Progress) and body.checkpoint is not None:
            checkpoint = codec.from_json(CheckpointRef, body.checkpoint, "progress.checkpoint")
            _check_counts("progress.checkpoint", checkpoint, ("generation", "step"))
        return cls(**{**report.__dict__, "body": body})


_COUNTS = {
    "hello": ("protocol", "processes", "faults"),
    "adopted": ("start_step",),
    "progress": ("step", "samples", "steps_redone", "snapshot_step"),
    "scriptProgress": ("incarnation", "step", "total_steps"),
    "fault": ("step", "local_rank", "peer_rank", "ended", "generation", "incarnation"),
    "finished": ("step",),
}
"""Numbers of a report's body, by its type, that count something. `totalSteps` is not among them: the script's own word for "without
an end" may be `sys.maxsize`."""


def _check_counts(where: str, message: Any, fields: "tuple[str, ...]") -> None:
    for name in fields:
        value = getattr(message, name)
        if value is not None and not 0 <= value < 2**53:
            raise codec.ProtocolError(f"{where}.{codec.camel(name)} ({value}) must be from 0 to 2^53 - 1.")


def _check_script_progress(body: ScriptProgress) -> None:
    """Check what goes into the status, and into the time after which a script counts as hung. Raises ProtocolError."""
    if body.way not in (LOGGED, REPORTED, COUNTED):
        raise codec.ProtocolError(
            f"scriptProgress.way ({body.way[:50]}) is no way. Send {LOGGED}, {REPORTED} or {COUNTED}."
        )
    if not 0 <= (body.percent or 0.0) <= 100:
        raise codec.ProtocolError(f"scriptProgress.percent ({body.percent}) is no share. Send 0 to 100.")
    for name in ("step_s", "remaining_s", "every_s", "longest_s", "age_ms"):
        value = getattr(body, name)
        if value is not None and not 0 <= value < math.inf:
            raise codec.ProtocolError(
                f"scriptProgress.{codec.camel(name)} ({value}) must be a finite number of at least 0."
            )
    if (body.remaining_s or 0.0) > MAX_REMAINING_S:
        raise codec.ProtocolError(
            f"scriptProgress.remainingS ({body.remaining_s}) is too long. Send at most {MAX_REMAINING_S:.0f}."
        )


@dataclass(frozen=True)
class Answered:
    """A line of the stream: the operator has taken the reports before this one. It answers a fault, and a report that it refuses,
    at once, and others together, some seconds later. An agent that waits for an answer for too long calls another operator."""

    reports: int
    """Number of reports on this stream that have been read, without the hello."""
    status: int = 204
    """Status of the last of them, as of HTTP. 400 refuses one report; after any other one that is not 2xx, the stream ends."""
    error: str = ""
    """The sentence of a refusal."""
    progress_factor: float = 1.0
    """So many times as long as usual the agent waits between two reports of progress. An operator that serves many jobs asks for
    fewer reports (adr/0062)."""

    START = b'{"answered":'
    """The beginning of its line, and of no other."""

    def line(self) -> bytes:
        """Return it as a line of the stream."""
        return codec.line({"answered": self})

    @classmethod
    def decode(cls, text: "bytes | str") -> "Answered":
        """Parse a line of the stream. Raises ProtocolError."""
        return codec.from_json(cls, codec.parse(text)["answered"], "answered")


# --- commands: operator -> agent -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """First line of a stream, and again when the tier becomes known. Tier Session: start the processes at once."""

    TYPE = "welcome"
    tier: str
    """Session, Script or Unknown."""


@dataclass(frozen=True)
class Observed:
    """A member that the receiver observes: it tries to connect there, again and again, and says when nothing answers."""

    pod_uid: str
    host: str
    """IP address of its pod."""
    port: int
    """A port on which nobody listens: its kernel refuses the connection, and has answered."""


@dataclass(frozen=True)
class Generation:
    """This worker's part of a generation. `hosts_store`: the document follows on this stream as `DocumentCommand`.
    It does so for every member if their framework lists the members (frameworks.LISTS_MEMBERS)."""

    TYPE = "generation"
    number: int
    uid: str
    kind: str
    member: bool
    """False: this worker is not in it; it keeps its process, state and snapshot until `stop` (rule LINGER)."""
    rank_offset: int
    world_size: int
    slot: int
    group_rank: int
    """Index of this member in the document's list."""
    store_host: str
    store_port: int
    store_prefix: str
    hosts_store: bool
    document_digest: str
    reason: str = ""
    observes: tuple[Observed, ...] = ()
    """Members on other nodes that this worker observes from now on, and nobody else."""


@dataclass(frozen=True)
class DocumentCommand:
    TYPE = "document"
    document: Document


@dataclass(frozen=True)
class Prune:
    """Delete the durable checkpoints that are not in `keep` (directory names)."""

    TYPE = "prune"
    keep: tuple[str, ...]


@dataclass(frozen=True)
class ProgressRequest:
    TYPE = "progress?"


@dataclass(frozen=True)
class Ping:
    """Answered by a `changed` report: a mesh sidecar answers keepalives, a frozen agent does not answer this."""

    TYPE = "ping"


@dataclass(frozen=True)
class DumpStacks:
    """Write every process's stacks to the log and answer with `Stacks`: no step is committed any more."""

    TYPE = "dumpStacks"


@dataclass(frozen=True)
class Kill:
    """Kill the processes with these incarnations, which hang, and start them again in place. `message` says why."""

    TYPE = "kill"
    incarnations: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Restart:
    """End and start again, in place, the processes that keep this worker out of the newest generation. Those have not attached, or
    have not entered it. Where the worker is no member, they have not left the generation before."""

    TYPE = "restart"
    reason: str
    """One sentence, for the log and the fault that follows."""


@dataclass(frozen=True)
class Finish:
    """The last step is committed by all and `status.finished` says so: the script leaves its loop (rule END).

    Where one worker's end `repeats`, processes that start after it form no generation. They get the state of that step from the
    worker's memory snapshot or from `checkpoint`. They get this place, too, so that no second process has rank 0."""

    TYPE = "finish"
    generation: int
    """The generation that has finished; the newest may be one above it, which nobody has entered."""
    step: int
    rank_offset: int
    world_size: int
    checkpoint: Optional[CheckpointRef] = None
    """A durable checkpoint of `step`; None: there is none."""
    repeats: bool = True
    """A script that fails after its loop is started again by its agent. False: all members run theirs again, in a newer generation,
    because the model is split over them."""


@dataclass(frozen=True)
class Stop:
    """End all processes and exit 0. `outcome`: Complete, Failed, Released or Suspended."""

    TYPE = "stop"
    outcome: str


COMMANDS = codec.Registry(
    Welcome, Generation, DocumentCommand, Prune, ProgressRequest, Ping, DumpStacks, Kill, Restart, Finish, Stop
)


@dataclass(frozen=True)
class Command:
    """The fields that every command carries (rule FENCE), and its body (one of COMMANDS)."""

    job_uid: str
    pod_uid: str
    incarnation: int
    generation: int
    body: Any = field(default=None)

    @classmethod
    def decode(cls, text: "bytes | str") -> "Command":
        """Parse a line of the stream. Raises ProtocolError."""
        command = codec.from_json(cls, codec.parse(text), "command")
        return cls(**{**command.__dict__, "body": COMMANDS.decode(command.body)})
