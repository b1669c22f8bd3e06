"""Tell a change of membership as an incident: what was decided and why, and how long each part took. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regroup.protocol.wire import Fault
from regroup_operator.api.members import parse_members
from regroup_operator.api.status import Incident, JudgedExits
from regroup_operator.model.plan import Clock
from regroup_operator.model.worker import PLANNED_CAUSES, Announce, Current, Worker
from regroup_operator.plan.generation.culprit import OOM_KILLED, exit_of, exit_words

_UNEXPLAINED = "lost a process;"
"""The words of a decision that was made before the agent knew how the process ended."""


def make_incident(number: int, decision: Announce, workers: Sequence[Worker], clock: Clock) -> Incident:
    """Return the incident of generation `number` as it is known when the generation is issued."""
    faults = (w.session.fault for w in workers if w.is_member and w.why == decision.cause and w.session)
    fault = next((fault for fault in faults if fault is not None), None)
    waited_s = max(0.0, clock.now_s - decision.detected_at_s)
    return Incident(
        generation=number,
        at=clock.timestamp(waited_s),
        decision=decision.message,
        cause=decision.cause or None,
        culprit=decision.culprit or None,
        workers=len(decision.members),
        detect_ms=_detect_ms(decision, fault),
        decide_ms=round(waited_s * 1000, 1),
    )


def _detect_ms(decision: Announce, fault: Fault | None) -> float | None:
    if decision.detect_s is not None:
        return round(decision.detect_s * 1000, 1)
    return round(fault.observed_ms, 1) if fault is not None else None


def with_times(
    incident: Incident, number: int, members: Sequence[Worker], persist_ms: float | None, *, planned: bool = False
) -> Incident:
    """Return the incident of the newest generation with what its members have measured since. Times that are in it already stay.

    Members begin to form a forced generation together, so the slowest one's time counts. The joiners of a `planned` one come early
    and wait while the others train on. There the time of the last to come counts, which is the shortest.
    """
    measured: dict[str, Any] = {}
    sessions = [w.session for w in members if w.session is not None]
    adopted = [s.adopted for s in sessions if s.adopted and s.adopted_generation == number]
    first = [s.first_progress for s in sessions if s.first_progress and s.progress_generation == number]
    if persist_ms is not None:
        measured["persist_ms"] = round(persist_ms, 1)
    if adopted and len(adopted) == len(members):
        formed = [one.form_ms for one in adopted if one.form_ms is not None]
        if len(formed) == len(members):  # a script forms its group itself, and nobody measures that
            measured["form_ms"] = round((min if planned else max)(formed), 1)
        measured["transfer_ms"] = round(max(one.transfer_ms for one in adopted), 1)
    if first:
        measured["first_step_ms"] = round(max(p.first_step_ms or 0.0 for p in first), 1)
        measured["steps_redone"] = max(p.steps_redone for p in first)
    new = {name: value for name, value in measured.items() if getattr(incident, name) is None}
    return incident.with_fields(**new) if new else incident


def with_rule(incident: Incident, judged: JudgedExits | None, *, broken: range) -> Incident:
    """Return the incident with the rule of spec.recovery.onExit that has judged it, if one has. `judged`: status.restarts.judged;
    `broken`: the generations whose end the incident can be."""
    if judged is None or judged.rule is None or judged.generation not in broken:
        return incident
    return incident.with_fields(rule=judged.rule)


def with_exit(incident: Incident, workers: Sequence[Worker], *, broken: range) -> Incident:
    """Return the incident with exit code and last line of the culprit's process, once its agent has reported them.

    A closed connection shows that a process has left before the agent has reaped it and can say how it ended. `broken`: the
    generations whose end the incident can be.
    """
    culprit = next((w for w in workers if str(w.id) == incident.culprit), None)
    ended = None if culprit is None else exit_of(culprit, broken)
    if ended is None or _UNEXPLAINED not in incident.decision or incident.cause != "ProcessExited":
        return incident
    return incident.with_fields(
        decision=incident.decision.replace(_UNEXPLAINED, f"{exit_words(ended)};", 1),
        cause=OOM_KILLED if ended.reason == OOM_KILLED else incident.cause,
    )


def missing_for_memory(incidents: Sequence[Incident], current: Current | None) -> str:
    """Return what is known of a worker that was killed for lack of memory and is still missing; empty: there is none.

    Who comes back joins in a planned generation, so incidents before the last of those say nothing of today. Of a slot only
    the newest counts.
    """
    seen = {member.slot for member in current.members} if current is not None else set()
    for incident in reversed(incidents):
        if incident.cause in PLANNED_CAUSES:
            break
        slots = {member.slot for member in parse_members(incident.culprit or "")}
        if incident.cause == OOM_KILLED and slots - seen:
            return f"Generation {incident.generation}: {incident.decision}"
        seen |= slots
    return ""
