"""What the core hears (events) and what it asks of the edge (effects). No behaviour.

The edge executes the effects of one event in their order, before it hands in the next event: a `Persist` is on disk
before the `Tell`, `Start` or `Send` that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

from regroup.protocol import wire
from regroup.protocol.snapshot import SnapshotState

from .memory import Memory
from .observing import Watch
from .statefile import Saved

# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """The operator accepted the hello and streams commands."""


@dataclass(frozen=True)
class Disconnected:
    """The operator's stream is gone."""


@dataclass(frozen=True)
class Commanded:
    command: wire.Command


@dataclass(frozen=True)
class Paced:
    """The operator's answer to a report of progress says how often it wants them (wire.Accepted)."""

    progress_factor: float


@dataclass(frozen=True)
class FromTrainer:
    """A message of the local protocol from the process with this local rank and incarnation."""

    local_rank: int
    incarnation: int
    message: Any


@dataclass(frozen=True)
class Detached:
    """The process's session connection is closed; the process itself may still run."""

    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class Spawned:
    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class Held:
    """What a process's memory snapshot holds, read once the process has ended: its last message may have been lost."""

    local_rank: int
    snapshot: SnapshotState | None


@dataclass(frozen=True)
class Exited:
    """A process is dead and reaped. `code`: exit code, negative for a signal."""

    local_rank: int
    incarnation: int
    code: int
    last_line: str = ""
    tail: str = ""
    """Last lines of its traceback, or of what it wrote to stderr."""
    memory: Memory | None = None
    """The kernel killed a process of this container for lack of memory since the last end."""


@dataclass(frozen=True)
class Probed:
    """What the kernel says of a process that did not answer (`Probe`). `place`: see wire.ProcessStack."""

    local_rank: int
    incarnation: int
    place: str
    where: str
    text: str


@dataclass(frozen=True)
class StoreOpened:
    """The fresh listening socket for the next store has this port."""

    port: int


@dataclass(frozen=True)
class Watched:
    """What is known of a member that this agent observes has changed. `watches`: all of them, as they are now and will be."""

    watches: tuple[Watch, ...]


@dataclass(frozen=True)
class Terminated:
    """The agent got the signal that ends its container: the pod is being deleted, or `regroup run` ends."""

    waits: bool = True
    """The operator may be away for a moment only. `regroup run` does not come back."""


@dataclass(frozen=True)
class Preloaded:
    """The zygote's import is over: it forks from now on, or it has failed and processes are exec'd."""


@dataclass(frozen=True)
class Tick:
    """`Core.due_s` has come."""


Event = Union[
    Connected,
    Disconnected,
    Commanded,
    Paced,
    FromTrainer,
    Detached,
    Spawned,
    Held,
    Exited,
    Probed,
    StoreOpened,
    Watched,
    Terminated,
    Preloaded,
    Tick,
]

# --- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Report to the operator now, if it can be reached; a Fault is kept until it has been answered."""

    report: wire.Report


@dataclass(frozen=True)
class Tell:
    """Write a message of the local protocol to an attached process."""

    local_rank: int
    message: Any


@dataclass(frozen=True)
class Persist:
    saved: Saved


@dataclass(frozen=True)
class Start:
    """Start a process. `generation` None: session tier, without RANK and WORLD_SIZE."""

    local_rank: int
    incarnation: int
    generation: wire.Generation | None
    restarts: int


@dataclass(frozen=True)
class Signal:
    local_rank: int
    signum: int


@dataclass(frozen=True)
class Probe:
    """Find out from outside what a process does, which comes back as `Probed`. `attached`: it takes STACK_SIGNAL."""

    local_rank: int
    incarnation: int
    attached: bool


@dataclass(frozen=True)
class Observe:
    """Observe these members from now on, and nobody else."""

    observed: tuple[wire.Observed, ...]


@dataclass(frozen=True)
class YieldStore:
    """Close the fresh listening socket, its port is the script's now, and open another."""


@dataclass(frozen=True)
class Exit:
    """End the agent, after the reports on their way have been answered (a second at most)."""

    code: int


@dataclass(frozen=True)
class Log:
    text: str


Effect = Union[Send, Tell, Persist, Start, Signal, Probe, Observe, YieldStore, Exit, Log]
