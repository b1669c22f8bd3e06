"""Judge a line of `kubectl get trainingjobs -o wide` against the trainers' own trace. Pure.

A cell is true if some moment between `LAG_S` before the question and the answer makes it true (`Step`: `STEP_LAG_S`; `Ready` of
a job that starts: `START_LAG_S`). A process
is *surely* ready from its first commit to its last, and *perhaps* ready from the time its script was built to its last commit:
what it waits for in between (a step boundary, the group) no trace shows.

Every column is judged. A script that does not use the library says nothing of its steps: Step, Progress, Loss, ETA and
Samples/s are empty; its workers may be ready without a process, and a planned change starts its processes again (Starting).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.trace import Trace

LAG_S, STEP_LAG_S, START_LAG_S = 2.0, 12.0, 7.0
SEEN_S = 13.0
"""The operator writes every ten seconds at least, and kubectl rounds."""
SILENCE_S = 9.0
"""disconnectSeconds, the probes of a connection, and LAG_S: a script says nothing of its steps, so its silence shows no sooner."""
AHEAD_S = 1.0
"""The State may be ahead by so much: Finishing is written before the processes are told to leave their loops, and a script's
change before its processes are told to end."""
EXIT_S = 3.0
"""A script says that it is done in its last line; its process and Python's end follow, in a second or more on a busy machine, and
the job is Finishing until the last of them has ended."""
KUBELET_S = 2.0
"""So long does the kubelet leave a process whose pod was deleted without grace."""
RESTART_LAG_S = 60.0
"""A pod on a node without power is made anew once the node is known to be lost."""
SPEED_OVER_S, FACTOR = 60.0, 2.0
"""A rate is measured over some seconds before it is reported."""
STEADY_S = 0.5
"""A group that commits at least this often in the whole window, in one generation, is Running and nothing else; and one
whose next commit follows the answer by no more is in the middle of a step."""


UNLED_S = 12.0
"""For so long after a leader's death nobody else leads: a lease of 15 s, renewed up to 2 s before."""
HOLE_S = 10.0
"""No longer than this without a line of kubectl, or a false one could go unseen. Usually it takes half a second."""


@dataclass(frozen=True)
class Row:
    """One line of kubectl. `before` and `after` enclose the moment it was true, in seconds since the epoch."""

    before: float
    after: float
    cells: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """At time `t` the test broke something, for which so many processes or pods have to start again. `silent`: nobody hears of
    it before disconnectSeconds have passed. `deleted`: the pod that was deleted; the kubelet leaves it two seconds, in which it
    may go on training with the others, and nobody has to call it ready."""

    t: float
    restarts: int
    silent: bool = False
    deleted: str = ""


@dataclass(frozen=True)
class Run:
    """What the user knows of the job beside its trace."""

    asked: Sequence[Asked]
    faults: Sequence[Fault] = ()
    total_steps: int | None = None
    global_batch: int | None = None
    tier: str = "Session"


@dataclass(frozen=True)
class Asked:
    """At time `t` the user had asked for so many replicas, and had the API server's answer."""

    t: float
    replicas: int


def judge(row: Row, trace: Trace, run: Run) -> list[str]:
    """Return a sentence for every cell of the row that was never true in its window."""
    window, asked = (row.before - LAG_S, row.after), run.asked
    if row.cells["STATE"] in ("", "AwaitingOperator"):  # the operator has written nothing yet
        late = window[0] > asked[0].t
        return [f"no state {window[0] - asked[0].t + LAG_S:.1f} s after the job was made"] if late else []
    return [
        f"{problem}; window {window[0]:.2f} to {window[1]:.2f}: {row.cells}"
        for problem in (
            *_state(row.cells["STATE"], window, trace, run),
            *((*_step(row, trace), *_progress(row, trace, run)) if run.tier == "Session" else _no_steps(row)),
            *_speed(row, trace, run),
            *_restarts(row, window, run),
            *_generation(row, window, trace, run),
            *_ready(row, window, trace, run),
            *_ages(row, trace, asked),
        )
    ]


def _state(state: str, window: tuple[float, float], trace: Trace, run: Run) -> Iterator[str]:
    times = [c.t for c in trace.commits]
    inside = [t for t in times if window[0] <= t <= window[1]]
    marks = [window[0], *inside, window[1]]
    near = {c.generation for c in trace.commits if window[0] <= c.t <= window[1] + STEADY_S}
    if run.tier == "Script":
        marks = [window[0], *(t for t in times if window[0] <= t <= window[1] + AHEAD_S), window[1] + AHEAD_S]
        near |= {c.generation for c in trace.commits if window[1] <= c.t <= window[1] + AHEAD_S}
    unheard = run.tier == "Script" and any(f.silent and f.t <= window[1] <= f.t + SILENCE_S for f in run.faults)
    steady = len(near) == 1 and max(b - a for a, b in itertools.pairwise(marks)) <= STEADY_S
    if state == "Running" and not near and not unheard:
        yield "Running, but nobody committed"
    if state not in ("Running", "Finishing", "Succeeded") and steady:
        yield f"{state}, but the group committed all the time"
    again = state == "Starting" and run.tier == "Script"
    if state in ("Pending", "Starting") and times and times[0] < window[0] and not again:
        yield f"{state}, but the first step was committed long ago"
    if state == "Finishing" and times and window[1] + AHEAD_S < times[-1]:
        yield "Finishing, but steps were committed after that"
    if state == "Succeeded" and window[1] < trace.ended_at():
        yield "Succeeded, but not every process had finished"
    if state != "Succeeded" and window[0] > trace.ended_at() + (EXIT_S if state == "Finishing" else 0.0):
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


def _no_steps(row: Row) -> Iterator[str]:
    for column in ("STEP", "PROGRESS", "LOSS", "ETA", "SAMPLES/S"):
        if row.cells[column]:
            yield f"{column} {row.cells[column]}, but nothing is known of a script's steps"


def _progress(row: Row, trace: Trace, run: Run) -> Iterator[str]:
    step, shown = row.cells["STEP"], row.cells["PROGRESS"]
    want = f"{100 * int(step) // run.total_steps}%" if step and run.total_steps else ""
    if shown != want and not (not shown and step == "0"):
        yield f"progress {shown or 'empty'}, but step {step} of {run.total_steps} is {want or 'none'}"
    loss = row.cells["LOSS"]
    if loss and not 0.0 <= float(loss) < 100.0:
        yield f"loss {loss} is none of this model"
    # Who adopts a state says its step before it has a loss.
    settled = [
        c for c in trace.commits if c.t < row.before - STEP_LAG_S and str(c.generation) == row.cells["GENERATION"]
    ]
    if not loss and settled:
        yield f"no loss, but step {step} had one"


def _speed(row: Row, trace: Trace, run: Run) -> Iterator[str]:
    """ETA and Samples/s, within FACTOR of the fastest and slowest second of what they may have been measured in."""
    eta, rate = row.cells["ETA"], row.cells["SAMPLES/S"]
    if eta and row.cells["STATE"] != "Running":
        yield f"ETA {eta}, but the job is {row.cells['STATE']}"
    steps = trace.intervals_s(since=row.before - STEP_LAG_S - SPEED_OVER_S, until=row.after)
    if run.global_batch is None or run.total_steps is None or not steps:
        return
    fastest, slowest = min(steps) / FACTOR, max(steps) * FACTOR
    if rate and not run.global_batch / slowest <= float(rate) <= run.global_batch / fastest:
        yield f"{rate} samples/s, but a step of {run.global_batch} took {min(steps):.3f} to {max(steps):.3f} s"
    left = run.total_steps - int(row.cells["STEP"] or 0)
    if eta and not left * fastest - 1 <= seconds(eta) <= left * slowest + 60:
        yield f"ETA {eta}, but {left} steps are left, each of {min(steps):.3f} to {max(steps):.3f} s"


def _restarts(row: Row, window: tuple[float, float], run: Run) -> Iterator[str]:
    shown = int(row.cells["RESTARTS"] or 0)
    most = sum(f.restarts for f in run.faults if f.t <= window[1])
    # The kubelet leaves a deleted pod a moment, in which its worker may hand over: that is a drain, and no restart.
    least = sum(f.restarts - (f.deleted != "") for f in run.faults if f.t <= window[0] - RESTART_LAG_S)
    if not least <= shown <= most:
        yield f"{shown} restarts, but the test broke {least} to {most}"


def _ages(row: Row, trace: Trace, asked: Sequence[Asked]) -> Iterator[str]:
    """Age counts from the creation; Seen is small while the job goes on, and counts from the end then."""
    age, seen, created = row.cells["AGE"], row.cells["SEEN"], asked[0].t
    for what, text, newest, oldest in (
        ("age", age, row.before - created, row.after - created),
        ("seen", seen, 0.0, SEEN_S + max(0.0, row.after - trace.ended_at())),
    ):
        if what == "seen" and not row.cells["GENERATION"]:
            continue  # before the first generation only changes are written
        low, high = seconds(text), seconds(text) + _precision(text)
        if not text or high < newest - 2.0 or low > oldest + 2.0:
            yield f"{what} {text or 'empty'}, but it is {newest:.0f} to {oldest:.0f} s"


def unwritten(rows: Sequence[Row], since: float, until: float) -> list[str]:
    """Return what is wrong with Seen between two times in which no operator wrote: each line must carry its age."""
    found = [row for row in rows if since <= row.before and row.after <= until]
    problems = holes(found, since, until)
    for row in found:
        shown, least = row.cells["SEEN"], row.before - since
        # kubectl leaves out what is left of a second, and the last write may be on its way when the writer dies.
        if not shown or seconds(shown) + 2 * _precision(shown) < least:
            problems.append(f"seen {shown or 'empty'}, but nobody has written for {least:.1f} s: {row.cells}")
    return problems


def holes(rows: Sequence[Row], begun: float, ended: float) -> list[str]:
    """Return the times between `begun` and `ended` of which no line tells, longer than HOLE_S."""
    marks = [begun, *(row.after for row in rows), ended]
    return [
        f"no line for {b - a:.1f} s, from {a:.2f} to {b:.2f}" for a, b in itertools.pairwise(marks) if b - a > HOLE_S
    ]


def seconds(text: str) -> float:
    """Return the seconds of a length of time as kubectl writes it (45s, 3m20s, 2h5m); 0 for none."""
    return sum(float(n) * _UNITS[unit] for n, unit in re.findall(r"(\d+)([smhd])", text))


def _precision(text: str) -> float:
    units = [_UNITS[unit] for unit in re.findall(r"[smhd]", text)]
    return min(units, default=1.0)


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _generation(row: Row, window: tuple[float, float], trace: Trace, run: Run) -> Iterator[str]:
    shown = int(row.cells["GENERATION"] or 0)
    trained = [c.generation for c in trace.commits if c.t <= window[0]]
    if trained and shown < trained[-1]:
        yield f"generation {shown} lags behind {trained[-1]}"
    # Where a pod was deleted without grace its process may not hear of the next generation: the others train on with it until
    # the kubelet ends it.
    left_s = max((f.t + KUBELET_S - row.after for f in run.faults if f.deleted and f.t <= row.after), default=0.0)
    later = [c.generation for c in trace.commits if c.t <= row.after + LAG_S + max(0.0, left_s)]
    if run.tier == "Script":  # it counts the groups that have formed: not every generation gets so far
        return
    if row.cells["STATE"] == "Running" and (not later or shown > max(later)):
        yield f"generation {shown} is shown as Running, but nobody trains in it within {LAG_S} s"


def _ready(row: Row, window: tuple[float, float], trace: Trace, run: Run) -> Iterator[str]:
    asked, ended = run.asked, row.cells["STATE"] in ("Finishing", "Succeeded", "Failed")
    if ended or not row.cells["READY"]:
        if not ended or row.cells["READY"]:
            yield f"ready is {row.cells['READY']!r} in state {row.cells['STATE']}: empty after the last step, and only then"
        return
    ready, wanted = (int(part) for part in row.cells["READY"].split("/"))
    before = [a.replicas for a in asked if a.t <= window[0]][-1:]
    possible = {*before, *(a.replicas for a in asked if window[0] < a.t <= window[1])}
    if wanted not in possible:
        yield f"{wanted} wanted, but the user asked for {sorted(possible)}"
    starts = row.cells["STATE"] in ("Pending", "Starting")
    counted = (row.before - (START_LAG_S if starts else LAG_S), row.after)
    moments = _moments(counted, trace)
    gone = {f.deleted: f.t for f in run.faults if f.deleted}
    moments += [t for t in gone.values() if counted[0] <= t <= counted[1]]
    least = min(
        min(len(_ready_pods(trace, t, surely=True) - {p for p in gone if gone[p] <= t}), wanted) for t in moments
    )
    most = (
        max(min(len(_ready_pods(trace, t, surely=False)), wanted) for t in moments) if run.tier == "Session" else wanted
    )
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
    """Return the processes' lives. A container that is started again gives out the same process ids: each `built` begins one."""
    built: dict[tuple[str, int], list[float]] = {}
    commits: dict[tuple[str, int], list[float]] = {}
    for b in trace.built:
        built.setdefault((str(b["pod"]), int(str(b["pid"]))), []).append(float(str(b["t"])))
    for c in trace.commits:
        commits.setdefault((c.pod, c.pid), []).append(c.t)
    lives = []
    for key in built | commits:
        times = sorted(commits.get(key, ()))
        begins = sorted(built.get(key, times[:1]))
        for begin, end in itertools.pairwise([*begins, float("inf")]):
            own = [t for t in times if begin <= t < end]
            # Without a commit: built, and killed or drained before its first.
            lives.append(_Life(key[0], begin, own[0], own[-1]) if own else _Life(key[0], begin, float("inf"), end))
    return lives


def story(trace: Trace, run: Run) -> str:
    """Return what the trace tells of generations and processes, one line each, in order of time: for whoever reads a failure."""
    lines = [(a.t, f"asked for {a.replicas} replicas") for a in run.asked]
    lines += [(f.t, f"fault: {f.restarts} to start again") for f in run.faults]
    for generation, commits in itertools.groupby(
        sorted(trace.commits, key=lambda c: c.generation), lambda c: c.generation
    ):
        own = list(commits)
        first, last = min(c.t for c in own), max(c.t for c in own)
        steps = f"steps {min(c.step for c in own)} to {max(c.step for c in own)}"
        lines.append(
            (first, f"generation {generation} of {len({(c.pod, c.pid) for c in own})}: {steps}, until {last:.2f}")
        )
    for life in _lives(trace):
        lines.append((life.built, f"{life.pod} built; commits from {life.first:.2f} to {life.last:.2f}"))
    return "\n".join(f"{t:.2f} {text}" for t, text in sorted(lines))


def _ready_pods(trace: Trace, t: float, *, surely: bool) -> set[str]:
    lives = _lives(trace)
    return {life.pod for life in lives if (life.first if surely else life.built) <= t <= life.last}
