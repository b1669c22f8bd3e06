"""Decide whose answer to a ping is waited for before a generation names it (adr/0017).

Pure. An open stream proves little: where a node fails, the streams of its workers close seconds apart. Who has not answered in
time is left out as long as the others are enough, which forced.py sees to.
"""

from __future__ import annotations

from collections.abc import Iterable

from regroup_operator.model.worker import DISCONNECTED, UNHEARD, UNRESPONSIVE, Bounds, Standing, Wait, Worker
from regroup_operator.plan.facts.stalls import ANSWER_S, SCRIPT_RESTART_S

_UNREACHED = (DISCONNECTED, UNRESPONSIVE, UNHEARD)
ANSWER_EACH_S = 0.0005
"""So long the operator takes to hear one answer. Where thousands are asked at once, the last of them is heard seconds later."""

MANY = 50
"""Members of whom all are asked."""


def find_asked(able: list[Worker], members: tuple[Worker, ...], culprit: Worker, bounds: Bounds) -> list[Worker]:
    """Return the workers that have said nothing since the group broke, if the reason may be a node's failure.

    Such a reason is a worker that cannot be reached, or an unknown one. A node's failure ends all its workers, but their streams
    close seconds apart. Processes of a script end one after the other, so that the first says nothing about the rest.

    In a job of more than MANY members the loss of a worker casts doubt on the workers of its node alone. The answers of thousands
    take longer than one more generation, should a second node have failed.
    """
    silent = [(worker, at_s) for worker in members if (at_s := _silent_since_s(worker)) is not None]
    is_open = culprit.standing == Standing.BROKEN or (culprit.standing == Standing.DIED and not bounds.session)
    if not silent and not is_open:
        return []
    if not is_open and len(members) > MANY:
        nodes = {worker.pod.node for worker, _ in silent if worker.pod is not None}
        able = [w for w in able if w.pod is not None and w.pod.node in nodes]
    return silent_since(able, max((at_s for _, at_s in silent), default=culprit.since_s))


def wait_for_answers(asked: list[Worker], num_able: int, bounds: Bounds, now_s: float) -> Wait | None:
    """Return the wait for the answers of those `asked`; None: they have had their time. It is longer where `num_able` workers, of
    whom each may be asked, are thousands."""
    answer_s = max(ANSWER_S if bounds.session else SCRIPT_RESTART_S, num_able * ANSWER_EACH_S)
    waits = [w for w in asked if now_s < _asked_s(w, now_s) + answer_s]
    if not waits:
        return None
    return Wait(
        "Asking",
        f"Waiting up to {answer_s:g} s for workers to answer a ping before the next generation starts.",
        max(_asked_s(w, now_s) for w in waits) + answer_s,
        ask=pod_uids(waits),
    )


def silent_since(workers: Iterable[Worker], since_s: float) -> list[Worker]:
    """Return the workers with an open stream that have said nothing since then."""
    return [w for w in workers if w.connected and w.session is not None and w.session.heard_at_s < since_s]


def pod_uids(workers: Iterable[Worker]) -> frozenset[str]:
    """Return whom to ask."""
    return frozenset(w.uid for w in workers)


def _silent_since_s(worker: Worker) -> float | None:
    """Return since when nothing was heard of a member that is lost because it cannot be reached; None: it is not."""
    session = worker.session
    if worker.standing != Standing.LOST or worker.why not in _UNREACHED or session is None:
        return None
    return session.unanswered_since_s if session.closed_at_s is None else session.closed_at_s


def _asked_s(worker: Worker, now_s: float) -> float:
    """Return since when a worker has an answer to give; `now_s`: it is asked now."""
    unanswered_s = worker.session.unanswered_since_s if worker.session is not None else None
    return now_s if unanswered_s is None else unanswered_s
