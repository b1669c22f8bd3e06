"""How the processes are ended for good: told, then SIGTERM, then SIGKILL, each by its time. Pure.

Two reasons end a worker: the operator's `stop`, after which the agent exits 0 (the kubelet would start it again
otherwise), and SIGTERM to the agent, after which it goes on training until `stop` comes or the pod's grace is nearly over.
Then nobody may have its state: who writes the job's checkpoints saves what it holds before it exits.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from regroup.protocol.local import SUSPENDED

from .memory import OOM_KILLED, Memory, out_of_memory

AFTER_STOP_S = 10.0
"""A session's time to close after `stop`, before SIGTERM."""
AFTER_SUSPEND_S = 300.0
"""The same after stop{Suspended}: the step in flight ends, and a checkpoint is written."""
AFTER_TERM_S = 5.0
DRAIN_MARGIN_S = 5.0
"""A draining agent ends its processes this long before its grace is over; of a short grace, two fifths."""
SAVING_SHARE = 0.2
"""Where the script writes checkpoints, at least this share of the grace is left for the last one."""
UNKILLABLE_S = 30.0
"""A process that is not dead this long after SIGKILL hangs in the kernel (a volume, a device): the agent exits without it."""
MAX_RESTART_DELAY_S = 8.0
"""A generation waits 20 s for its members (settings.formTimeoutSeconds): a delay beyond that, less the script's own start, would
cost one after the other."""
DRAINED_CODE = 128 + signal.SIGTERM


@dataclass
class Ending:
    code: int
    term_at_s: float
    kill_at_s: float
    outcome: str = "Released"
    draining: bool = False
    """The pod is being deleted, and no stop has come."""
    waits: bool = True
    """The operator that is asked may be away for a moment only (ev.Terminated)."""
    leave_at_s: float | None = None
    """Until then the processes train on. Those that are attached are then told to leave."""
    told: bool = False
    termed: bool = False
    killed: bool = False

    def signal_due(self, now_s: float) -> int | None:
        """Return the signal that the remaining processes get now, once each."""
        if now_s >= self.kill_at_s and not self.killed:
            self.killed = self.termed = True
            return signal.SIGKILL
        if now_s >= self.term_at_s and not self.termed:
            self.termed = True
            return signal.SIGTERM
        return None

    def is_leaving_due(self, now_s: float) -> bool:
        """Return whether the processes are to be told now, once."""
        due = self.leave_at_s is not None and now_s >= self.leave_at_s and not self.told
        self.told = self.told or due
        return due

    @property
    def trains_on(self) -> bool:
        """True while the processes of a pod that is being deleted train: an end by itself is a fault then, too."""
        return self.draining and not self.told

    @property
    def given_up_at_s(self) -> float:
        """When a process that SIGKILL does not end is waited for no longer."""
        return self.kill_at_s + UNKILLABLE_S

    @property
    def due_s(self) -> float | None:
        """When something is to be done next, or the agent gives up."""
        if self.killed:
            return self.given_up_at_s
        if self.leave_at_s is not None and not self.told:
            return self.leave_at_s
        return self.kill_at_s if self.termed else self.term_at_s


def after_stop(outcome: str, any_session: bool, before: Ending | None, now_s: float) -> Ending:
    """Return the plan for the operator's `stop`; one made for a draining pod keeps its last moment."""
    after_s = AFTER_SUSPEND_S if outcome == SUSPENDED else AFTER_STOP_S
    wait_s = after_s if any_session else 0.0
    term_at_s, kill_at_s = now_s + wait_s, now_s + wait_s + AFTER_TERM_S
    if before is not None and before.draining:
        term_at_s, kill_at_s = min(term_at_s, before.term_at_s), min(kill_at_s, before.kill_at_s)
    return Ending(0, term_at_s, kill_at_s, outcome)


def after_sigterm(connected: bool, holds: bool, grace_s: float, now_s: float, *, saves: bool = False) -> Ending:
    """Return the plan for a pod that is being deleted. `holds`: a process holds the job's state, perhaps the only one, and trains
    on while an operator that is away may come back. Nobody and nothing to wait for: the processes are ended at once. `saves`: the
    script writes checkpoints."""
    if not connected and not holds:
        return Ending(DRAINED_CODE, now_s, now_s + AFTER_TERM_S)
    margin_s = max(min(DRAIN_MARGIN_S, 0.4 * grace_s), SAVING_SHARE * grace_s if saves else 0.0)
    end_s = now_s + grace_s - margin_s
    return Ending(DRAINED_CODE, end_s + margin_s * 0.75, end_s + margin_s * 0.8, draining=True, leave_at_s=end_s)


def restart_delay_s(crashes: int) -> float:
    """Return how long the n-th restart without a committed step in between waits: 0, 1, 2, 4, 8, 8 .. s."""
    return 0.0 if crashes <= 1 else min(2.0 ** min(10, crashes - 2), MAX_RESTART_DELAY_S)


def unkillable_sentence(ranks: list[int]) -> str:
    """Return one sentence for processes that SIGKILL does not end."""
    which = ", ".join(map(str, ranks))
    return (
        f"Process {which} is not dead {UNKILLABLE_S:.0f} s after SIGKILL: it hangs in the kernel, most likely on a volume "
        "or a device of its node. The agent exits, so that another pod takes its place."
    )


def blamed_memory(code: int, memory: Memory | None) -> Memory | None:
    """Return `memory` where a kill for lack of memory explains the exit: of the process itself (SIGKILL), or of a helper of it,
    after which it fails. Another signal has another sender."""
    return memory if code > 0 or code == -signal.SIGKILL else None


def exit_sentence(local_rank: int, code: int, memory: Memory | None = None) -> str:
    """Return one sentence for the end of a process: exit code, or negative signal number. `memory` is given if a process of
    the container was killed for lack of memory."""
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
