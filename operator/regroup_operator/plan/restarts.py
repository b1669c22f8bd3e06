"""Count failures against spec.recovery.maxRestarts.

Pure. Counted per job: trainer processes that ended by themselves with a non-zero code or a signal, and containers that
failed; not deletions, drains or lost nodes. The (maxRestarts + 1)-th within windowSeconds fails the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regroup_operator.model.plan import Failure


@dataclass(frozen=True)
class Verdict:
    """`recent`: times of the failures inside the window, oldest first. `message` is set when the job has to fail."""

    recent: tuple[float, ...]
    message: str | None = None


def judge_restarts(
    *, recent: Sequence[float], new: Sequence[Failure], max_restarts: int, window_s: float, now: float
) -> Verdict:
    """Return the failures that still count, and the sentence that fails the job if there are too many."""
    counted = tuple(sorted(t for t in (*recent, *(f.at for f in new)) if t > now - window_s))
    if len(counted) <= max_restarts or not new:
        return Verdict(counted[-(max_restarts + 1) :])
    last = max(new, key=lambda f: f.at)
    code = _code(last.exit_code)
    line = f': "{last.last_line}"' if last.last_line else ""
    count = f"{len(counted)} failure" + ("" if len(counted) == 1 else "s")
    return Verdict(
        counted[-(max_restarts + 1) :],
        f"Worker {last.worker} ended with {code}{line}; {count} in {window_s:.0f} s, "
        f"spec.recovery.maxRestarts allows {max_restarts}. Read its log: kubectl logs -p.",
    )


def _code(code: int | None) -> str:
    if code is None:
        return "an unknown exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
