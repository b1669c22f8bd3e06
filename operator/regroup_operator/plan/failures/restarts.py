"""Count failures against spec.recovery.maxRestarts, and say how a failure's log is read. Pure.

The count is for the whole job. Trainer processes that ended by themselves with a non-zero code or a signal count, and containers
that failed. Deletions, drains and lost nodes do not. The (maxRestarts + 1)-th failure within windowSeconds fails the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil

from regroup_operator.api.status import Restarts
from regroup_operator.model.plan import Failure, Verdict, timestamp
from regroup_operator.model.records import EVICTED, PREEMPTED

KUBECTL_LOGS = "kubectl logs --namespace={namespace} {pod}{container}{previous}"
"""The command that reads a worker's log in a cluster; `regroup run` has another way."""


MAX_RECENT = 1000
"""Number of times that the status has at most, about. Thousands of processes may fail within a second, and etcd takes no object
above 1.5 MiB."""

TOO_MANY_RESTARTS = "TooManyRestarts"

Recent = tuple[tuple[float, int], ...]
"""(Time, how many failures), oldest first."""


@dataclass(frozen=True)
class RestartBudget:
    """`recent`: the failures inside the window. `verdict`: why the job has to fail; None: it has not."""

    recent: Recent
    verdict: Verdict | None = None


def judge_restarts(
    *, recent: Recent, new: Sequence[Failure], max_restarts: int, window_s: float, now: float, logs: str
) -> RestartBudget:
    """Return the failures that still count, and the sentence that fails the job if there are too many. `logs`: how a log is read,
    with the fields of KUBECTL_LOGS.

    Failures within one second are kept together, with the time of the last one. If the window has more than MAX_RECENT seconds,
    those within a MAX_RECENT-th of it are."""
    inside = [(t, n) for t, n in (*recent, *((f.at, 1) for f in new)) if t > now - window_s]
    num_counted = sum(n for _, n in inside)
    kept = _newest(_together(inside, max(1, ceil(window_s / MAX_RECENT))), max_restarts + 1)
    if num_counted <= max_restarts or not new:
        return RestartBudget(kept)
    # The first that is one too many: others that fail a moment later may do so as a consequence.
    in_order = sorted(new, key=lambda f: f.at)
    culprit = in_order[max(0, max_restarts - num_counted + len(new))]
    line = f': "{culprit.last_line}"' if culprit.last_line else ""
    count = f"{num_counted} failure" + ("" if num_counted == 1 else "s")
    text = (
        f"{exit_words(culprit)}{line}; {count} in {window_s:.0f} s, "
        f"spec.recovery.maxRestarts allows {max_restarts}. {log_words(culprit, logs)}"
    )
    return RestartBudget(kept, Verdict(TOO_MANY_RESTARTS, text, culprit.script_code, culprit.pod))


def _together(failures: Iterable[tuple[float, int]], width_s: int) -> Recent:
    found: dict[int, tuple[float, int]] = {}
    for at, number in failures:
        latest, count = found.get(int(at // width_s), (at, 0))
        found[int(at // width_s)] = max(latest, at), count + number
    return tuple(sorted(found.values()))


def _newest(recent: Recent, most: int) -> Recent:
    """Return the last `most` failures: older ones cannot matter."""
    kept: list[tuple[float, int]] = []
    for at, number in reversed(recent):
        if most <= 0:
            break
        kept.append((at, min(number, most)))
        most -= number
    return tuple(reversed(kept))


def read_recent(restarts: Restarts) -> Recent:
    """Return the counted failures of status.restarts."""
    times = [datetime.fromisoformat(at).timestamp() for at in restarts.recent]
    return tuple(zip(times, restarts.recent_counts or [1] * len(times), strict=True))


def with_recent(restarts: Restarts, recent: Recent) -> Restarts:
    """Return status.restarts with these counted failures; without `recentCounts` where each is one failure."""
    counts = [number for _, number in recent] if any(number > 1 for _, number in recent) else None
    return restarts.with_fields(recent=[timestamp(at) for at, _ in recent], recent_counts=counts)


def exit_words(failure: Failure) -> str:
    """Return who ended and how: "Worker 1 (pod digits-worker-1-0) ended with exit code 1"."""
    pod = f" (pod {failure.pod})" if failure.pod else ""
    if failure.reason in (EVICTED, PREEMPTED):
        return f"Worker {failure.worker}{pod} was {failure.reason.lower()} ({failure.detail})"
    why = f" ({failure.reason}: {failure.detail})" if failure.reason else ""
    if failure.init:
        return f"Init container {failure.init} of worker {failure.worker}{pod} ended with {_code(failure.exit_code)}"
    after = f", after the script had returned 0 in {_members(failure.returned)}" if failure.returned else ""
    return f"Worker {failure.worker}{pod} ended with {_code(failure.exit_code)}{why}{after}"


def restart_cause(failure: Failure) -> str:
    """Return why a process or container has to start again, in one word: Hung, OOMKilled, Signal or ExitCode."""
    if failure.hung:
        return "Hung"
    if failure.reason == "OOMKilled":
        return failure.reason
    code = failure.exit_code
    # Containers and shells give 128 + the signal; 255 is exit(-1).
    return "Signal" if code is not None and (code < 0 or 128 < code <= 128 + 64) else "ExitCode"


def log_words(failure: Failure, logs: str) -> str:
    """Return how the log of what failed is read. After the failure of a process its container still runs; if the container itself
    failed, its log is that of the previous one."""
    previous = " --previous" if failure.container and not failure.init else ""  # it may wait for its next start
    # The pod's annotation names its trainer's container as the one that kubectl shows.
    container = f" --container={failure.init}" if failure.init else ""
    return logs.format(namespace=failure.namespace, pod=failure.pod, container=container, previous=previous)


def _members(ranges: str) -> str:
    return f"worker {ranges}" if ranges.replace(".", "").isdecimal() else f"workers {ranges}"


def _code(code: int | None) -> str:
    if code is None:
        return "an unknown exit code"
    if code == 0:
        return "exit code 0 before its last step was committed"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
