"""Count failures against spec.recovery.maxRestarts, and say how a failure's log is read.

Pure. Counted per job: trainer processes that ended by themselves with a non-zero code or a signal, and containers that
failed; not deletions, drains or lost nodes. The (maxRestarts + 1)-th within windowSeconds fails the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regroup_operator.model.plan import Failure
from regroup_operator.model.records import EVICTED, PREEMPTED

KUBECTL_LOGS = "kubectl logs --namespace={namespace} {pod} --container=trainer{previous}"
"""How a worker's log is read in a cluster; `regroup run` has another way."""


@dataclass(frozen=True)
class Judged:
    """`recent`: times of the failures inside the window, oldest first. `message` is set when the job has to fail."""

    recent: tuple[float, ...]
    message: str | None = None


def judge_restarts(
    *, recent: Sequence[float], new: Sequence[Failure], max_restarts: int, window_s: float, now: float, logs: str
) -> Judged:
    """Return the failures that still count, and the sentence that fails the job if there are too many. `logs`: how a log is
    read, with the fields of KUBECTL_LOGS."""
    counted = tuple(sorted(t for t in (*recent, *(f.at for f in new)) if t > now - window_s))
    if len(counted) <= max_restarts or not new:
        return Judged(counted[-(max_restarts + 1) :])
    last = max(new, key=lambda f: f.at)
    line = f': "{last.last_line}"' if last.last_line else ""
    count = f"{len(counted)} failure" + ("" if len(counted) == 1 else "s")
    return Judged(
        counted[-(max_restarts + 1) :],
        f"{exit_words(last)}{line}; {count} in {window_s:.0f} s, "
        f"spec.recovery.maxRestarts allows {max_restarts}. {log_words(last, logs)}",
    )


def exit_words(failure: Failure) -> str:
    """Return who ended and how: "Worker 1 (pod digits-worker-1-0) ended with exit code 1"."""
    pod = f" (pod {failure.pod})" if failure.pod else ""
    if failure.reason in (EVICTED, PREEMPTED):
        return f"Worker {failure.worker}{pod} was {failure.reason.lower()} ({failure.detail})"
    why = f" ({failure.reason}: {failure.detail})" if failure.reason else ""
    return f"Worker {failure.worker}{pod} ended with {_code(failure.exit_code)}{why}"


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
    """Return how the log of what failed is read. A process's is in the container that still runs; a container's is not."""
    previous = " --previous" if failure.container else ""
    return logs.format(namespace=failure.namespace, pod=failure.pod, previous=previous)


def _code(code: int | None) -> str:
    if code is None:
        return "an unknown exit code"
    if code == 0:
        return "exit code 0 before its last step was committed"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
