"""Judge a line of `kubectl get trainingjobs -o wide` against the trainers' own trace. Pure.

A cell is true if some moment between `LAG_S` before the question and the answer makes it true (`Step`: `STEP_LAG_S`). A process
is *surely* ready from its first commit to its last, and *perhaps* ready from the time its script was built to its last commit:
what it waits for in between (a step boundary, the group) no trace shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.trace import Trace

LAG_S, STEP_LAG_S = 2.0, 12.0
STEADY_S = 0.5
"""A group that commits at least this often in the whole window, in one generation, is Running and nothing else; and one
whose next commit follows the answer by no more is in the middle of a step."""


@dataclass(frozen=True)
class Row:
    """One line of kubectl. `before` and `after` enclose the moment it was true, in seconds since the epoch."""

    before: float
    after: float
    cells: dict[str, str]


@dataclass(frozen=True)
class Asked:
    """At time `t` the user had asked for so many replicas, and had the API server's answer."""

    t: float
    replicas: int


def judge(row: Row, trace: Trace, asked: Sequence[Asked]) -> list[str]:
    """Return a sentence for every cell of the row that was never true in its window."""
    window = (row.before - LAG_S, row.after)
    if not row.cells["STATE"]:  # the operator has written nothing yet
        late = window[0] > asked[0].t
        return [f"no state {window[0] - asked[0].t + LAG_S:.1f} s after the job was made"] if late else []
    return [
        f"{problem}; window {window[0]:.2f} to {window[1]:.2f}: {row.cells}"
        for problem in (
            *_state(row.cells["STATE"], window, trace),
            *_step(row, trace),
            *_generation(row, window, trace),
            *_ready(row, window, trace, asked),
        )
    ]


def _state(state: str, window: tuple[float, float], trace: Trace) -> Iterator[str]:
    times = [c.t for c in trace.commits]
    inside = [t for t in times if window[0] <= t <= window[1]]
    marks = [window[0], *inside, window[1]]
    near = {c.generation for c in trace.commits if window[0] <= c.t <= window[1] + STEADY_S}
    steady = len(near) == 1 and max(b - a for a, b in itertools.pairwise(marks)) <= STEADY_S
    if state == "Running" and not near:
        yield "Running, but nobody committed"
    if state not in ("Running", "Succeeded") and steady:
        yield f"{state}, but the group committed all the time"
    if state in ("Pending", "Starting") and times and times[0] < window[0]:
        yield f"{state}, but the first step was committed long ago"
    if state == "Succeeded" and window[1] < trace.ended_at():
        yield "Succeeded, but not every process had finished"
    if state != "Succeeded" and window[0] > trace.ended_at():
        yield f"{state}, but the job had ended"
    if state in ("Failed", "Waiting"):
        yield f"{state}, but nothing failed for good and members were never too few"


def _step(row: Row, trace: Trace) -> Iterator[str]:
    if not row.cells["STEP"]:
        if trace.step_at(row.before - STEP_LAG_S) >= 0:
            yield "no step, but steps were committed long ago"
        return
    step = int(row.cells["STEP"])
    # A progress report counts committed steps; the trace numbers them from 0.
    if step > trace.step_at(row.after) + 1:
        yield f"step {step} was not yet committed"
    if step < trace.step_at(row.before - STEP_LAG_S):
        yield f"step {step} lags behind {trace.step_at(row.before - STEP_LAG_S)}"


def _generation(row: Row, window: tuple[float, float], trace: Trace) -> Iterator[str]:
    shown = int(row.cells["GENERATION"] or 0)
    trained = [c.generation for c in trace.commits if c.t <= window[0]]
    if trained and shown < trained[-1]:
        yield f"generation {shown} lags behind {trained[-1]}"
    later = [c.generation for c in trace.commits if c.t <= row.after + LAG_S]
    if row.cells["STATE"] == "Running" and (not later or shown > max(later)):
        yield f"generation {shown} is shown as Running, but nobody trains in it within {LAG_S} s"


def _ready(row: Row, window: tuple[float, float], trace: Trace, asked: Sequence[Asked]) -> Iterator[str]:
    ready, wanted = (int(part) for part in row.cells["READY"].split("/"))
    before = [a.replicas for a in asked if a.t <= window[0]][-1:]
    possible = {*before, *(a.replicas for a in asked if window[0] < a.t <= window[1])}
    if wanted not in possible:
        yield f"{wanted} wanted, but the user asked for {sorted(possible)}"
    moments = _moments(window, trace)
    least = min(min(_pods(trace, t, surely=True), wanted) for t in moments)
    most = max(min(_pods(trace, t, surely=False), wanted) for t in moments)
    if not least <= ready <= most:
        yield f"{ready} ready, but the trace says {least} to {most}"


def _moments(window: tuple[float, float], trace: Trace) -> list[float]:
    """Return the window's ends and every time in it at which the number of ready workers can change."""
    edges = [edge for life in _lives(trace) for edge in (life.built, life.first, life.last)]
    inside = [t for edge in edges for t in (edge - 0.001, edge + 0.001) if window[0] <= t <= window[1]]
    return [*window, *inside]


@dataclass(frozen=True)
class _Life:
    pod: str
    built: float
    first: float
    last: float


def _lives(trace: Trace) -> list[_Life]:
    built = {(b["pod"], b["pid"]): float(str(b["t"])) for b in trace.built}
    key: Callable[..., tuple[str, int]] = lambda c: (c.pod, c.pid)  # noqa: E731
    lives = []
    for (pod, pid), commits in itertools.groupby(sorted(trace.commits, key=lambda c: (c.pod, c.pid, c.t)), key):
        times = [c.t for c in commits]
        lives.append(_Life(pod, built.pop((pod, pid), times[0]), times[0], times[-1]))
    # Built, and killed or drained before its first commit.
    lives += [_Life(str(pod), t, float("inf"), float("inf")) for (pod, _), t in built.items()]
    return lives


def _pods(trace: Trace, t: float, *, surely: bool) -> int:
    lives = _lives(trace)
    return len({life.pod for life in lives if (life.first if surely else life.built) <= t <= life.last})
