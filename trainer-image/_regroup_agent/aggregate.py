"""p processes of one worker -> its one Condition and Seal. Pure; the table is tests/unit/agent/test_aggregate.py.

A worker is a unit of membership: one lost process costs the worker its generation, never its siblings their state.
So the phase is the least advanced of its processes, and the state is the newest that any of them holds.
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
    """One trainer process, or the place of the one that will be started next. Generations: 0 is none."""

    local_rank: int
    incarnation: int = 0
    floor: int = 0
    """It never enters a generation at or below it (rule INC): the worker's highest entered when it was started."""
    running: bool = False
    """From the decision to start it until it is reaped."""
    spawned: bool = False
    attached: bool = False
    """It waits for a generation, or is in one. False while it rehearses."""
    launched: int = 0
    """Generation whose RANK and WORLD_SIZE it was started with; 0: started without."""
    handed: int = 0
    """Newest generation that it has an assignment of."""
    entered: int = 0
    """Highest generation that it has entered itself."""
    inside: int = 0
    """Generation that it has entered and not left."""
    left: int = 0
    """It has left every generation up to this one for good."""
    arrived: int = 0
    """Newest generation at whose store it has arrived."""
    formed: int = 0
    adopted: int = 0
    finished: int = 0
    """Generation in which it said that the last step is committed."""
    step: int = 0
    state: StatePair | None = None
    state_adopted: int = 0
    broken: str | None = None
    """Why it left its last group, where that was an error."""
    computed: bool = False
    """It has committed a step with a share that was not empty since it was started."""
    busy: Busy | None = None
    """What it does that may take longer than a step, as it said; `busy_since_s` is when that was."""
    busy_since_s: float = 0.0
    first_step_since_s: float | None = None
    """When it began to rehearse, or adopted the generation in which its first step is; None: neither, or it has committed
    since."""
    hung: str | None = None
    """Why it is being killed: it hangs."""
    cannot_run: str = ""
    """Why the library ends it, and each process after it (local.CannotRun); empty: it does not."""
    let_go: bool = False
    """It was told to leave its loop (local.FinishLocally)."""
    runs_again: bool = False
    """It is being killed because all members run their end again."""
    done: bool = False
    """It has returned 0 by itself: a session's after its last step."""
    observed: str = ""
    """Script tier: what the hook in it said last (local.Observed.group); empty: nothing, it may have no hook."""
    start_at_s: float | None = None
    """When the next process of this local rank is to be started."""

    def may_enter(self, generation: int) -> bool:
        """Return whether rule INC lets this process form the generation."""
        return generation > max(self.floor, self.left, self.entered)


@dataclass(frozen=True)
class Facts:
    """What the worker knows beside its processes."""

    saved: Saved
    heard: int = 0
    refused: int = 0
    """No process will enter this generation or one below, whatever it has entered and left (rule HEARD)."""
    tier: str = UNKNOWN_TIER
    session: bool = False
    """The script is known to use the library."""
    finish: int = 0
    """The generation whose end the operator has told (wire.Finish); 0: none."""
    stopped: bool = False
    replacing: bool = False
    """Script tier: processes are being ended because a newer generation wants new ones."""
    preloading: bool = False
    """The zygote imports: processes that were started now would not be faster than it."""
    unobserved: bool = False
    """Script tier: its processes have run for so long that init_process_group is not waited for any more."""
    cause: str | None = None
    """Script tier: why the last processes ended."""
    step: int = 0
    """Newest step reported as progress in the current generation."""
    now_s: float = 0.0
    snapshot: SnapshotState | None = None
    """What the worker's memory snapshot holds: it outlives its processes."""


def condition(processes: Sequence[Process], facts: Facts) -> Condition:
    """Return the worker's condition. `generation` is, by phase: forming to finished, the one that the processes are in;
    broken, the one that broke; starting and ready, 0 in a session, else the one whose environment the processes have."""
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
        busy=busy(processes, facts.now_s),
        group=None if by_session else group(processes, facts),
    )


def busy(processes: Sequence[Process], now_s: float) -> tuple[Busy, ...]:
    """Return what the processes do that may take longer than a step: of equal ones the one that began last."""
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


def group(processes: Sequence[Process], facts: Facts) -> str:
    """Return what is known of the process group of a script's processes."""
    if facts.replacing or facts.cause is not None or not all(p.running or p.done for p in processes):
        return Group.WAITING
    if all(p.done or p.observed == "formed" for p in processes):
        return Group.FORMED
    return Group.UNOBSERVED if facts.unobserved else Group.WAITING


def seal(processes: Sequence[Process], facts: Facts) -> Seal | None:
    """Return the worker's seal, or None while any process is in a group or the state file's loss is not settled yet.

    It covers every generation that the agent would refuse to enter (rule HEARD), not only those that were entered: of a
    generation that was announced and never entered, nobody else can say that it cannot have trained. The promise is
    kept by the core: once sent, no process of this worker enters `left_up_to` or below, after a container restart either.
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
    """Return the newest state that the worker holds, where it was adopted, and whether nothing but a backup is held."""
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
        # A worker with a restarted process has its fault behind it: all waiting is what `ready` means for it.
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
