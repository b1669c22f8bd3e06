"""The change that a report makes to a session. Pure (rules FENCE and RESAY); the caller has authenticated the pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regroup.protocol.state import Busy, Condition, Phase
from regroup.protocol.text import shorten
from regroup.protocol.wire import (
    CANNOT_RUN,
    SILENT_S,
    Adopted,
    Draining,
    Fault,
    Hello,
    Progress,
    Report,
    ScriptProgress,
    Stacks,
)
from regroup_operator.model.records import AgentSession, ProcessExit, Silence

MAX_EXITS = 32
MAX_UNHEARD = 64
MAX_TAIL = 1500
MAX_LINE = 500
"""Characters that are kept of what a process or a trainer said last."""
FAULT_REASONS = ("OOMKilled", CANNOT_RUN)
"""Values that a fault's `reason` may have: it becomes the cause of an incident, a word for programs."""
MAX_AGE_S = 30 * 86400.0
"""No agent speaks of anything older. Times are computed from ages, and beyond some years there is no date."""


def apply_report(session: AgentSession | None, report: Report, now_s: float) -> AgentSession | None:
    """Return the session after the report, or None if the report is dropped (rule FENCE). Reports are dropped of another agent
    process than the one that said hello last, and of an older incarnation. So are those of a generation older than what the agent
    has said since: they are delayed messages of a fenced generation."""
    condition = report.condition
    before = session.condition if session is not None else condition
    if session is None:
        session = AgentSession(report.pod_uid, report.boot, False, condition, now_s, now_s)
    elif report.boot != session.boot:
        if not isinstance(report.body, Hello) or condition.incarnation < before.incarnation:
            return None
        session = session.but(
            rebooted_at_s=now_s, draining=None, fault=None, fault_generation=0, fault_at_s=None, **UNTOLD
        )
    elif _older(session, report):
        return None
    moved = (before.phase, before.generation, before.incarnation) != (
        condition.phase,
        condition.generation,
        condition.incarnation,
    )
    changed = {
        "boot": report.boot,
        "condition": condition,
        "condition_at_s": now_s if moved else session.condition_at_s,
        "heard_at_s": now_s,
        "start_s": now_s - session.condition_at_s if _started(before, condition) else session.start_s,
        "busy_since_s": tuple(now_s - _age_s(busy.age_s) for busy in condition.busy),
        "busy_ended_s": now_s if _ended(before.busy, condition.busy) else session.busy_ended_s,
        "seal": report.seal,
        "store_port": report.store_port,
        "ports": report.ports or (),
        "unanswered_since_s": None,
        "observed_port": report.observed_port,
        "unheard": tuple(
            Silence(one.pod_uid, now_s - age_s, age_s)
            for one in report.unheard[:MAX_UNHEARD]
            for age_s in (_age_s(one.age_s),)
        ),
        "saved_at_s": None if report.saved_age_s is None else now_s - _age_s(report.saved_age_s),
    }
    return session.but(**changed, **_changed_by(session, report, now_s))


UNTOLD: dict[str, Any] = {"told_generation": 0, "told_finish": 0, "told_tier": "", "told_outcome": ""}
"""Fields of a session whose agent process, or stream, is new: it has been told nothing."""

_TEXTS = ("checkpoint_problem", "snapshot_problem", "checkpoints_late", "snapshots_late")
"""Sentences in a report of progress that come to stand in the status."""


def is_routine(before: AgentSession | None, after: AgentSession, report: Report) -> bool:
    """Return whether a report says only how far training is: nobody asked for it, and nothing else has changed."""
    if before is None or not isinstance(report.body, Progress | ScriptProgress):
        return False
    if isinstance(report.body, Progress) and report.body.first_step_ms is not None:
        return False
    return (
        before.connected
        and before.unanswered_since_s is None
        and before.progress_generation == after.progress_generation
        and _script_trains(before) == _script_trains(after)
        and _saved(before.progress) == _saved(after.progress)
        and _standing(before) == _standing(after)
    )


def _script_trains(session: AgentSession) -> object:
    """Return the generation of a script's last word, and whether it has got further in it: then it trains."""
    return session.script_generation, session.script is not None and session.script.every_s is not None


def _saved(progress: Progress | None) -> object:
    """Return what is known of checkpoints: a new one is named in the status at once, and older ones may be deleted then."""
    if progress is None:
        return None
    late = progress.checkpoints_late, progress.snapshots_late
    return progress.checkpoint, progress.checkpoint_problem, progress.snapshot_problem, late


def _standing(session: AgentSession) -> object:
    """Return what a decision may depend on of what every report says again: all but the step and ages."""
    condition = replace(session.condition, step=0, busy=())
    busy = [(busy.kind, busy.name) for busy in session.condition.busy]
    unheard = [(one.pod_uid, one.age_s >= SILENT_S) for one in session.unheard]
    offers = session.store_port, session.ports, session.observed_port
    return condition, busy, session.seal, offers, session.draining, unheard


def _age_s(seconds: float) -> float:
    """Return an age as it can be: not of the future, and not older than anything."""
    return min(max(0.0, seconds), MAX_AGE_S)


def _started(before: Condition, now: Condition) -> bool:
    """Return whether all of a worker's processes have attached with this report."""
    return before.phase == Phase.STARTING and now.phase not in (Phase.STARTING, Phase.STOPPED) and now.session


def _ended(before: tuple[Busy, ...], now: tuple[Busy, ...]) -> bool:
    """Return whether something that may take longer than a step is over."""
    return bool({(busy.kind, busy.name) for busy in before} - {(busy.kind, busy.name) for busy in now})


def _older(session: AgentSession, report: Report) -> bool:
    old, new = session.condition, report.condition
    return new.incarnation < old.incarnation or (
        new.incarnation == old.incarnation and (new.heard < old.heard or new.entered < old.entered)
    )


def _changed_by(session: AgentSession, report: Report, now_s: float) -> dict[str, Any]:
    """Return the fields of the session that the report's body changes."""
    body, generation = report.body, report.condition.generation
    if isinstance(body, Adopted):
        return {"adopted": body, "adopted_generation": generation}
    if isinstance(body, Progress):
        # Rule FENCE holds for the generation that the body names, too.
        if body.generation and not session.progress_generation <= body.generation <= report.condition.entered:
            return {}
        return _progressed(session, body, body.generation or generation, now_s)
    if isinstance(body, ScriptProgress):
        return _script_progressed(session, body, report.condition, now_s)
    if isinstance(body, Fault):
        return _failed(session, body, report.condition.entered, now_s)
    if isinstance(body, Draining):
        return {"draining": body}
    if isinstance(body, Stacks):
        return {"stacks": body, "stacks_generation": generation, "stacks_at_s": now_s}
    return {}


def _progressed(session: AgentSession, body: Progress, generation: int, now_s: float) -> dict[str, Any]:
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
    return {
        "progress": body,
        "progress_generation": generation,
        "progress_at_s": at_s if moved else session.progress_at_s,
        "progress_told_s": now_s if moved else session.progress_told_s,
        "step_s": _step_s(session, body, at_s) if same else session.step_s,
        "first_progress": first,
    }


def _script_progressed(
    session: AgentSession, body: ScriptProgress, condition: Condition, now_s: float
) -> dict[str, Any]:
    """Return what a script's word on its progress changes: nothing if it is a process's that has been replaced."""
    before = session.script.incarnation if session.script is not None else 0
    if not before <= body.incarnation <= condition.incarnation:
        return {}
    at_s = now_s - _age_s(body.age_ms / 1000)
    return {"script": body, "script_generation": condition.generation, "script_at_s": at_s}


def _step_s(session: AgentSession, progress: Progress, at_s: float) -> float | None:
    before, before_s = session.progress, session.progress_at_s
    if before is None or before_s is None or progress.step <= before.step:
        return session.step_s
    return max(0.0, at_s - before_s) / (progress.step - before.step)


def _failed(session: AgentSession, fault: Fault, entered: int, now_s: float) -> dict[str, Any]:
    is_exit = fault.cause in ("exit", "hung")
    if is_exit and any(e.number >= fault.ended for e in session.exits):
        return {}  # it is reported again, on a new connection
    at_s, generation = now_s - _age_s(fault.observed_ms / 1000), fault.generation
    fault = replace(
        fault,
        message=_clean(fault.message),
        last_line=_clean(fault.last_line or "") or None,
        tail=_clean(fault.tail or "", MAX_TAIL) or None,
        reason=fault.reason if fault.reason in FAULT_REASONS else None,
        detail=_clean(fault.detail or "") or None,
    )
    changed: dict[str, Any] = {}
    if generation >= entered:  # a fault of an earlier generation says nothing of how the worker left the one it is in
        changed = {"fault": fault, "fault_generation": generation, "fault_at_s": at_s}
    if not is_exit:
        return changed
    # Exit code 0, too: a worker that has finished its steps sends no fault, and one that ends before would be started for ever.
    rank = fault.local_rank if fault.local_rank is not None else 0
    before = session.last_exits.get(rank)
    ended = ProcessExit(
        at_s,
        fault.incarnation,
        rank,
        fault.exit_code if fault.exit_code is not None else -1,
        fault.last_line or "",
        generation,
        alone=before is not None and before[0] == generation and before[1] < fault.incarnation,
        tail=fault.tail or "",
        reason=fault.reason or "",
        detail=fault.detail or "",
        hung=fault.message if fault.cause == "hung" else "",
        number=fault.ended,
    )
    return changed | {
        "exits": (*session.exits, ended)[-MAX_EXITS:],
        "last_exits": {**session.last_exits, rank: (generation, fault.incarnation)},
        "num_exits": session.num_exits + 1,
    }


def _clean(text: str, length: int = MAX_LINE) -> str:
    """Return the text as it can stand in a status: short, and without half surrogates."""
    return shorten(text, length).encode(errors="replace").decode()


def stream_opened(session: AgentSession) -> AgentSession:
    """Return the session with an open stream."""
    return session.but(connected=True, closed_at_s=None, unanswered_since_s=None, **UNTOLD)


def stream_closed(session: AgentSession, now_s: float, newest_step: int = 0) -> AgentSession:
    """Return the session without its stream. Steps that have been committed by now prove life no more (rule FENCE); `newest_step`
    is the newest that any worker of the job has reported."""
    step = session.progress.step if session.progress else 0
    closed_step = max(newest_step, step, session.condition.step)
    return session.but(connected=False, closed_at_s=now_s, closed_step=closed_step)
