"""Records in which a worker speaks of itself: state pair, seal, condition.

Order and equality of states are by (generation of the last commit, step), generation first (rule STATE).
"""

from dataclasses import dataclass
from typing import NamedTuple, Optional


class StatePair(NamedTuple):
    """Name of a training state: params, optimizer and `state` after `step` commits, the last of them in `generation`.

    A job that starts from nothing in generation g has (g, 0).
    """

    generation: int
    step: int


@dataclass(frozen=True)
class Seal:
    """A promise of rule SEAL: this worker's processes have left every generation up to `left_up_to` for good."""

    left_up_to: int
    state: Optional[StatePair]
    """The newest valid state that the worker holds; None: it holds none."""
    adopted: int
    """Highest generation that the worker's processes ever adopted (the agent's file). With `state` None and
    adopted >= j this is the proof that the worker's copy of j is gone."""
    state_adopted: int = 0
    """The generation in which `state` was adopted; 0 without a state."""
    is_backup: bool = False
    """`state` is in the worker's memory snapshot only: newer steps may have been committed (rule BACKUP)."""


class Phase:
    """Values of Condition.phase."""

    IDLE = "idle"  # script tier: no process runs, and the zygote's preload is not over
    STARTING = "starting"  # processes run, not all have attached, or one rehearses
    READY = "ready"  # all attached and waiting for a generation (script tier: no process runs, one can be started)
    FORMING = "forming"  # has entered a generation, and is on its way to the others
    ARRIVED = "arrived"  # at its store, waiting for the others
    ADOPTING = "adopting"
    TRAINING = "training"
    BROKEN = "broken"  # left its group after an error; waits, with its state, for a newer generation
    FINISHED = "finished"  # session tier: the last step is committed; it waits in its loop to be told to leave it
    FINISHING = "finishing"  # it was told to leave its loop, and what follows in the script runs, or is started again
    DONE = "done"  # every process of it has returned 0
    STOPPED = "stopped"


class Group:
    """Values of Condition.group: what is known of an unmodified script's process group."""

    WAITING = "waiting"  # not every process has passed init_process_group
    FORMED = "formed"  # every process has passed init_process_group
    UNOBSERVED = "unobserved"  # its processes run, and nothing will tell whether they train


@dataclass(frozen=True)
class Times:
    """Seconds of a step on a worker, by what they go into: a mean over its last steps (regroup.transaction.laps)."""

    data: float
    forward: float
    backward: float
    device: float
    communication: float
    waits: float
    apply: float
    between: float


@dataclass(frozen=True)
class Busy:
    """Work of a trainer process that may take longer than a step: hang detection allows it a time of its own."""

    FIRST_STEP = "firstStep"  # its first step since it was started, or its rehearsal: compilation, caches that fill
    CHECKPOINT = "checkpoint"  # the script waits until a checkpoint is durable
    PAUSE = "pause"  # the script said so: job.pause(name, max_s=...)
    PARTING = "parting"  # script tier: a planned change ends its processes, which may be saving

    kind: str
    name: str = ""
    """Name of a pause."""
    max_s: Optional[float] = None
    """Seconds that it may take, as the script said; None: the operator's bound for this kind."""
    age_s: float = 0.0
    """Seconds that it had taken when this was sent."""


@dataclass(frozen=True)
class Condition:
    """The condition of a worker's trainer processes, re-said in every report (rule RESAY)."""

    incarnation: int
    generation: int
    """The generation that `phase` speaks of; 0: none yet."""
    phase: str
    step: int = 0
    heard: int = 0
    """Highest generation that the agent has heard."""
    entered: int = 0
    """Highest generation that any process of this worker has entered (kept over container restarts)."""
    adopted: int = 0
    """Highest generation that any process of this worker has adopted (kept over container restarts)."""
    session: bool = False
    """True if the script is known to use the library (tier Session): its text imports it, or a process has attached."""
    cause: Optional[str] = None
    """One sentence: why broken."""
    busy: tuple[Busy, ...] = ()
    """Work of its processes that may take longer than a step; equal ones once."""
    group: Optional[str] = None
    """Script tier: one of Group. None: a session."""
