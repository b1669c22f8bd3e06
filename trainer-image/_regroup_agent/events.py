"""Events, which the edge (`main`) hands to the core, and effects, which the core returns to it. No behaviour.

The edge executes all effects of one event, in their order, before it hands in the next event. So a `Persist` is on disk
before the `Tell`, `Start` or `Send` that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

from regroup.protocol import wire
from regroup.protocol.document import Member
from regroup.protocol.snapshot import SnapshotState

from . import statefile
from .memory import Memory
from .observing import Watch
from .script_progress import Words
from .writers import Look

# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """The operator has accepted the hello and streams commands."""


@dataclass(frozen=True)
class Disconnected:
    """The connection to the operator has ended."""


@dataclass(frozen=True)
class Commanded:
    command: wire.Command


@dataclass(frozen=True)
class Paced:
    """The operator has answered a report of progress with the factor by which reports must become rarer (wire.Answered)."""

    progress_factor: float


@dataclass(frozen=True)
class FromTrainer:
    """The process with this local rank and incarnation has sent a message of the local protocol."""

    local_rank: int
    incarnation: int
    message: Any


@dataclass(frozen=True)
class Told:
    """A script's process has said how far it is, in its lines or by a request (script_progress)."""

    local_rank: int
    incarnation: int
    way: str
    """wire.LOGGED or wire.REPORTED."""
    words: Words


@dataclass(frozen=True)
class PatternGivenUp:
    """The pattern of spec.progress.log is too slow, or none for this Python: no process will be heard in that way any more."""


@dataclass(frozen=True)
class Detached:
    """The process's session connection is closed; the process itself may still run."""

    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class Unhooked:
    """The connection of the hook in a script's process is closed. It comes back if the process goes on to make steps."""

    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class Spawned:
    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class Held:
    """The edge has read the memory snapshot of a process that ended, since the process's last message about it may be lost."""

    local_rank: int
    snapshot: SnapshotState | None


@dataclass(frozen=True)
class Exited:
    """A process is dead and reaped. `code` is its exit code, or the negative number of the signal that killed it."""

    local_rank: int
    incarnation: int
    code: int
    last_line: str = ""
    tail: str = ""
    """Last lines of the traceback, or of stderr if there is none."""
    memory: Memory | None = None
    """Memory of the container, if the kernel has killed one of its processes for lack of memory just before this exit."""


@dataclass(frozen=True)
class Probed:
    """The edge has looked at a process as `Probe` asked. `place` is one of the places of wire.ProcessStack."""

    local_rank: int
    incarnation: int
    place: str
    where: str
    text: str


@dataclass(frozen=True)
class Looked:
    """The edge has looked at the open files of the worker's processes, as `LookAtFiles` asked."""

    look: Look


@dataclass(frozen=True)
class StoreOpened:
    """The edge has opened a fresh listening socket for the next store, on this port."""

    port: int


@dataclass(frozen=True)
class PortsOpened:
    """The edge holds these ports for the processes of the next generation, one for each."""

    ports: tuple[int, ...]


@dataclass(frozen=True)
class Watched:
    """The level of a member that this agent observes has changed."""

    watches: tuple[Watch, ...]
    """Live objects of all observed members, which go on changing."""


@dataclass(frozen=True)
class Saved:
    """The script has just completed a checkpoint (`saves`)."""


@dataclass(frozen=True)
class Terminated:
    """The agent has got the signal that ends its container: the pod is being deleted, or `regroup run` ends."""

    waits: bool = True
    """A lost operator may come back. False under `regroup run`."""


@dataclass(frozen=True)
class Preloaded:
    """The zygote's import is over. It forks from now on; if the import has failed, processes are exec'd."""


@dataclass(frozen=True)
class Refused:
    """No process can train here, as the launcher's own parser has found out in the pod."""

    why: str


@dataclass(frozen=True)
class Tick:
    """The time `Core.due_s` has come."""


Event = Union[
    Connected,
    Disconnected,
    Commanded,
    Paced,
    FromTrainer,
    Told,
    PatternGivenUp,
    Detached,
    Unhooked,
    Spawned,
    Held,
    Exited,
    Probed,
    Looked,
    StoreOpened,
    PortsOpened,
    Watched,
    Saved,
    Terminated,
    Preloaded,
    Refused,
    Tick,
]

# --- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send a report to the operator if it is connected. The edge keeps a Fault until an operator has answered it."""

    report: wire.Report


@dataclass(frozen=True)
class Tell:
    """Write a message of the local protocol to an attached process."""

    local_rank: int
    message: Any


@dataclass(frozen=True)
class Persist:
    saved: statefile.Saved


@dataclass(frozen=True)
class Start:
    """Start a process. Without a generation it gets no RANK and WORLD_SIZE, as in a session."""

    local_rank: int
    incarnation: int
    generation: wire.Generation | None
    restarts: int
    members: tuple[Member, ...] = ()
    """All members of the generation; empty unless the framework lists them."""


@dataclass(frozen=True)
class Signal:
    local_rank: int
    signum: int
    alone: bool = False
    """The signal is for the script, which may have a handler, and not for its helpers. Otherwise all get it."""


@dataclass(frozen=True)
class Probe:
    """Look at a process through the kernel and answer with `Probed`. An attached process also prints stacks on STACK_SIGNAL."""

    local_rank: int
    incarnation: int
    attached: bool


@dataclass(frozen=True)
class LookAtFiles:
    """Look at the open files of all running processes and of their children, and answer with `Looked`."""


@dataclass(frozen=True)
class Observe:
    """Observe these members from now on, and no others."""

    observed: tuple[wire.Observed, ...]


@dataclass(frozen=True)
class YieldStore:
    """Close the fresh listening socket, whose port the script binds now, and open another one."""


@dataclass(frozen=True)
class YieldPorts:
    """Release the ports of `PortsOpened`, which the processes bind now, and hold others."""


@dataclass(frozen=True)
class Exit:
    """End the agent once the reports that were sent have been answered, after one second at the latest."""

    code: int


@dataclass(frozen=True)
class Log:
    text: str


Effect = Union[Send, Tell, Persist, Start, Signal, Probe, LookAtFiles, Observe, YieldStore, YieldPorts, Exit, Log]
