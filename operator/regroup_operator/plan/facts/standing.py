"""Say how each worker stands in the newest generation, from conditions and clocks alone (rules RESAY, FENCE, LOST).

Pure. *Progress is proof of life*: no synchronous step completes without every rank, so a silent worker is kept while
the step count moves. NotReady or unreachable proves nothing; a pod that is gone or failed does. An open stream proves
little: keepalives are answered by the kernel (or a mesh sidecar), so that once progress stalls the agents are asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from regroup.protocol.state import Phase
from regroup.protocol.wire import SILENT_S
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Setback
from regroup_operator.model.records import Pod, Session, Settings
from regroup_operator.model.worker import DISCONNECTED, DRAINED, UNHEARD, UNRESPONSIVE, Current, Standing, Worker
from regroup_operator.plan.facts.observers import is_lost
from regroup_operator.plan.facts.stalls import ANSWER_S, SCRIPT_ANSWER_S, Reported, counted_generations, newest_progress

_ATTACHED = (
    Phase.READY,
    Phase.FORMING,
    Phase.ARRIVED,
    Phase.ADOPTING,
    Phase.TRAINING,
    Phase.BROKEN,
    Phase.FINISHED,
    Phase.FINISHING,
    Phase.DONE,
)
_IN_GROUP = {
    Phase.STARTING: Standing.STARTING,
    Phase.FORMING: Standing.FORMING,
    Phase.ARRIVED: Standing.FORMING,
    Phase.ADOPTING: Standing.FORMING,
    Phase.TRAINING: Standing.TRAINING,
    Phase.FINISHED: Standing.FINISHED,
    Phase.FINISHING: Standing.FINISHED,
    Phase.DONE: Standing.FINISHED,
}


def assess(
    *,
    current: Current | None,
    tier: str | None,
    pods: Iterable[Pod],
    sessions: Mapping[str, Session],
    released: frozenset[str],
    processes: int,
    now_s: float,
    term_started_s: float,
    disconnect_s: float,
    settings: Settings,
    setbacks: Mapping[str, Setback] | None = None,
    admitted_by_s: float = 0.0,
    waiting: frozenset[str] = frozenset(),
    unheard: Mapping[str, float] | None = None,
    done: frozenset[MemberId] = frozenset(),
) -> tuple[Worker, ...]:
    """Return every worker: the pods there are, and the members whose pods are gone. Sorted by id.

    `tier` is status.tier (None: not known yet), `processes` the number of a worker's processes, `setbacks` who kept
    generations from forming, by pod UID. `admitted_by_s`: when the last agent that there was at the term's start can have been
    admitted; `waiting`: the pods whose agents wait for that. `unheard`: since when observers have heard nothing of a worker, by pod
    UID (observers.Silences.proven). `done`: members whose script has returned 0, by the status: they are not lost with their pods.
    """
    pods = tuple(pods)
    members = frozenset(current.members) if current else frozenset()
    by_id = {pod.id: pod for pod in pods}
    in_group = [sessions[by_id[m].uid] for m in members if m in by_id and by_id[m].uid in sessions]
    faulted = current is not None and any(
        s.connected and _broke(s, current.number) and s.fault is not None and s.fault.cause == "collective"
        for s in in_group
    )
    newest = newest_progress(in_group, counted_generations(current)) if current else None
    out: list[Worker] = []
    setbacks = setbacks or {}
    runs_a_script = tier == "Script" and current is not None and current.adopted
    answer_s = SCRIPT_ANSWER_S if runs_a_script else ANSWER_S

    grace_ends_s = max(term_started_s + settings.term_grace_s, admitted_by_s)

    def grace_of(pod: Pod) -> float:
        return max(grace_ends_s, now_s + disconnect_s) if pod.uid in waiting else grace_ends_s

    def add(worker: Worker, pod: Pod, session: Session | None) -> None:
        silent_until_s = None
        if tier == "Session" and current is not None and pod.alive and pod.uid not in released:
            silent_until_s = _silent_until_s(pod, session, grace_of(pod), disconnect_s + settings.replace_after_s)
            silent_until_s = silent_until_s if silent_until_s and now_s < silent_until_s else None
        barred_until_s = setbacks[pod.uid].until_s if pod.uid in setbacks else 0.0
        if silent_until_s is not None or barred_until_s:  # of few workers: a copy of each of thousands takes its time
            worker = replace(worker, silent_until_s=silent_until_s, barred_until_s=barred_until_s)
        out.append(worker)

    for pod in pods:
        session = sessions.get(pod.uid)
        available = pod.uid not in released and _available(pod, session, tier, current)
        if session is not None and session.unanswered_since_s is not None:
            available = available and now_s < session.unanswered_since_s + max(disconnect_s, answer_s)
        if current is None or pod.id not in members:
            since = session.condition_at_s if session else pod.running_since_s or now_s
            add(Worker(pod.id, pod, session, Standing.OUTSIDE, available, since), pod, session)
            continue
        member = _member(
            pod,
            session,
            current,
            available,
            processes=processes,
            faulted=faulted,
            newest=newest,
            now_s=now_s,
            # Who waits to be admitted has called just now, as far as the grace goes.
            unknown_s=min(now_s, grace_ends_s) if pod.uid in waiting else term_started_s,
            grace_ends_s=grace_of(pod),
            disconnect_s=disconnect_s,
            answer_s=answer_s,
            unheard_s=(unheard or {}).get(pod.uid),
            settings=settings,
        )
        add(member, pod, session)
    for gone in members - by_id.keys():
        out.append(Worker(MemberId(*gone), None, None, Standing.LOST, False, now_s, why="PodDeleted"))
    if done & members:
        is_gone = (Standing.LOST, Standing.SILENT)
        out = [replace(w, standing=Standing.FINISHED) if w.id in done and w.standing in is_gone else w for w in out]
    return tuple(sorted(out, key=lambda w: w.id))


def _available(pod: Pod, session: Session | None, tier: str | None, current: Current | None) -> bool:
    if not pod.alive or session is None or not session.connected:
        return False
    if session.killed and session.condition.incarnation <= max(session.killed):
        return False  # it hangs, and has not been started again
    phase = session.condition.phase
    if tier == "Session":
        return session.condition.session and phase in _ATTACHED
    if current is None and session.condition.heard == 0:
        return phase == Phase.READY
    # Without a generation, but with one that has been heard: the status was restored from before the first one.
    return phase in (Phase.STARTING, *_ATTACHED)


def _silent_until_s(pod: Pod, session: Session | None, grace_ends_s: float, patience_s: float) -> float | None:
    """Return until when a worker is waited for to say which state it holds (rule BEST); None: it has said so, or it can
    hold none. As long as until its pod is given up (lateness.py): the alternative is an older state."""
    if session is None:
        return grace_ends_s if pod.phase == "Running" else None
    if session.seal is not None or session.condition.adopted == 0:
        return None
    if not session.connected:
        return None if session.closed_at_s is None else session.closed_at_s + patience_s
    return inf if session.unanswered_since_s is None else session.unanswered_since_s + patience_s


def _broke(session: Session, generation: int) -> bool:
    condition = session.condition
    return condition.phase == Phase.BROKEN and condition.entered >= generation


def _member(
    pod: Pod,
    session: Session | None,
    current: Current,
    available: bool,
    *,
    processes: int,
    faulted: bool,
    newest: Reported | None,
    now_s: float,
    unknown_s: float,
    grace_ends_s: float,
    disconnect_s: float,
    answer_s: float,
    unheard_s: float | None,
    settings: Settings,
) -> Worker:
    def worker(standing: str, since_s: float, why: str = "", lost_at_s: float | None = None) -> Worker:
        return Worker(pod.id, pod, session, standing, available and standing != Standing.LOST, since_s, lost_at_s, why)

    def unreachable(since_s: float, silent_s: float, why: str) -> Worker:
        """Return it as silent, and lost once it was for disconnectSeconds."""
        lost_at_s = silent_s + disconnect_s
        if now_s < lost_at_s:
            return worker(Standing.SILENT, since_s, lost_at_s=lost_at_s)
        seen_s = newest.at_s if newest is not None else silent_s
        return replace(worker(Standing.LOST, lost_at_s, why), last_seen_s=min(seen_s, silent_s))

    said_finished = session is not None and session.condition.phase in (Phase.FINISHED, Phase.DONE, Phase.STOPPED)
    if pod.phase == "Failed" or (not pod.alive and not said_finished):
        return worker(Standing.LOST, now_s, DRAINED if _has_left(session) else "PodFailed")
    if session is None:
        deadline = grace_ends_s
        if newest is not None and newest.step_s is not None:  # steps were committed in this term
            deadline = max(deadline, newest.at_s + disconnect_s)
        if now_s >= deadline:
            return worker(Standing.LOST, deadline, "NeverConnected")
        return worker(Standing.SILENT, unknown_s, lost_at_s=deadline)
    if not session.connected and session.condition.phase == Phase.STOPPED:
        standing = Standing.FINISHED if session.told_stop else Standing.LOST
        return worker(standing, now_s, DRAINED if _has_left(session) else "Stopped")
    if unheard_s is not None and session.condition.phase != Phase.STOPPED:
        silent_s = is_lost(session, unheard_s, newest.at_s if newest is not None else None, now_s)
        if silent_s is not None:
            return replace(worker(Standing.LOST, silent_s + SILENT_S, UNHEARD), last_seen_s=silent_s)
    if not session.connected:
        closed = session.closed_at_s if session.closed_at_s is not None else now_s
        base = closed - settings.probe_s
        if session.unanswered_since_s is not None:
            base = min(base, session.unanswered_since_s)
        # Not every commit before the stream's end was known then.
        if newest is not None and newest.step >= session.closed_step + 2 and newest.at_s >= closed - settings.probe_s:
            base = max(base, newest.at_s)
        elif faulted:
            return worker(Standing.LOST, closed, DISCONNECTED)
        return unreachable(closed, base, DISCONNECTED)
    condition = session.condition
    since = session.condition_at_s
    if condition.phase == Phase.STOPPED:
        standing = Standing.FINISHED if session.told_stop else Standing.LOST
        return worker(standing, since, DRAINED if _has_left(session) else "Stopped")
    unanswered = session.unanswered_since_s
    if unanswered is not None:
        if condition.phase == Phase.TRAINING and newest is not None:
            silent_s = max(unanswered, newest.at_s)
            if now_s >= max(unanswered + ANSWER_S, newest.stalls_at_s):
                return unreachable(silent_s, silent_s, UNRESPONSIVE)
        elif now_s >= unanswered + answer_s:  # an adoption or the first report of a step is overdue, or a script runs
            return unreachable(unanswered, unanswered, UNRESPONSIVE)
    if condition.generation == current.number and condition.phase in _IN_GROUP:
        return worker(_IN_GROUP[condition.phase], since)
    if _restarted(session, current, processes):
        return worker(Standing.DIED, since, _why_died(pod, session, current))
    if condition.entered < current.number:
        # Its processes start, or they still leave the one before.
        return worker(Standing.STARTING if condition.phase == Phase.STARTING else Standing.PENDING, since)
    if condition.phase == Phase.BROKEN:
        return worker(Standing.BROKEN, since, "CollectiveFailed")
    return worker(Standing.DIED, since, _why_died(pod, session, current))


def _has_left(session: Session | None) -> bool:
    """Return whether a worker that has stopped was asked to leave: its grace period was over before another one was there."""
    return session is not None and session.draining is not None


def _why_died(pod: Pod, session: Session, current: Current) -> str:
    """Return the cause of a member whose processes are new. An agent that was started again has no fault to report: its
    container ended with everything in it, and the pod says how, perhaps a moment later."""
    if session.rebooted_at_s is None or session.fault is not None:
        # Only a generation that all have adopted can hang; the operator also has processes killed that keep one from forming.
        if current.adopted and session.hung(current.number):
            return "Hung"
        if session.fault is not None and session.fault.cause == "hung":
            return "Overdue"
        return (session.fault.reason if session.fault else None) or "ProcessExited"
    if pod.container_restarts and pod.end_unseen:
        return "NodeRestarted"
    return "OOMKilled" if pod.container_restarts and pod.last_exit_reason == "OOMKilled" else "ContainerRestarted"


def _restarted(session: Session, current: Current, processes: int) -> bool:
    """Return whether a process of a member ended after the announcement, before the worker entered the generation.

    Members were attached when it was announced, so that one whose process starts has lost it. Where the generation itself
    starts the processes, they raise the incarnation by their number; more is a second start. What is not known (another
    operator announced it) is not concluded: the new process enters the generation by itself if it may.
    """
    before = current.incarnations.get(session.pod_uid)
    if before is None or session.condition.phase != Phase.STARTING or session.condition.entered >= current.number:
        return False
    return not current.launches or session.condition.incarnation > before + processes
