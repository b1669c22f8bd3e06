"""The sessions of all agents and their open streams, in memory: lost with the operator, re-said by the agents."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from regroup.protocol import codec
from regroup.protocol.state import Phase
from regroup.protocol.wire import (
    REPORT_EVERY_S,
    Command,
    DumpStacks,
    Finish,
    Generation,
    Kill,
    Ping,
    Progress,
    ProgressRequest,
    Report,
    ScriptProgress,
    Stop,
    Welcome,
)
from regroup_operator.endpoint.sessions import apply_report, is_routine, stream_closed, stream_opened
from regroup_operator.model.pace import progress_factor
from regroup_operator.model.reach import suspects_itself
from regroup_operator.model.records import AgentSession, Key, Pod

PROGRESS_PLAN_S = 2.5
"""A job of which nothing but its progress is news is planned so much later, however many workers report it. If agents report less
often, that is as many times longer. With 200 to 500 jobs that is as often as a status is written (pace.py), in the same plan."""

COUNT_EVERY_S = 1.0
"""Agents that are out of reach are counted no more often: they may be thousands, and each plan asks for their number."""

MAX_LINES = 1000
"""That many commands wait for an agent that reads none of them. Then they are dropped, and the stream ends when the kernel has
given the connection up."""

JobId = tuple[str, str]
"""(namespace, UID). Whoever may make a pod writes any UID into its ownerReference, but only in a namespace of their own. A pod's
own UID is the API server's."""

log = logging.getLogger(__name__)


class Stream:
    """An open stream: a queue of lines for an agent, ended by None."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, line: bytes | None) -> None:
        """Queue one NDJSON line; None ends the stream. A stream that is not read ends: a new one is told everything again."""
        if line is not None and self._lines.qsize() >= MAX_LINES:
            line = None
            while not self._lines.empty():
                self._lines.get_nowait()
        self._lines.put_nowait(line)

    async def get(self) -> bytes | None:
        """Return the next line, or None once the stream is to end."""
        return await self._lines.get()


class Registry:
    """All sessions. One event loop's: no locks."""

    def __init__(
        self,
        clock: Callable[[], float],
        enqueue: Callable[[Key], None],
        enqueue_after: Callable[[Key, float], None],
        factor: Callable[[int], float] = progress_factor,
        progress_plan_s: float = PROGRESS_PLAN_S,
        should_call: Callable[[Pod], bool] = lambda _: False,
    ) -> None:
        """`enqueue_after(key, seconds)`: the earlier of two times counts (WorkQueue.add_after). `factor(jobs)`: see pace.py.
        `should_call(pod)`: its container runs on a node that is ready, so that nothing explains an agent that does not call."""
        self._clock = clock
        self._enqueue = enqueue
        self._enqueue_after = enqueue_after
        self._factor, self._progress_plan_s = factor, progress_plan_s
        self._sessions: dict[str, AgentSession] = {}
        self._streams: dict[str, Stream] = {}
        self._jobs: Counter[JobId] = Counter()
        """Open streams by job."""
        self._pods: dict[str, Pod] = {}
        self._steps: dict[JobId, tuple[int, int]] = {}
        self._refusals: dict[str, str] = {}
        self._should_call = should_call
        self._num_out_of_reach, self._counted_s = 0, float("-inf")
        self._closed: dict[str, Pod] = {}
        """Pods whose streams have ended and were not opened again, by UID. `out_of_reach` sweeps out those that are gone."""
        self._leaving: dict[str, Pod] = {}
        """Pods that are asked to leave, by UID: few."""
        self.dropped_reports = 0

    def sessions(self, pods: Iterable[Pod]) -> dict[str, AgentSession]:
        """Return the sessions of these pods, by UID."""
        return {pod.uid: self._sessions[pod.uid] for pod in pods if pod.uid in self._sessions}

    def refusals(self, pods: Iterable[Pod]) -> dict[str, str]:
        """Return why the agents of these pods were turned away, by UID: what they say cannot be understood here."""
        return {pod.uid: self._refusals[pod.uid] for pod in pods if pod.uid in self._refusals}

    def refuse(self, pod: Pod, sentence: str) -> None:
        """Remember that an authenticated agent was turned away, until it says a hello that can be taken."""
        if self._refusals.get(pod.uid) != sentence:
            self._refusals[pod.uid] = sentence
            self._pods[pod.uid] = pod
            self._enqueue((pod.namespace, pod.job))

    def leaving(self, key: Key, job_uid: str | None) -> list[tuple[Pod, AgentSession]]:
        """Return the pods that are asked to leave of jobs with this name, but not of the one with this UID."""
        return [
            (pod, self._sessions[uid])
            for uid, pod in self._leaving.items()
            if (pod.namespace, pod.job) == key and pod.job_uid != job_uid
        ]

    def num_connected(self) -> int:
        """Return the number of open streams."""
        return len(self._streams)

    def out_of_reach(self) -> int:
        """Return how many agents have lost their stream and should have called again, if so many that the operator suspects itself
        (model/reach.py); else 0."""
        connected, now_s = len(self._streams), self._clock()
        if now_s < self._counted_s + COUNT_EVERY_S:
            return self._num_out_of_reach
        self._counted_s = now_s
        if suspects_itself(len(self._closed), connected):
            self._closed = {uid: pod for uid, pod in self._closed.items() if self._should_call(pod)}
        suspects = suspects_itself(len(self._closed), connected)
        if suspects and not self._num_out_of_reach:
            log.warning(
                "%d of %d agents are out of reach at once, on nodes that are ready. This operator's own CPU or network is the "
                "likelier cause, so their pods are replaced later than usual.",
                len(self._closed),
                len(self._closed) + connected,
            )
        elif self._num_out_of_reach and not suspects:
            log.warning("%d agents are connected; pods of those that are not are replaced as usual.", connected)
        self._num_out_of_reach = len(self._closed) if suspects else 0
        return self._num_out_of_reach

    @property
    def num_jobs(self) -> int:
        """The number of jobs with open streams."""
        return len(self._jobs)

    @property
    def progress_factor(self) -> float:
        """So many times as long as usual agents wait between two reports of progress."""
        return self._factor(len(self._jobs))

    def knows(self, pod_uid: str, boot: str) -> bool:
        """Return whether this agent process has said hello to this operator."""
        session = self._sessions.get(pod_uid)
        return session is not None and session.boot == boot

    def report(self, pod: Pod, report: Report) -> bool:
        """Take a report of an authenticated pod. Returns False if it was dropped (rule FENCE)."""
        before = self._sessions.get(pod.uid)
        session = apply_report(before, report, self._clock())
        if session is None:
            self.dropped_reports += 1
            return False
        factor = self.progress_factor
        if isinstance(report.body, ScriptProgress):
            session = session.but(report_every_s=REPORT_EVERY_S * factor)
        if isinstance(report.body, Progress):
            every_s = REPORT_EVERY_S * factor
            has_moved = before is None or before.progress_told_s != session.progress_told_s
            session = session.but(
                report_every_s=every_s,
                progress_due_s=session.progress_told_s + every_s if has_moved else session.progress_due_s,
            )
        self._sessions[pod.uid] = session
        self._pods[pod.uid] = pod
        was_refused = self._refusals.pop(pod.uid, None) is not None
        if isinstance(report.body, Progress):
            newest = (report.generation, report.body.step)
            self._steps[_job_of(pod)] = max(newest, self._steps.get(_job_of(pod), newest))
        if session.draining is not None:
            self._leaving[pod.uid] = pod
        else:  # its container was started again, and the new agent has not been asked
            self._leaving.pop(pod.uid, None)
        if is_routine(before, session, report) and not was_refused:
            self._enqueue_after((pod.namespace, pod.job), self._progress_plan_s * factor)
        else:
            self._enqueue((pod.namespace, pod.job))
        return True

    def open(self, pod: Pod) -> Stream:
        """Open the stream of a pod whose agent has said hello; one that was open before is ended."""
        session = stream_opened(self._sessions[pod.uid])
        old = self._streams.get(pod.uid)
        if old is not None:
            old.put(None)
        else:
            self._jobs[_job_of(pod)] += 1
        self._closed.pop(pod.uid, None)
        stream = self._streams[pod.uid] = Stream()
        self._sessions[pod.uid] = session
        self._enqueue((pod.namespace, pod.job))
        return stream

    def close(self, pod: Pod, stream: Stream) -> None:
        """Say that a stream has ended; ignored for one that was replaced."""
        if self._streams.get(pod.uid) is not stream:
            return
        del self._streams[pod.uid]
        self._jobs[_job_of(pod)] -= 1
        if not self._jobs[_job_of(pod)]:
            del self._jobs[_job_of(pod)]
        _, newest_step = self._steps.get(_job_of(pod), (0, 0))
        session = self._sessions[pod.uid] = stream_closed(self._sessions[pod.uid], self._clock(), newest_step)
        if session.condition.phase != Phase.STOPPED:
            self._closed[pod.uid] = pod
        self._enqueue((pod.namespace, pod.job))

    def tell(self, pod_uid: str, job_uid: str, generation: int, body: Any) -> None:
        """Queue a command on the pod's stream and remember that it was told. Nothing happens without a stream.

        `generation` is the status' newest. What this agent says it has heard may be newer: the status was restored from a
        backup. An agent refuses what comes from before that (rule FENCE), a ping too, and would count as unreachable.
        """
        stream, session = self._streams.get(pod_uid), self._sessions.get(pod_uid)
        if stream is None or session is None:
            return
        condition = session.condition
        newest = max(generation, condition.heard)
        stream.put(codec.line(Command(job_uid, pod_uid, condition.incarnation, newest, body)))
        if isinstance(body, Generation):
            session = session.but(told_generation=body.number)
        elif isinstance(body, Finish):
            session = session.but(told_finish=body.generation)
        elif isinstance(body, Welcome):
            session = session.but(told_tier=body.tier)
        elif isinstance(body, Stop):
            at_s = session.told_stop_at_s if session.told_stop_at_s is not None else self._clock()
            session = session.but(told_outcome=body.outcome, told_stop_at_s=at_s)
        elif isinstance(body, DumpStacks):
            session = session.but(asked_stacks_at_s=self._clock())
        elif isinstance(body, Kill):
            session = session.but(killed=body.incarnations, killed_at_s=self._clock())
        elif isinstance(body, Ping | ProgressRequest):
            now_s = self._clock()
            since_s = session.unanswered_since_s if session.unanswered_since_s is not None else now_s
            session = session.but(asked_at_s=now_s, unanswered_since_s=since_s)
        self._sessions[pod_uid] = session

    def forget(self, alive: Callable[[str], bool]) -> None:
        """Drop the sessions of pods that are gone."""
        for uid in [uid for uid in self._sessions if not alive(uid) and uid not in self._streams]:
            del self._sessions[uid]
            self._leaving.pop(uid, None)
            self._closed.pop(uid, None)
        self._refusals = {uid: why for uid, why in self._refusals.items() if alive(uid)}
        self._pods = {uid: pod for uid, pod in self._pods.items() if uid in self._sessions or alive(uid)}
        jobs = {_job_of(pod) for pod in self._pods.values()}
        self._steps = {job: step for job, step in self._steps.items() if job in jobs}

    def close_all(self) -> None:
        """End all streams: this operator leads no more."""
        for stream in self._streams.values():
            stream.put(None)


def _job_of(pod: Pod) -> JobId:
    return pod.namespace, pod.job_uid
