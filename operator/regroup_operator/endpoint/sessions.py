"""What a report does to a session. Pure (rules FENCE and RESAY); the caller has authenticated the pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regroup.protocol.state import Busy, Condition, Phase
from regroup.protocol.wire import (
    CANNOT_RUN,
    SILENT_S,
    Adopted,
    Draining,
    Fault,
    Formed,
    Hello,
    Progress,
    Report,
    Stacks,
)
from regroup_operator.model.records import ProcessExit, Session, Silence

MAX_EXITS = 32
MAX_UNHEARD = 64
MAX_TAIL = 1500
MAX_LINE = 500
"""Characters that are kept of what a process or a trainer said last."""
FAULT_REASONS = ("OOMKilled", CANNOT_RUN)
"""What a fault's `reason` may say: it becomes the cause of an incident, a word for programs."""
MAX_AGE_S = 30 * 86400.0
"""No agent speaks of anything older. Times are computed from ages, and beyond some years there is no date."""
RESENT_WITHIN_S = 1.0
"""A fault that is sent again (its answer was lost) is dated by its age; this far apart it is still the same one."""


def apply_report(session: Session | None, report: Report, now_s: float) -> Session | None:
    """Return the session after the report, or None if it is dropped: of another agent process than the one that said
    hello last, of an older incarnation, or of a generation older than what the agent has said since (a delayed message
    of a fenced generation)."""
    condition = report.condition
    before = session.condition if session is not None else condition
    if session is not None and report.boot != session.boot:
        if not isinstance(report.body, Hello) or condition.incarnation < before.incarnation:
            return None
        session = _new_boot(session, report, now_s)
    elif session is None:
        session = Session(
            pod_uid=report.pod_uid,
            boot=report.boot,
            connected=False,
            condition=condition,
            condition_at_s=now_s,
            heard_at_s=now_s,
        )
    elif _older(session, report):
        return None
    moved = (before.phase, before.generation, before.incarnation) != (
        condition.phase,
        condition.generation,
        condition.incarnation,
    )
    session = replace(
        session,
        boot=report.boot,
        condition=condition,
        condition_at_s=now_s if moved else session.condition_at_s,
        heard_at_s=now_s,
        start_s=now_s - session.condition_at_s if _started(before, condition) else session.start_s,
        busy_since_s=tuple(now_s - _age_s(busy.age_s) for busy in condition.busy),
        busy_ended_s=now_s if _ended(before.busy, condition.busy) else session.busy_ended_s,
        seal=report.seal,
        store_port=report.store_port,
        unanswered_since_s=None,
        observed_port=report.observed_port,
        unheard=tuple(
            Silence(one.pod_uid, now_s - age_s, age_s)
            for one in report.unheard[:MAX_UNHEARD]
            for age_s in (_age_s(one.age_s),)
        ),
    )
    return _apply_body(session, report, now_s)


_TEXTS = ("checkpoint_problem", "snapshot_problem", "checkpoints_late", "snapshots_late")
"""Sentences in a report of progress that come to stand in the status."""


def is_routine(before: Session | None, after: Session, report: Report) -> bool:
    """Return whether a report says only how far training is: nobody asked for it, and nothing else has changed."""
    if before is None or not isinstance(report.body, Progress) or report.body.first_step_ms is not None:
        return False
    return (
        before.connected
        and before.unanswered_since_s is None
        and before.progress_generation == after.progress_generation
        and _saved(before.progress) == _saved(after.progress)
        and _standing(before) == _standing(after)
    )


def _saved(progress: Progress | None) -> object:
    """Return what is known of checkpoints: a new one is named in the status at once, and older ones may be deleted then."""
    if progress is None:
        return None
    late = progress.checkpoints_late, progress.snapshots_late
    return progress.checkpoint, progress.checkpoint_problem, progress.snapshot_problem, late


def _standing(session: Session) -> object:
    """Return what a decision may depend on of what every report says again: all but the step and ages."""
    condition = replace(session.condition, step=0, busy=())
    busy = [(busy.kind, busy.name) for busy in session.condition.busy]
    unheard = [(one.pod_uid, one.age_s >= SILENT_S) for one in session.unheard]
    return condition, busy, session.seal, session.store_port, session.draining, session.observed_port, unheard


def _age_s(seconds: float) -> float:
    """Return an age as it can be: not of the future, and not older than anything."""
    return min(max(0.0, seconds), MAX_AGE_S)


def _started(before: Condition, now: Condition) -> bool:
    """Return whether all of a worker's processes have attached with this report."""
    return before.phase == Phase.STARTING and now.phase not in (Phase.STARTING, Phase.STOPPED) and now.session


def _ended(before: tuple[Busy, ...], now: tuple[Busy, ...]) -> bool:
    """Return whether something that may take longer than a step is over."""
    return bool({(busy.kind, busy.name) for busy in before} - {(busy.kind, busy.name) for busy in now})


def _new_boot(session: Session, report: Report, now_s: float) -> Session:
    """Return the session for another agent process in the same pod: its container was started again. What the old one
    had heard, was about to do and was told is gone; what the processes did is not."""
    return replace(
        session,
        boot=report.boot,
        condition=report.condition,
        rebooted_at_s=now_s,
        draining=None,
        fault=None,
        fault_generation=0,
        fault_at_s=None,
        told_generation=0,
        told_finish=0,
        told_tier="",
        told_outcome="",
    )


def _older(session: Session, report: Report) -> bool:
    old, new = session.condition, report.condition
    return new.incarnation < old.incarnation or (
        new.incarnation == old.incarnation and (new.heard < old.heard or new.entered < old.entered)
    )


def _apply_body(session: Session, report: Report, now_s: float) -> Session:
    body, generation = report.body, report.condition.generation
    if isinstance(body, Formed):
        return replace(session, formed=body, formed_generation=generation)
    if isinstance(body, Adopted):
        return replace(session, adopted=body, adopted_generation=generation)
    if isinstance(body, Progress):
        same = session.progress is not None and session.progress_generation == generation
        first = session.first_progress if same else None
        if body.first_step_ms is not None:
            first = body
        # The same step said again (after `progress?`, after a reconnect) is no sign of life.
        moved = not same or session.progress is None or body.step > session.progress.step
        at_s = now_s - _age_s(body.age_ms / 1000)
        texts: dict[str, Any] = {name: _clean(text) for name in _TEXTS if (text := getattr(body, name)) is not None}
        if texts:  # only the workers that save have any
            body = replace(body, **texts)
        return replace(
            session,
            progress=body,
            progress_generation=generation,
            progress_at_s=at_s if moved else session.progress_at_s,
            progress_told_s=now_s if moved else session.progress_told_s,
            step_s=_step_s(session, body, at_s) if same else session.step_s,
            first_progress=first,
        )
    if isinstance(body, Fault):
        return _apply_fault(session, report, body, now_s)
    if isinstance(body, Draining):
        return replace(session, draining=body)
    if isinstance(body, Stacks):
        return replace(session, stacks=body, stacks_generation=generation, stacks_at_s=now_s)
    return session


def _step_s(session: Session, progress: Progress, at_s: float) -> float | None:
    before, before_s = session.progress, session.progress_at_s
    if before is None or before_s is None or progress.step <= before.step:
        return session.step_s
    return max(0.0, at_s - before_s) / (progress.step - before.step)


def _apply_fault(session: Session, report: Report, fault: Fault, now_s: float) -> Session:
    at_s = now_s - _age_s(fault.observed_ms / 1000)
    if fault.ended and any(e.number >= fault.ended for e in session.exits):
        return session  # reported again, after a new connection
    generation = fault.generation or max(report.condition.generation, report.condition.entered)
    fault = replace(
        fault,
        message=_clean(fault.message),
        last_line=_clean(fault.last_line or "") or None,
        tail=_clean(fault.tail or "", MAX_TAIL) or None,
        reason=fault.reason if fault.reason in FAULT_REASONS else None,
        detail=_clean(fault.detail or "") or None,
    )
    # One of an earlier generation than the worker has entered since only counts.
    if generation >= report.condition.entered:
        session = replace(session, fault=fault, fault_generation=generation, fault_at_s=at_s)
    if fault.cause in ("exit", "hung") and not _counted(session, fault, at_s):
        # Exit code 0, too: who has finished its steps sends no fault, and who ends before would be started again for ever.
        rank = fault.local_rank if fault.local_rank is not None else 0
        incarnation = fault.incarnation or report.condition.incarnation
        before = session.last_exits.get(rank)
        ended = ProcessExit(
            at_s,
            incarnation,
            rank,
            fault.exit_code if fault.exit_code is not None else -1,
            fault.last_line or "",
            generation,
            alone=before is not None and before[0] == generation and before[1] < incarnation,
            tail=fault.tail or "",
            reason=fault.reason or "",
            detail=fault.detail or "",
            hung=fault.message if fault.cause == "hung" else "",
            number=fault.ended,
        )
        session = replace(
            session,
            exits=(*session.exits, ended)[-MAX_EXITS:],
            last_exits={**session.last_exits, rank: (generation, incarnation)},
            num_exits=session.num_exits + 1,
        )
    return session


def _counted(session: Session, fault: Fault, at_s: float) -> bool:
    """Return whether the exit is one that was reported before, and is sent again because the answer was lost: by an agent of an
    earlier release, whose exits have no numbers."""
    return (
        fault.observed_ms > 0
        and not fault.ended
        and any(
            e.local_rank == (fault.local_rank or 0)
            and e.exit_code == (-1 if fault.exit_code is None else fault.exit_code)
            and abs(e.at_s - at_s) < RESENT_WITHIN_S
            for e in session.exits
        )
    )


def _clean(text: str, length: int = MAX_LINE) -> str:
    """Return the text as it can stand in a status: short, and without half surrogates."""
    return text[:length].encode(errors="replace").decode()


def stream_opened(session: Session, boot: str) -> Session:
    """Return the session with an open stream: nothing has been told on it yet."""
    return replace(
        session,
        boot=boot,
        connected=True,
        closed_at_s=None,
        unanswered_since_s=None,
        told_generation=0,
        told_finish=0,
        told_tier="",
        told_outcome="",
    )


def stream_closed(session: Session, now_s: float, newest_step: int = 0) -> Session:
    """Return the session without its stream. What has committed by now proves life no more (rule FENCE); `newest_step`
    is the newest that any worker of the job has reported."""
    step = session.progress.step if session.progress else 0
    closed_step = max(newest_step, step, session.condition.step)
    return replace(session, connected=False, closed_at_s=now_s, closed_step=closed_step)
