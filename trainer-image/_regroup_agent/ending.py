"""The end of a worker's processes: a word to attached ones, then SIGTERM, then SIGKILL, each at its time. Pure.

A worker ends for one of two reasons. After the operator's `stop` the agent exits with 0; the kubelet would start it again after
another code. After SIGTERM to the agent the pod is draining: training goes on until `stop` comes or the grace is nearly
over. The process that writes the job's checkpoints then saves its state before it exits, since nobody else may have it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from regroup.protocol import env
from regroup.protocol.local import SUSPENDED

from .memory import OOM_KILLED, Memory, out_of_memory

AFTER_STOP_S = 10.0
"""Time between `stop` and SIGTERM, in which a session closes."""
AFTER_SUSPEND_S = 300.0
"""Time between stop{Suspended} and SIGTERM, in which the step in flight ends and a checkpoint is written."""
AFTER_TERM_S = 5.0
DRAIN_MARGIN_S = 5.0
"""A draining agent ends its processes this long before the grace is over, or after three fifths of a short grace."""
SAVING_SHARE = 0.2
"""At least this share of the grace is left for the last checkpoint, if the script writes any."""
UNKILLABLE_S = 30.0
"""A process that is not dead this long after SIGKILL hangs in the kernel (a volume, a device). The agent exits without it."""
MAX_RESTART_DELAY_S = 8.0
"""A generation waits 20 s for its members (settings.formTimeoutSeconds). The delay and the script's start must fit into that,
or each generation would fail for lack of this worker."""
DRAINED_CODE = 128 + signal.SIGTERM


SCRIPT_SHARE = 0.6
"""The largest part of the grace that is left for the planned end of a script, and for what it does after SIGTERM."""
SCRIPT_TERM_S = 3.0
"""A script in a pod that is deleted has so long from SIGTERM to SIGKILL, or a fifth of a short margin."""


@dataclass(frozen=True)
class Terms:
    """The end of a script's processes in a planned change, as spec.recovery.gracefulStop has it."""

    seconds: float = 60.0
    """Longest time between the begin of a planned end and SIGTERM. Saving some gigabytes takes 10 to 60 s."""
    signum: int | None = None
    """Signal by which a script is told to end by itself; None: it is not told, and its processes hold."""

    @staticmethod
    def of(environ: Mapping[str, str]) -> Terms:
        """Return the terms that the pod's environment names. A value that cannot be read counts as absent."""
        try:
            seconds = float(environ.get(env.STOP_SECONDS) or Terms.seconds)
        except ValueError:
            seconds = Terms.seconds
        signum = getattr(signal, environ.get(env.STOP_SIGNAL) or "", None)
        usable = isinstance(signum, signal.Signals)
        return Terms(seconds if math.isfinite(seconds) else Terms.seconds, int(signum) if usable and signum else None)


@dataclass
class Ending:
    code: int
    term_at_s: float
    kill_at_s: float
    outcome: str = "Released"
    draining: bool = False
    """The pod is being deleted, and `stop` has not come."""
    waits: bool = True
    """A lost operator may come back (ev.Terminated)."""
    leave_at_s: float | None = None
    """Time until which the processes of a draining pod train on. Attached ones are then told to leave."""
    told: bool = False
    termed: bool = False
    killed: bool = False

    def signal_due(self, now_s: float) -> int | None:
        """Return the signal to send to all running processes now, or None. Each signal is returned once."""
        if now_s >= self.kill_at_s and not self.killed:
            self.killed = self.termed = True
            return signal.SIGKILL
        if now_s >= self.term_at_s and not self.termed:
            self.termed = True
            return signal.SIGTERM
        return None

    def is_leaving_due(self, now_s: float) -> bool:
        """Return whether the attached processes must be told to leave now. True only once."""
        due = self.leave_at_s is not None and now_s >= self.leave_at_s and not self.told
        self.told = self.told or due
        return due

    def leave_by(self, now_s: float) -> None:
        """Have the processes of a draining pod leave now, if they still train."""
        if self.trains_on and self.leave_at_s is not None:
            self.leave_at_s = min(self.leave_at_s, now_s)

    def hasten(self, now_s: float) -> None:
        """Make SIGTERM due now, because the planned end of a script is over. A draining pod keeps its time until SIGKILL."""
        self.term_at_s = now_s
        if not self.draining:
            self.kill_at_s = min(self.kill_at_s, now_s + AFTER_TERM_S)

    @property
    def trains_on(self) -> bool:
        """True while the processes of a draining pod train. A process that exits meanwhile is a fault as at any other time."""
        return self.draining and not self.told

    @property
    def given_up_at_s(self) -> float:
        """Time at which the agent exits although SIGKILL has not ended a process."""
        return self.kill_at_s + UNKILLABLE_S

    @property
    def due_s(self) -> float | None:
        """Time of the next word or signal, or that at which the agent gives up."""
        if self.killed:
            return self.given_up_at_s
        if self.leave_at_s is not None and not self.told:
            return self.leave_at_s
        return self.kill_at_s if self.termed else self.term_at_s


def after_stop(
    outcome: str, any_session: bool, before: Ending | None, now_s: float, *, script_s: float = 0.0
) -> Ending:
    """Return the plan after the operator's `stop`. If the pod was draining (`before`), its deadlines stay.

    A session gets time to close, if a process is attached (`any_session`). `script_s` is the longest planned end of a script.
    """
    after_s = AFTER_SUSPEND_S if outcome == SUSPENDED else AFTER_STOP_S
    wait_s = after_s if any_session else script_s
    term_at_s, kill_at_s = now_s + wait_s, now_s + wait_s + AFTER_TERM_S
    if before is not None and before.draining:
        term_at_s, kill_at_s = min(term_at_s, before.term_at_s), min(kill_at_s, before.kill_at_s)
    return Ending(0, term_at_s, kill_at_s, outcome)


def after_sigterm(
    connected: bool, holds: bool, grace_s: float, now_s: float, *, saves: bool = False, script_s: float = 0.0
) -> Ending:
    """Return the plan for a pod that is being deleted.

    Processes train on until the grace is nearly over if the operator is `connected`, or if one `holds` a state that perhaps nobody
    else has. Otherwise they are ended at once. `saves`: the script writes checkpoints, which takes longer. `script_s` is the
    longest planned end of a script, for which a part of the grace is left; 0: the processes are a session's.
    """
    script_s = min(script_s, SCRIPT_SHARE * grace_s)
    if not connected and not holds:
        term_at_s = now_s + script_s
        leave_at_s = now_s if script_s else None
        return Ending(DRAINED_CODE, term_at_s, term_at_s + AFTER_TERM_S, draining=bool(script_s), leave_at_s=leave_at_s)
    margin_s = max(min(DRAIN_MARGIN_S, 0.4 * grace_s), SAVING_SHARE * grace_s if saves else 0.0, script_s)
    end_s = now_s + grace_s - margin_s
    term_s, kill_s = margin_s * 0.75, margin_s * 0.8
    if script_s:
        term_s, kill_s = margin_s - min(SCRIPT_TERM_S, 0.2 * margin_s), margin_s
    return Ending(DRAINED_CODE, end_s + term_s, end_s + kill_s, draining=True, leave_at_s=end_s)


def restart_delay_s(crashes: int) -> float:
    """Return the delay of the restart after so many crashes without a committed step: 0, 1, 2, 4, 8, 8 ... seconds."""
    return 0.0 if crashes <= 1 else min(2.0 ** min(10, crashes - 2), MAX_RESTART_DELAY_S)


def unkillable_sentence(ranks: list[int]) -> str:
    """Return the sentence about the processes of these local ranks, which SIGKILL has not ended."""
    which = ", ".join(map(str, ranks))
    return (
        f"Process {which} is not dead {UNKILLABLE_S:.0f} s after SIGKILL: it hangs in the kernel, most likely on a volume "
        "or a device of its node. The agent exits, so that another pod takes its place."
    )


def blamed_memory(code: int, memory: Memory | None) -> Memory | None:
    """Return `memory` if a kill for lack of memory explains this exit code, else None.

    The kernel kills the process itself (SIGKILL), or one of its helpers, after which it fails with a positive code.
    Other signals have other senders.
    """
    return memory if code > 0 or code == -signal.SIGKILL else None


def exit_sentence(local_rank: int, code: int, memory: Memory | None = None) -> str:
    """Return the sentence about the end of a process.

    `code` is its exit code, or the negative number of a signal. `memory` is given if the kernel has killed a process of the
    container for lack of memory.
    """
    memory = blamed_memory(code, memory)
    if memory is not None and code < 0:
        return f"Process {local_rank} was killed for lack of memory ({OOM_KILLED}: {out_of_memory(memory)})."
    if memory is not None:
        return (
            f"Process {local_rank} ended with exit code {code} after a process that it had started was killed for lack of "
            f"memory ({OOM_KILLED}: {out_of_memory(memory)})."
        )
    if code == 0:
        return f"Process {local_rank} ended (exit code 0) without finishing its steps."
    if code > 0:
        return f"Process {local_rank} ended with exit code {code}."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"Process {local_rank} was ended by {name}."
