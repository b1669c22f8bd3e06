"""What a report does to a session. Pure (rules FENCE and RESAY); the caller has authenticated the pod."""

from __future__ import annotations

from dataclasses import replace

from regroup.protocol.state import Phase
from regroup.protocol.wire import Adopted, Draining, Fault, Formed, Progress, Report

from regroup_operator.model.records import ProcessExit, Session

MAX_EXITS = 32


def apply_report(session: Session | None, report: Report, now_s: float) -> Session | None:
    """Return the session after the report, or None if it is dropped: of an older incarnation, or of a generation older
    than what the agent has said since (a delayed message of a fenced generation)."""
    condition = report.condition
    if session is None:
        session = Session(
            pod_uid=report.pod_uid,
            boot=report.boot,
            connected=False,
            condition=condition,
            condition_at_s=now_s,
            first_seen_s=now_s,
        )
    elif _older(session, report):
        return None
    before = session.condition
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
        seal=report.seal,
        store_port=report.store_port,
    )
    return _apply_body(session, report, now_s)


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
        first = session.first_progress if session.progress_generation == generation else None
        if body.first_step_ms is not None:
            first = body
        return replace(
            session, progress=body, progress_generation=generation, progress_at_s=now_s, first_progress=first
        )
    if isinstance(body, Fault):
        return _apply_fault(session, report, body, now_s)
    if isinstance(body, Draining):
        return replace(session, draining=body)
    return session


def _apply_fault(session: Session, report: Report, fault: Fault, now_s: float) -> Session:
    at_s = now_s - fault.observed_ms / 1000
    session = replace(
        session,
        fault=fault,
        fault_generation=max(report.condition.generation, report.condition.entered),
        fault_at_s=at_s,
        fault_incarnation=report.condition.incarnation,
    )
    if fault.cause == "exit" and fault.exit_code != 0:
        ended = ProcessExit(
            at_s,
            report.condition.incarnation,
            fault.local_rank if fault.local_rank is not None else 0,
            fault.exit_code if fault.exit_code is not None else -1,
            fault.last_line or "",
        )
        session = replace(session, exits=(*session.exits, ended)[-MAX_EXITS:], num_exits=session.num_exits + 1)
    return session


def stream_opened(session: Session, boot: str, now_s: float) -> Session:
    """Return the session with an open stream: nothing has been told on it yet."""
    return replace(
        session,
        boot=boot,
        connected=True,
        closed_at_s=None,
        told_generation=0,
        told_tier="",
        told_stop=False,
    )


def stream_closed(session: Session, now_s: float) -> Session:
    """Return the session without its stream. What has committed by now proves life no more (rule FENCE)."""
    step = session.progress.step if session.progress else session.condition.step
    return replace(session, connected=False, closed_at_s=now_s, closed_step=max(step, session.condition.step))


def attached(session: Session) -> bool:
    """Return whether the worker's processes stand at or beyond `ready`."""
    return session.condition.phase not in (Phase.IDLE, Phase.STARTING, Phase.STOPPED)
