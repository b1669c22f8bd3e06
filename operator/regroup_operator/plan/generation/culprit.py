"""Name the worker that broke a generation, in one sentence. Pure; trouble.py and forced.py decide, this only finds the words.

A broken group is noticed by its survivors first: each reports a failed collective, and most of them name the rank that they
lost. So the worker to name is the one that they accuse and that did not itself report a broken group. A worker that lost one
of several processes has a broken group, too. The first of them is named before all others, with exit code and last line.

The processes of a script end with an error of their own after a loss. So a silent member is named before such an end.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from regroup.protocol.text import shorten
from regroup_operator.model.records import ProcessExit
from regroup_operator.model.worker import Current, Standing, Worker

MAX_WORDS = 200
"""Characters of what a process says of its failed collective, and of its last line."""
OOM_KILLED = "OOMKilled"
"""Reason of an exit for lack of memory; the cause of its incident, too."""
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Ends that come from outside of a process. The line that it wrote last says nothing of them."""
OVERDUE = "did not enter the generation in time"


@dataclass(frozen=True)
class Culprit:
    """`id`, `cause`: of the incident. `text`: subject and verb, for example "worker 1 lost a process (signal 9)"."""

    id: str
    cause: str
    text: str


def name_culprit(current: Current, members: Sequence[Worker], broke: Worker) -> Culprit:
    """Return whom to name where `broke` is the worker that was seen to leave the generation first.

    A worker of which a process hung is named before all others: theirs failed because that process was killed.
    """
    broke = next((w for w in members if w.why == "Hung"), broke)
    exits = [
        (ended, w)
        for w in members
        if (w.standing == Standing.BROKEN or w is broke) and (ended := exit_of(w, (current.number,)))
    ]
    ended, exited = min(exits, key=lambda found: found[0].at_s, default=(None, None))
    silent = _silent(members)
    if ended is not None and exited is not None and silent is not None and _may_follow(ended, broke, current):
        words = f"{_subject(silent)} cannot be reached, and worker {exited.id} {exit_words(ended)}"
        return Culprit(str(silent.id), silent.why or "CollectiveFailed", words)
    if broke.standing != Standing.BROKEN or broke.why == "Hung":
        return Culprit(str(broke.id), broke.why, f"{_subject(broke)} {_verb(broke, current)}")
    if ended is not None and exited is not None:
        cause = OOM_KILLED if ended.reason == OOM_KILLED else "ProcessExited"
        return Culprit(str(exited.id), cause, f"worker {exited.id} {exit_words(ended)}")
    accused, accuser = _accused(current, members)
    if accused is None:
        return Culprit(str(broke.id), broke.why, f"worker {broke.id} {_verb(broke, current)}")
    by = f" by worker {accuser.id}" if accuser is not None else ""
    return Culprit(str(accused.id), accused.why or broke.why, f"{_subject(accused)} cannot be reached{by}")


def _accused(current: Current, members: Sequence[Worker]) -> tuple[Worker | None, Worker | None]:
    """Return the member that most survivors have lost, with one of them. Without an accusation: a silent member."""
    unbroken = {w.uid: w for w in members if w.standing != Standing.BROKEN}
    accusations: Counter[str] = Counter()
    accusers: dict[str, Worker] = {}
    for worker in members:
        fault = worker.session.fault if worker.session else None
        if worker.standing != Standing.BROKEN or worker.session is None or fault is None or fault.peer not in unbroken:
            continue
        if worker.session.fault_generation == current.number:
            accusations[fault.peer] += 1
            accusers.setdefault(fault.peer, worker)
    if accusations:
        uid = max(accusations, key=lambda uid: (accusations[uid], unbroken[uid].id))
        return unbroken[uid], accusers[uid]
    return _silent(members), None


def _silent(members: Sequence[Worker]) -> Worker | None:
    return next((w for w in members if w.standing == Standing.SILENT), None)


def _may_follow(ended: ProcessExit, broke: Worker, current: Current) -> bool:
    """Return whether a process may have ended because another worker was lost. A session's processes outlive such a loss."""
    is_raised = ended.exit_code not in (0, *FROM_OUTSIDE) and not ended.reason
    return current.launches and is_raised and broke.why in ("CollectiveFailed", "ProcessExited")


def _subject(worker: Worker) -> str:
    """Return the worker, with its node where what happened may be the node's doing."""
    elsewhere = worker.pod is None or not worker.pod.node
    if elsewhere or worker.why in ("ProcessExited", "CollectiveFailed", "PodDeleted", "Stopped", "OOMKilled", "Hung"):
        return f"worker {worker.id}"
    assert worker.pod is not None
    return f"worker {worker.id} on node {worker.pod.node}"


def exit_of(worker: Worker, generations: Container[int]) -> ProcessExit | None:
    """Return the first process of a worker that ended by itself in one of these generations, None if there is none."""
    exits = worker.session.exits if worker.session is not None else ()
    return next((e for e in exits if e.generation in generations and not e.hung), None)


def _reported_exit(worker: Worker) -> ProcessExit | None:
    """Return the exit that a worker reported last, if it has reported nothing else since. It may have entered no generation."""
    session = worker.session
    if session is None or session.fault is None or session.fault.cause != "exit" or not session.exits:
        return None
    return session.exits[-1]


def exit_words(ended: ProcessExit) -> str:
    """Return the verb for a process that ended: `lost a process (exit code 1: "ValueError: boom")`."""
    if ended.reason == OOM_KILLED:
        return f"lost a process ({ended.reason}: {ended.detail})"
    code = f"signal {-ended.exit_code}" if ended.exit_code < 0 else f"exit code {ended.exit_code}"
    line = "" if ended.exit_code in FROM_OUTSIDE else shorten(ended.last_line, MAX_WORDS)
    return f'lost a process ({code}: "{line}")' if line else f"lost a process ({code})"


def _verb(worker: Worker, current: Current) -> str:
    fault = worker.session.fault if worker.session else None
    if worker.why == "Hung":
        exits = worker.session.exits if worker.session else ()
        return "lost a process that hung" + next((f" ({e.hung})" for e in reversed(exits) if e.hung), "")
    ended = exit_of(worker, (current.number,)) or _reported_exit(worker)
    if ended is not None and worker.why in ("ProcessExited", ended.reason):
        return exit_words(ended)
    if worker.why == "OOMKilled" and worker.pod is not None:
        limit = f": limit {worker.pod.memory_limit}" if worker.pod.memory_limit else ""
        return f"was killed for lack of memory (OOMKilled{limit})"
    if worker.why == "CollectiveFailed" and fault is not None and fault.cause == "hung":
        return f"lost a process that hung ({shorten(fault.message.rstrip('.'), MAX_WORDS)})"
    if worker.why == "CollectiveFailed" and fault is not None and fault.message and fault.cause != "exit":
        return f"reported a failed collective ({shorten(fault.message.rstrip('.'), MAX_WORDS)})"
    cause = worker.session.condition.cause if worker.session else None
    if worker.why == "Stopped" and cause:
        return f"has stopped ({cause.rstrip('.')})"
    return {
        "PodDeleted": "was lost with its pod",
        "PodFailed": "failed",
        "Drained": "left at the end of its grace period",
        "Disconnected": "cannot be reached",
        "Unresponsive": "does not answer",
        "Unheard": "cannot be reached from other nodes",
        "NeverConnected": "has never connected",
        "NodeRestarted": "was restarted, because the node had stopped its containers",
        "ContainerRestarted": "was restarted with its container",
        "ProcessExited": "lost a process",
        "CollectiveFailed": "reported a failed collective",
        "Stopped": "has stopped",
    }.get(worker.why, f"did not {'form' if worker.standing == Standing.FORMING else 'enter'} the generation in time")
