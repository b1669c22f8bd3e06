"""Agent <-> trainer process: NDJSON over the agent's Unix socket (environment SOCKET).

A trainer opens one long connection and begins with `Attach`. For the store's listening socket it opens a second, short one. It
sends `TakeStore` there; the agent answers with one byte and closes. `1`: a descriptor comes with it as SCM_RIGHTS. `0`: the port is
free, bind it yourself. The hook in an unmodified script opens one for each `Observed`, the library one for
a `CannotRun`, and neither reads an answer. The same hook sends its `Stepped` on one connection that may stay open, or on one each.
"""

from dataclasses import dataclass
from typing import Any, Optional

from . import RELEASE, codec
from .document import CheckpointRef, Document
from .state import StatePair, Times

VERSION = 1
"""Version of the messages of this module that this release's library and agent speak. The image may have a library of another
release than the agent's. Within a version, messages gain only fields that may be missing. The agent ends a process that speaks
another one."""

# --- trainer -> agent ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attach:
    """The session stands: imported, built, waiting. The agent answers with the newest `Assignment` that the process may enter.

    `rehearses`: not yet. It runs one step without the others first, in which it compiles, and attaches again after that. The agent
    answers with an `Answer`, or with `FinishLocally` where no step follows.

    `protocol` and `release` are those of the library that the script has imported, and `path` is its directory.
    """

    TYPE = "attach"
    pid: int
    local_rank: int
    incarnation: int
    rehearses: bool = False
    protocol: int = VERSION
    release: str = RELEASE
    path: str = ""


@dataclass(frozen=True)
class Entering:
    """About to form a generation. The agent persists it, then answers with `Answer` (rule INC: it may refuse)."""

    TYPE = "entering"
    generation: int


@dataclass(frozen=True)
class Arrived:
    """Has reached the store of the generation, and waits there for the others."""

    TYPE = "arrived"
    generation: int


@dataclass(frozen=True)
class FormedLocally:
    TYPE = "formed"
    generation: int
    form_ms: float


@dataclass(frozen=True)
class AdoptedLocally:
    """Holds the generation's state. The agent persists it, then answers; no contribution before (rule MAD)."""

    TYPE = "adopted"
    generation: int
    start_step: int
    source: str
    state: StatePair
    transfer_ms: float
    rolled_back: bool = False
    imported: Optional[str] = None
    """The job begins with an earlier job's checkpoint: the digest of its record (`Commit.fingerprint`). None: it does not."""
    own_steps: bool = False
    """A step is what the script commits (elastic Horovod). Between two of them it may do anything, such as an evaluation."""


@dataclass(frozen=True)
class Committed:
    """One step committed, one line each; the agent decides what it passes on. `reportable_step`: rule ACK."""

    TYPE = "committed"
    generation: int
    step: int
    reportable_step: int
    loss: Optional[float] = None
    samples: int = 0
    digest: str = ""
    total_steps: Optional[int] = None
    samples_per_second: Optional[float] = None
    first_step_ms: Optional[float] = None
    steps_redone: int = 0
    checkpoint: Optional[dict[str, Any]] = None
    checkpoint_problem: Optional[str] = None
    """One sentence that says what keeps the generation's writer from saving; empty: nothing does. None: this rank writes
    nothing."""
    checkpoints_late: Optional[str] = None
    """One sentence that says why checkpoints come less often than was asked for; empty: they do not. None: this rank writes
    nothing."""
    step_s: Optional[float] = None
    longest_s: Optional[float] = None
    empty: bool = False
    """The rank had an empty share (rule HANDOVER): its process has run no forward, so it has compiled nothing."""
    snapshot_step: Optional[int] = None
    """Newest step that every worker has in its memory snapshot; None: there is none, or some worker has none yet."""
    snapshot_problem: Optional[str] = None
    """One sentence that says what keeps this worker from taking memory snapshots; empty: nothing does. None: it takes none."""
    snapshots_late: Optional[str] = None
    """One sentence that says why memory snapshots come less often than was asked for; empty: they do not. None: it takes none."""
    times: Optional[Times] = None
    """None before the second step of a generation."""
    noise_scale: Optional[float] = None
    """The gradient noise scale, in the unit of weights; None: it is not measured, or not known yet."""


@dataclass(frozen=True)
class Left:
    """Left every generation up to `left_up_to` for good. `cause` None: a newer generation was heard; else why it broke:
    collective, witness, error. `state` None: nothing valid is held. `state_adopted`: generation in which it was adopted."""

    TYPE = "left"
    left_up_to: int
    state: Optional[StatePair]
    state_adopted: int
    step: int = 0
    cause: Optional[str] = None
    message: str = ""
    peer_rank: Optional[int] = None


@dataclass(frozen=True)
class Snapshotted:
    """The state that the worker's memory snapshot holds now; None: it holds none. `is_last`: its process took it as it ended."""

    TYPE = "snapshotted"
    state: Optional[StatePair]
    adopted: int = 0
    is_last: bool = False


@dataclass(frozen=True)
class FinishedLocally:
    """The last step is committed; group and state are kept until `StopLocally` (rule FINISH)."""

    TYPE = "finished"
    generation: int
    step: int


@dataclass(frozen=True)
class BusyLocally:
    """The main thread begins what may take longer than a step (`state.Busy`); `kind` None: that is over."""

    TYPE = "busy"
    kind: Optional[str] = None
    name: str = ""
    max_s: Optional[float] = None


@dataclass(frozen=True)
class Stack:
    """Answer to `DumpStacksLocally`, given by the thread that listens: the main thread may be stuck."""

    TYPE = "stack"
    place: str
    """One of wire.ProcessStack's COLLECTIVE, WAITING, OUTSIDE."""
    place_s: Optional[float]
    """Seconds that the main thread has been there; None: they are not known."""
    where: str
    """The innermost frame of the user's own code."""
    chain: str
    """The main thread's calls in one line, innermost first."""
    text: str
    """The stacks of all threads, one frame a line."""


@dataclass(frozen=True)
class TakeStore:
    TYPE = "takeStore"
    generation: int


@dataclass(frozen=True)
class Observed:
    """The progress of an unmodified script's start, on a connection of its own. `group`: watched (the hook is in the process),
    entered (`init_process_group` is called) or formed (it has returned)."""

    TYPE = "observed"
    local_rank: int
    incarnation: int
    group: str


@dataclass(frozen=True)
class Stepped:
    """The optimizer steps of an unmodified script, counted by the hook in its process. It is sent at most once a second.

    `steps`: optimizer steps of this process since its start. `step_s`: mean seconds of a step since the last message; 0 in the
    first message.
    """

    TYPE = "stepped"
    local_rank: int
    incarnation: int
    steps: int
    step_s: float


@dataclass(frozen=True)
class Held:
    """Answer to `Hold`: the process has made a step, and waits in the hook."""

    TYPE = "held"
    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class CannotRun:
    """The library ends this process, and would end each one that is started after it. What it found, such as the version of torch,
    does not change while the job runs. The message has a connection of its own. `message`: one sentence."""

    TYPE = "cannotRun"
    local_rank: int
    incarnation: int
    message: str


FROM_TRAINER = codec.Registry(
    Attach,
    Entering,
    Arrived,
    FormedLocally,
    AdoptedLocally,
    Committed,
    Left,
    Snapshotted,
    FinishedLocally,
    BusyLocally,
    Stack,
    TakeStore,
    Observed,
    Stepped,
    Held,
    CannotRun,
)

# --- agent -> trainer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Answer to `Entering`, `AdoptedLocally`, and an `Attach` that rehearses: `to` is entering, adopted or rehearse."""

    TYPE = "answer"
    to: str
    generation: int
    ok: bool
    adopted: int
    """Highest generation that this agent's processes have adopted, before this one where `to` is entering."""
    message: str = ""


@dataclass(frozen=True)
class Assignment:
    """A generation as one trainer process sees it. `member` False: leave the group when it is forced, keep everything, wait."""

    TYPE = "assignment"
    number: int
    uid: str
    kind: str
    member: bool
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    pod_uid: str
    store_host: str
    store_port: int
    store_prefix: str
    hosts_store: bool
    """True for the one process (local rank 0 of the store's host) that runs the TCPStore and publishes `document`."""
    document_digest: str
    document: Optional[Document] = None
    reason: str = ""


@dataclass(frozen=True)
class Hold:
    """To the hook in an unmodified script: stop after the next optimizer step, and answer with `Held`. A planned change will end
    the process, and must not end it while it saves."""

    TYPE = "hold"


@dataclass(frozen=True)
class Go:
    """Ends `Hold`. It follows the signal that ends the process, which a handler of the script may have caught."""

    TYPE = "go"


@dataclass(frozen=True)
class PruneLocally:
    TYPE = "prune"
    keep: tuple[str, ...]


@dataclass(frozen=True)
class DumpStacksLocally:
    """Say where every thread is. Answered with `Stack`, also while the main thread is stuck."""

    TYPE = "dumpStacks"


STACK_SIGNAL = 62
"""Real-time signal for which a session registers faulthandler. That writes the Python stacks to stderr even while native code
holds the interpreter's lock, and no thread could answer `DumpStacksLocally`. It is sent to attached processes only."""


@dataclass(frozen=True)
class FinishLocally:
    """Leave the loop, or do not begin it: all steps are committed (wire.Finish). A process that holds no state continues from the
    memory snapshot or from `checkpoint`, whichever is of exactly `step`."""

    TYPE = "finish"
    generation: int
    step: int
    rank: int
    world_size: int
    checkpoint: Optional[CheckpointRef] = None


COMPLETE, DRAINED, SUSPENDED = "Complete", "Drained", "Suspended"


@dataclass(frozen=True)
class StopLocally:
    """End: `steps()` returns and the session closes, whatever the outcome. DRAINED: the agent's own word, at the end of its pod's
    grace; who writes the job's checkpoints saves what it holds first. SUSPENDED: all ranks leave after the same step, as for a
    planned generation, and save it."""

    TYPE = "stop"
    outcome: str


TO_TRAINER = codec.Registry(Answer, Assignment, Hold, Go, PruneLocally, DumpStacksLocally, FinishLocally, StopLocally)


def encode(message: Any) -> bytes:
    """Return one NDJSON line."""
    return codec.line(message)
