"""Makes one Condition and one Seal of all processes of a worker. Pure; the table is tests/unit/agent/test_aggregate.py.

Membership counts workers: if one process is lost, its worker leaves the generation, and the sibling processes keep their state.
So the worker's phase is that of its least advanced process, and its state is the newest that any process holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import Busy, Condition, Group, Phase, Seal, StatePair

from .statefile import UNKNOWN, Saved

SESSION, SCRIPT, UNKNOWN_TIER = "Session", "Script", "Unknown"
"""Values of wire.Welcome.tier."""


@dataclass
class Process:
    """One trainer process, or the place of the next one with this local rank. A generation of 0 means none."""

    local_rank: int
    incarnation: int = 0
    floor: int = 0
    """The process enters only generations above this one (rule INC). It is the worker's highest entered one at the start."""
    running: bool = False
    """True from the decision to start the process until it is reaped."""
    spawned: bool = False
    attached: bool = False
    """True while the session's process waits for a generation or is in one. False while it rehearses."""
    launched: int = 0
    """Generation whose RANK and WORLD_SIZE the process was started with; 0: it was started without them."""
    handed: int = 0
    """Newest generation of which the process was given an assignment."""
    entered: int = 0
    """Highest generation that this process has entered."""
    inside: int = 0
    """Generation that the process has entered and not left."""
    left: int = 0
    """The process has left every generation up to this one for good."""
    arrived: int = 0
    """Newest generation at whose store the process has arrived."""
    formed: int = 0
    adopted: int = 0
    finished: int = 0
    """Generation in which the process said that the last step is committed."""
    step: int = 0
    state: StatePair | None = None
    state_adopted: int = 0
    broken: str | None = None
    """Error with which the process left its last group; None: it left without one."""
    computed: bool = False
    """True once this process has committed a step in which it had a microbatch."""
    busy: Busy | None = None
    """Activity that may take longer than a step, as the process announced it at `busy_since_s`."""
    busy_since_s: float = 0.0
    first_step_since_s: float | None = None
    """Start of the process's first step or of its rehearsal. None once a step is committed."""
    hung: str | None = None
    """Reason for which the agent kills the process because it hangs."""
    cannot_run: str = ""
    """The library's reason why no process of this job can run (local.CannotRun); empty: there is none."""
    let_go: bool = False
    """The agent has told the process to leave its loop (local.FinishLocally)."""
    runs_again: bool = False
    """The agent kills the process because all members run their end again."""
    done: bool = False
    """The process has returned 0 by itself; in a session that was after the last step."""
    observed: str = ""
    """Last word of the hook in a script's process (local.Observed.group); empty: the hook is silent or missing."""
    step_s: float | None = None
    """Mean seconds of an optimizer step, as the hook in a script's process reports; None: it has reported no step."""
    asked: bool = False
    """The process was asked to hold after its next step (planned_end.py)."""
    held: bool = False
    """The process holds."""
    start_at_s: float | None = None
    """Time at which the next process of this local rank starts."""

    def may_enter(self, generation: int) -> bool:
        """Return whether rule INC lets this process form the generation."""
        return generation > max(self.floor, self.left, self.entered)


@dataclass(frozen=True)
class Facts:
    """State of the worker beside its processes, which `condition` and `seal` need as well."""

    saved: Saved
    heard: int = 0
    refused: int = 0
    """The worker's processes refuse to enter this generation and all below it (rule HEARD)."""
    tier: str = UNKNOWN_TIER
    session: bool = False
    """The script is known to use the library."""
    finish: int = 0
    """Generation in which the job's steps ended, by the operator's word (wire.Finish); 0: they have not."""
    stopped: bool = False
    replacing: bool = False
    """The agent ends a script's processes because a newer generation needs new ones."""
    preloading: bool = False
    """The zygote is still importing. The worker is not ready, since a process would have to import the same modules."""
    unobserved: bool = False
    """A script's processes have run so long without a word of the hook that they count as training."""
    cause: str | None = None
    """Reason why a script's last processes ended."""
    step: int = 0
    """Newest step reported as progress in the current generation."""
    now_s: float = 0.0
    parting: tuple[float, float] | None = None
    """Begin of the planned end of a script's processes, and the seconds that it may take."""
    snapshot: SnapshotState | None = None
    """State in the worker's memory snapshot, which outlives its processes."""


def condition(processes: Sequence[Process], facts: Facts) -> Condition:
    """Return the worker's condition, which every report to the operator carries.

    The phase decides which generation the condition names:

    - forming to finished: the generation that the processes are in
    - broken: the generation that broke
    - starting and ready: 0 in a session; of a script the generation whose environment the processes have
    """
    by_session = facts.session or facts.tier == SESSION
    phase, generation, cause = (_session_phase if by_session else _script_phase)(processes, facts)
    if facts.stopped:
        phase, cause = Phase.STOPPED, facts.cause
    state = _newest(processes, facts.snapshot)[0]
    in_group = phase in (Phase.TRAINING, Phase.FINISHED, Phase.FINISHING, Phase.DONE)
    return Condition(
        incarnation=facts.saved.incarnation,
        generation=generation,
        phase=phase,
        step=facts.step if in_group else (state.step if state else 0),
        heard=facts.heard,
        entered=facts.saved.entered,
        adopted=facts.saved.adopted,
        session=facts.session,
        cause=cause,
        busy=(*busy(processes, facts.now_s), *_parting(facts)),
        group=None if by_session else group(processes, facts),
    )


def busy(processes: Sequence[Process], now_s: float) -> tuple[Busy, ...]:
    """Return the activities that may take longer than a step, each once and with its age.

    If several processes do the same, the one that began last counts: the operator's bound holds for each process.
    """
    youngest: dict[Busy, float] = {}
    for p in processes:
        if not p.running or p.hung is not None:
            continue
        said, since_s = p.busy, p.busy_since_s
        if said is None and p.first_step_since_s is not None:
            said, since_s = Busy(Busy.FIRST_STEP), p.first_step_since_s
        if said is not None:
            youngest[said] = max(since_s, youngest.get(said, since_s))
    return tuple(replace(said, age_s=round(max(0.0, now_s - since_s), 3)) for said, since_s in youngest.items())


def _parting(facts: Facts) -> tuple[Busy, ...]:
    """Return the planned end of a script's processes, for which the operator waits longer for the next generation."""
    if facts.parting is None:
        return ()
    began_s, max_s = facts.parting
    return (Busy(Busy.PARTING, max_s=max_s, age_s=round(max(0.0, facts.now_s - began_s), 3)),)


def group(processes: Sequence[Process], facts: Facts) -> str:
    """Return whether a script's processes have formed their process group, as far as their hooks have told.

    In a planned end they keep it: they train until their files are complete (planned_end.py).
    """
    if (
        (facts.replacing and facts.parting is None)
        or facts.cause is not None
        or not all(p.running or p.done for p in processes)
    ):
        return Group.WAITING
    if all(p.done or p.observed == "formed" for p in processes):
        return Group.FORMED
    return Group.UNOBSERVED if facts.unobserved else Group.WAITING


def seal(processes: Sequence[Process], facts: Facts) -> Seal | None:
    """Return the worker's seal: its promise never to enter `left_up_to` or a generation below it.

    None while a process is in a group, and while a lost state file waits for the operator's welcome. The seal covers every
    generation that the agent would refuse to enter (rule HEARD), entered or not. Only this worker can say that a
    generation which it never entered has not trained. The core keeps the promise, after a container restart as well.
    """
    by_session = facts.session or facts.tier == SESSION
    if facts.saved.entered == UNKNOWN:
        return None
    if any(p.inside or (p.launched and p.running and not by_session) for p in processes):
        return None
    entered = facts.saved.entered
    left = min((max(p.floor, p.left) if p.running else entered) for p in processes)
    state, state_adopted, is_backup = _newest(processes, facts.snapshot)
    return Seal(
        left_up_to=max(entered, left, facts.refused),
        state=state,
        adopted=facts.saved.adopted,
        state_adopted=state_adopted,
        is_backup=is_backup,
    )


def _newest(processes: Sequence[Process], snapshot: SnapshotState | None) -> tuple[StatePair | None, int, bool]:
    """Return the newest state that the worker holds, the generation that adopted it, and whether it is only a backup.

    A backup is a memory snapshot that is newer than every live state.
    """
    live = [(p.state, p.state_adopted) for p in processes if p.state is not None]
    if snapshot is not None and snapshot.is_last:
        live.append((snapshot.state, snapshot.adopted))
    held = live if snapshot is None else [*live, (snapshot.state, snapshot.adopted)]
    if not held:
        return None, 0, False
    state, adopted = max(held)
    return state, adopted, all(other < adopted for _, other in live)


def _session_phase(processes: Sequence[Process], facts: Facts) -> tuple[str, int, str | None]:
    entered = 0 if facts.saved.entered == UNKNOWN else facts.saved.entered
    if all(p.done for p in processes):
        return Phase.DONE, facts.saved.finished, None
    if facts.finish:
        return Phase.FINISHING, facts.finish, None
    finished = {p.finished for p in processes}
    if 0 not in finished and len(finished) == 1 and not any(p.inside > p.finished for p in processes):
        return Phase.FINISHED, finished.pop(), None
    if any(not p.attached for p in processes):
        return Phase.STARTING, 0, None
    newest = max(p.inside for p in processes)
    if newest == 0:
        # A worker with a restarted process has reported its fault. It is ready once all its processes wait.
        restarted = any(p.left == 0 and p.floor >= entered > 0 for p in processes)
        broken = [p for p in processes if p.broken is not None]
        if broken and not restarted:
            return Phase.BROKEN, max(p.left for p in broken), broken[0].broken
        return Phase.READY, 0, None
    outside = [p for p in processes if p.inside != newest]
    for p in outside:
        if not p.may_enter(newest):
            cause = p.broken or f"Process {p.local_rank} was restarted and waits for a newer generation."
            return Phase.BROKEN, newest, cause
    if outside or any(p.arrived < newest for p in processes):
        return Phase.FORMING, newest, None
    if any(p.formed < newest for p in processes):
        return Phase.ARRIVED, newest, None
    if any(p.adopted < newest for p in processes):
        return Phase.ADOPTING, newest, None
    return Phase.TRAINING, newest, None


def _script_phase(processes: Sequence[Process], facts: Facts) -> tuple[str, int, str | None]:
    launched = max(p.launched for p in processes)
    running = [p for p in processes if p.running]
    if running and facts.replacing:
        return Phase.STARTING, launched, facts.cause
    if running and facts.cause is not None:
        return Phase.BROKEN, launched, facts.cause
    if all(p.done for p in processes):
        return Phase.DONE, facts.saved.finished, None
    if not running:
        return Phase.IDLE if facts.preloading else Phase.READY, launched, facts.cause
    if facts.tier == SCRIPT and all(p.spawned or p.done for p in processes):
        return Phase.TRAINING, launched, None
    return Phase.STARTING, launched, None
