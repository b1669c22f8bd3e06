"""Say how each worker stands in the newest generation, from conditions and clocks alone (rules RESAY, FENCE, LOST).

Pure. *Progress is proof of life*: no synchronous step completes without every rank, so a silent worker is kept while
the step count moves. NotReady or unreachable proves nothing; a pod that is gone or failed does. An open stream proves
little: keepalives are answered by the kernel (or a mesh sidecar), so that once progress stalls the agents are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from regroup.protocol.state import Phase
from regroup.protocol.wire import SILENT_S
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Setback
from regroup_operator.model.records import AgentSession, Observation, Pod, Settings
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


class _Finding(NamedTuple):
    """The standing of a member. The fields are those of Worker."""

    standing: str
    since_s: float
    why: str = ""
    lost_at_s: float | None = None
    last_seen_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """The newest generation, and what pods, agents and clocks say of the workers of its job."""

    current: Current | None
    tier: str | None
    """status.tier; None: not known yet."""
    obs: Observation
    released: frozenset[str]
    processes: int
    """The number of a worker's processes."""
    now_s: float
    disconnect_s: float
    settings: Settings
    setbacks: Mapping[str, Setback] = field(default_factory=dict)
    """Maps pod UIDs to how their workers kept generations from forming."""
    unheard: Mapping[str, float] = field(default_factory=dict)
    """Maps pod UIDs to the time since which observers have heard nothing of the worker (observers.Silences.proven)."""
    done: frozenset[MemberId] = frozenset()
    """Members whose script has returned 0, by the status: they are not lost with their pods."""

    def worker_of(self, pod: Pod, *, is_member: bool) -> Worker:
        """Return how the worker of a pod stands."""
        session = self.obs.sessions.get(pod.uid)
        available = pod.uid not in self.released and _available(pod, session, self.tier, self.current)
        if session is not None and session.unanswered_since_s is not None:
            available = available and self.now_s < session.unanswered_since_s + max(self.disconnect_s, self._answer_s)
        if is_member and self.current is not None:
            found = self._find(pod, session, self.current)
        else:
            since_s = session.condition_at_s if session else pod.running_since_s or self.now_s
            found = _Finding(Standing.OUTSIDE, since_s)
        return Worker(
            pod.id,
            pod,
            session,
            found.standing,
            available and found.standing != Standing.LOST,
            found.since_s,
            found.lost_at_s,
            found.why,
            found.last_seen_s,
            self._silent_until_s(pod, session),
            self.setbacks[pod.uid].until_s if pod.uid in self.setbacks else 0.0,
        )

    def _find(self, pod: Pod, session: AgentSession | None, current: Current) -> _Finding:
        """Return how a member stands, by the first rule that applies."""
        phase = session.condition.phase if session is not None else None
        if pod.phase == "Failed" or (not pod.alive and phase not in (Phase.FINISHED, Phase.DONE, Phase.STOPPED)):
            return _Finding(Standing.LOST, self.now_s, DRAINED if _has_left(session) else "PodFailed")
        if session is None:
            return self._never_called(pod)
        if phase == Phase.STOPPED:
            standing = Standing.FINISHED if session.told_stop else Standing.LOST
            since_s = session.condition_at_s if session.connected else self.now_s
            return _Finding(standing, since_s, DRAINED if _has_left(session) else "Stopped")
        return (
            self._unheard(session)
            or (self._unanswering(session) if session.connected else self._disconnected(session))
            or self._by_condition(pod, session, current)
        )

    def _never_called(self, pod: Pod) -> _Finding:
        """Judge a member whose agent has not called this operator. Who waits to be admitted has called just now, as far as the
        grace goes."""
        deadline_s = self._grace_of(pod)
        if self._newest is not None and self._newest.step_s is not None:  # steps were committed in this term
            deadline_s = max(deadline_s, self._newest.at_s + self.disconnect_s)
        if self.now_s >= deadline_s:
            return _Finding(Standing.LOST, deadline_s, "NeverConnected")
        is_waiting = pod.uid in self.obs.waiting
        since_s = min(self.now_s, self._grace_ends_s) if is_waiting else self.obs.term_started_s
        return _Finding(Standing.SILENT, since_s, lost_at_s=deadline_s)

    def _unheard(self, session: AgentSession) -> _Finding | None:
        """Judge a member of which observers hear nothing; None: it may live all the same."""
        unheard_s = self.unheard.get(session.pod_uid)
        if unheard_s is None:
            return None
        silent_s = is_lost(session, unheard_s, self._newest.at_s if self._newest is not None else None, self.now_s)
        if silent_s is None:
            return None
        return _Finding(Standing.LOST, silent_s + SILENT_S, UNHEARD, last_seen_s=silent_s)

    def _disconnected(self, session: AgentSession) -> _Finding:
        """Judge a member whose stream has ended. Not every commit before the stream's end was known then."""
        newest, closed_s = self._newest, self.now_s if session.closed_at_s is None else session.closed_at_s
        silent_s = closed_s - self.settings.probe_s
        goes_on = newest is not None and newest.step >= session.closed_step + 2 and newest.at_s >= silent_s
        if session.unanswered_since_s is not None:
            silent_s = min(silent_s, session.unanswered_since_s)
        if newest is not None and goes_on:
            silent_s = max(silent_s, newest.at_s)
        elif self._is_faulted:
            return _Finding(Standing.LOST, closed_s, DISCONNECTED)
        return self._unreachable(closed_s, silent_s, DISCONNECTED)

    def _unanswering(self, session: AgentSession) -> _Finding | None:
        """Judge a member whose stream is open and whose agent has not answered; None: it still has time."""
        unanswered_s, newest = session.unanswered_since_s, self._newest
        if unanswered_s is None:
            return None
        if session.condition.phase == Phase.TRAINING and newest is not None:
            if self.now_s < max(unanswered_s + ANSWER_S, newest.stalls_at_s):
                return None
            unanswered_s = max(unanswered_s, newest.at_s)
        elif self.now_s < unanswered_s + self._answer_s:  # an adoption or the first report of a step, or a script runs
            return None
        return self._unreachable(unanswered_s, unanswered_s, UNRESPONSIVE)

    def _unreachable(self, since_s: float, silent_s: float, why: str) -> _Finding:
        """Return it as silent, and lost once it was for disconnectSeconds."""
        lost_at_s = silent_s + self.disconnect_s
        if self.now_s < lost_at_s:
            return _Finding(Standing.SILENT, since_s, lost_at_s=lost_at_s)
        seen_s = self._newest.at_s if self._newest is not None else silent_s
        return _Finding(Standing.LOST, lost_at_s, why, last_seen_s=min(seen_s, silent_s))

    def _by_condition(self, pod: Pod, session: AgentSession, current: Current) -> _Finding:
        """Judge a member whose agent can be reached by what it has said last."""
        condition, since_s = session.condition, session.condition_at_s
        if condition.generation == current.number and condition.phase in _IN_GROUP:
            return _Finding(_IN_GROUP[condition.phase], since_s)
        if not _restarted(session, current, self.processes):
            if condition.entered < current.number:
                # Its processes start, or they still leave the one before.
                is_starting = condition.phase == Phase.STARTING
                return _Finding(Standing.STARTING if is_starting else Standing.PENDING, since_s)
            if condition.phase == Phase.BROKEN:
                # The agent of a script ends the siblings of a process that was killed because it hung.
                why = "Hung" if _has_hung(session, current) else "CollectiveFailed"
                return _Finding(Standing.BROKEN, since_s, why)
        return _Finding(Standing.DIED, since_s, _why_died(pod, session, current))

    def _silent_until_s(self, pod: Pod, session: AgentSession | None) -> float | None:
        """Return until when it is waited for that a worker says which state it holds (rule BEST); None: it is not."""
        if self.tier != "Session" or self.current is None or not pod.alive or pod.uid in self.released:
            return None
        patience_s = self.disconnect_s + self.settings.replace_after_s
        until_s = _silent_until_s(pod, session, self._grace_of(pod), patience_s)
        return until_s if until_s and self.now_s < until_s else None

    def _grace_of(self, pod: Pod) -> float:
        if pod.uid in self.obs.waiting:
            return max(self._grace_ends_s, self.now_s + self.disconnect_s)
        return self._grace_ends_s

    @cached_property
    def _grace_ends_s(self) -> float:
        return max(self.obs.term_started_s + self.settings.term_grace_s, self.obs.admitted_by_s)

    @cached_property
    def _answer_s(self) -> float:
        runs_a_script = self.tier == "Script" and self.current is not None and self.current.adopted
        return SCRIPT_ANSWER_S if runs_a_script else ANSWER_S

    @cached_property
    def _in_group(self) -> list[AgentSession]:
        members, sessions = frozenset(self.current.members if self.current else ()), self.obs.sessions
        return [sessions[pod.uid] for pod in self.obs.pods if pod.id in members and pod.uid in sessions]

    @cached_property
    def _is_faulted(self) -> bool:
        """A collective of the newest generation has failed."""
        number = self.current.number if self.current is not None else 0
        return any(
            s.connected and _broke(s, number) and s.fault is not None and s.fault.cause == "collective"
            for s in self._in_group
        )

    @cached_property
    def _newest(self) -> Reported | None:
        return newest_progress(self._in_group, counted_generations(self.current)) if self.current else None


def assess(view: GroupView) -> tuple[Worker, ...]:
    """Return every worker: the pods there are, and the members whose pods are gone. Sorted by id."""
    members = frozenset(view.current.members) if view.current else frozenset()
    out = [view.worker_of(pod, is_member=pod.id in members) for pod in view.obs.pods]
    for gone in members - {pod.id for pod in view.obs.pods}:
        out.append(Worker(MemberId(*gone), None, None, Standing.LOST, False, view.now_s, why="PodDeleted"))
    if view.done & members:
        is_gone = (Standing.LOST, Standing.SILENT)
        out = [
            replace(w, standing=Standing.FINISHED) if w.id in view.done and w.standing in is_gone else w for w in out
        ]
    return tuple(sorted(out, key=lambda w: w.id))


def _available(pod: Pod, session: AgentSession | None, tier: str | None, current: Current | None) -> bool:
    if not pod.alive or session is None or not session.connected:
        return False
    phase = session.condition.phase
    has_ended = (
        tier == "Script" and phase == Phase.READY
    )  # a script's processes start again with the next generation only
    if session.killed and session.condition.incarnation <= max(session.killed) and not has_ended:
        return False  # it hangs, and has not been started again
    if tier == "Session":
        return session.condition.session and phase in _ATTACHED
    if current is None and session.condition.heard == 0:
        return phase == Phase.READY
    # Without a generation, but with one that has been heard: the status was restored from before the first one.
    return phase in (Phase.STARTING, *_ATTACHED)


def _silent_until_s(pod: Pod, session: AgentSession | None, grace_ends_s: float, patience_s: float) -> float | None:
    """Return until when the job waits for a worker to say which state it holds (rule BEST).

    None: the worker has said so, or can hold none. The wait ends when its pod is given up (lateness.py), because the alternative is
    an older state.
    """
    if session is None:
        return grace_ends_s if pod.phase == "Running" else None
    if session.seal is not None or session.condition.adopted == 0:
        return None
    if not session.connected:
        return None if session.closed_at_s is None else session.closed_at_s + patience_s
    return inf if session.unanswered_since_s is None else session.unanswered_since_s + patience_s


def _broke(session: AgentSession, generation: int) -> bool:
    condition = session.condition
    return condition.phase == Phase.BROKEN and condition.entered >= generation


def _has_left(session: AgentSession | None) -> bool:
    """Return whether a worker that has stopped was asked to leave: its grace period was over before another one was there."""
    return session is not None and session.draining is not None


def _why_died(pod: Pod, session: AgentSession, current: Current) -> str:
    """Return the cause of a member whose processes are new.

    An agent that was started again has no fault to report: its container ended with everything in it. The pod says how, perhaps a
    moment later.
    """
    if session.rebooted_at_s is None or session.fault is not None:
        if _has_hung(session, current):
            return "Hung"
        if session.fault is not None and session.fault.cause == "hung":
            return "Overdue"
        return (session.fault.reason if session.fault else None) or "ProcessExited"
    if pod.container_restarts and pod.end_unseen:
        return "NodeRestarted"
    return "OOMKilled" if pod.container_restarts and pod.last_exit_reason == "OOMKilled" else "ContainerRestarted"


def _has_hung(session: AgentSession, current: Current) -> bool:
    """Return whether a process of this generation was killed because it hung.

    Only a generation that all have adopted can hang. The operator also has processes killed that keep one from forming.
    """
    return current.adopted and session.hung(current.number) != ""


def _restarted(session: AgentSession, current: Current, processes: int) -> bool:
    """Return whether a process of a member ended after the announcement, before the worker entered the generation.

    Members were attached when it was announced, so that one whose process starts has lost it. Where the generation itself
    starts the processes, they raise the incarnation by their number; more is a second start. What is not known (another
    operator announced it) is not concluded: the new process enters the generation by itself if it may.
    """
    before = current.incarnations.get(session.pod_uid)
    if before is None or session.condition.phase != Phase.STARTING or session.condition.entered >= current.number:
        return False
    return not current.launches or session.condition.incarnation > before + processes
