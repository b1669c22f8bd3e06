"""Compute what the views of the page contain, from the record of a job. Pure.

`JobView` has the facts and the sentences. This module arranges them: it chooses the jobs of the list, the values of charts and the
lines of logs. Texts may quote the output of a hostile program, so `harmless` is applied to each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC

from markupsafe import Markup

from regroup_cli.page import charts
from regroup_cli.page.charts import Dot, Mark, Size
from regroup_client.log_lines import Line, bounded, clean
from regroup_client.views import OVER, SUCCEEDED, IncidentView, JobView, WorkerView, moment
from regroup_operator.model.worker import PLANNED_CAUSES

ROWS = 100
"""Jobs on one page of the list."""
MAX_TEXT = 4000
"""Characters of a sentence that quotes output."""
MAX_CELL = 140
MAX_LINE = 1000
"""Characters of a line of a log."""
MAX_LOG = 300_000
"""Characters of all lines of a log that are shown at once: older lines are left out."""
MAX_LOSS = 1e300
"""Losses from here on are not drawn: the distance of two of them may be no number."""
_PART = re.compile(r"([A-Za-z][A-Za-z ]*?) (\d{1,3}) %")
_STEP_TIME = re.compile(r"([^:]+): ([^(]*)(?:\((.*)\))?")


def harmless(text: str) -> str:
    """Return a text of a job without characters that act or hide, line by line and of bounded length."""
    return "\n".join(map(clean, bounded(text, MAX_TEXT).split("\n")))


def first_line(text: str) -> str:
    """Return the first line of a sentence that may quote output, cut to what a cell of a table has room for."""
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= MAX_CELL else line[: MAX_CELL - 1] + "…"


def day(at: str) -> str:
    """Return a time of the API as people read it, in UTC; another text stays as it is."""
    found = moment(at)
    return at if found is None else found.astimezone(UTC).strftime("%-d %b %Y, %H:%M:%S UTC")


def tone(state: str) -> str:
    """Return the class of a state's colour: good, bad or open."""
    if state in ("Running", SUCCEEDED):
        return "good"
    return "bad" if state in OVER else "open"


# --- the list


@dataclass(frozen=True)
class Chosen:
    """The jobs that one page of the list shows."""

    views: tuple[JobView, ...]
    found: int
    """Number of jobs that match the filter."""
    all: int
    page: int
    """Number of this page, from 1."""
    pages: int


def choose(views: Iterable[JobView], text: str, page: int) -> Chosen:
    """Return the jobs whose namespace, name or state contains a text. Jobs that go on come first, then those that have ended."""
    every = list(views)
    wanted = text.casefold().split()
    found = [one for one in every if all(word in _searched(one) for word in wanted)]
    found.sort(key=lambda one: (one.state in OVER, one.namespace, one.name, one.directory))
    pages = max(1, -(-len(found) // ROWS))
    page = min(max(1, page), pages)
    return Chosen(tuple(found[(page - 1) * ROWS : page * ROWS]), len(found), len(every), page, pages)


def _searched(view: JobView) -> str:
    return f"{view.namespace} {view.name} {view.state} {view.directory}".casefold()


def percent(view: JobView) -> float | None:
    """Return the share of a job's work that is done, from 0 to 100, or None if it is not known."""
    try:
        return min(100.0, max(0.0, float(view.percent.removesuffix("%"))))
    except ValueError:
        return None


# --- one job


def seconds_of(view: JobView, at: str) -> float | None:
    """Return the seconds from the job's start to a time, or None if one of them is not known."""
    start, then = moment(view.started_at), moment(at)
    return None if start is None or then is None else (then - start).total_seconds()


def end_s(view: JobView) -> float:
    """Return the seconds from the job's start to its end, or to the newest time that is known of it."""
    known = [seconds_of(view, at) for at in (view.ended_at, view.observed_at, *(one.at for one in view.incidents[-1:]))]
    times = [one for one in known if one is not None]
    newest = float(view.curve[-1].seconds) if view.curve else 0.0
    return max([0.0, newest, *(times[:1] if view.ended_at else times)])


def is_failure(incident: IncidentView) -> bool:
    """Return whether a failure made the change of membership."""
    return incident.cause not in PLANNED_CAUSES


def marks(view: JobView) -> list[Mark]:
    """Return the incidents on the time axis, those before the start left out."""
    out = []
    for one in view.incidents:
        at_s = seconds_of(view, one.at)
        if at_s is not None and at_s >= 0:
            text = f"Generation {one.generation}, {one.cause}: {first_line(harmless(one.decision))}"
            out.append(Mark(at_s, str(one.generation), bounded(text, 300), is_failure(one)))
    return out


def sizes(view: JobView) -> list[Size]:
    """Return the numbers of workers over time, from what incidents and the newest generation say."""
    now = len([one for one in view.workers if one.ranks]) or None
    if not view.incidents:
        return [Size(0.0, now)]
    first = view.incidents[0]
    out = [Size(0.0, first.workers_before if first.generation == 2 else None)]
    for one in view.incidents:
        at_s = seconds_of(view, one.at)
        if at_s is not None:
            is_newest = one.generation == view.generation
            out.append(Size(max(0.0, at_s), one.workers or (now if is_newest else None)))
    return out


def timeline(view: JobView) -> Markup:
    """Return the chart of sizes and incidents."""
    return charts.timeline(sizes(view), end_s(view), marks(view))


def loss(view: JobView) -> Markup:
    """Return the chart of the loss. A loss that has no place on an axis, such as NaN, is left out."""
    dots = [
        Dot(one.seconds, one.loss, f"step {one.step:,}: loss {charts.number(one.loss)}")
        for one in view.curve
        if one.loss is not None and abs(one.loss) < MAX_LOSS
    ]
    return charts.curve("Loss", dots, end_s(view), marks(view))


def throughput(view: JobView) -> Markup:
    """Return the chart of steps per second, between the points of the curve."""
    dots = []
    for before, one in zip(view.curve, view.curve[1:]):
        if one.seconds > before.seconds:
            pace = (one.step - before.step) / (one.seconds - before.seconds)
            dots.append(Dot(one.seconds, pace, f"up to step {one.step:,}: {charts.number(pace)} steps per second"))
    return charts.curve("Steps per second", dots, end_s(view), marks(view))


@dataclass(frozen=True)
class StepTime:
    """The mean duration of a step and its largest parts."""

    mean: str
    parts: tuple[tuple[str, float], ...]
    """Name and percentage of the largest parts, and of the rest."""
    note: str
    """The worker for which others wait, or an empty text."""
    bar: Markup


def step_time(view: JobView) -> StepTime | None:
    """Return the parts that status.progress.stepTime names, or None if it has none."""
    found = _STEP_TIME.fullmatch(view.step_time)
    if found is None:
        return None
    mean, listed, note = found[1], found[2], found[3] or ""
    parts = [(name, float(value)) for name, value in _PART.findall(listed)]
    rest = 100 - sum(value for _, value in parts)
    parts += [("other parts", rest)] if rest > 0 else []
    return StepTime(mean, tuple(parts), harmless(note), charts.shares("A step", parts))


@dataclass(frozen=True)
class Node:
    """A node and the workers on it."""

    name: str
    workers: tuple[WorkerView, ...]


def nodes(view: JobView) -> list[Node]:
    """Return the workers by node, those without one first, and by slot on each node."""
    found: dict[str, list[WorkerView]] = {}
    for worker in view.workers:
        found.setdefault(worker.node, []).append(worker)
    return [Node(name, tuple(found[name])) for name in sorted(found)]


def ranks(worker: WorkerView) -> str:
    """Return the ranks of a worker as a range."""
    if not worker.ranks:
        return "none"
    return str(worker.ranks[0]) if len(worker.ranks) == 1 else f"{worker.ranks[0]} to {worker.ranks[-1]}"


def tiles(view: JobView) -> list[tuple[str, str]]:
    """Return the numbers of a job, each with its name, as far as they are known."""
    speed = view.samples_per_second
    known = {
        "Workers ready": view.ready,
        "Step": view.steps,
        "Loss": view.loss,
        "Time left": view.eta,
        "Samples per second": "" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
        "Goodput": "" if view.goodput_percent is None else f"{view.goodput_percent:g}%",
        "Generation": "" if view.generation is None else str(view.generation),
        "Restarts": str(view.restarts),
        "Exit code": "" if view.exit_code is None else str(view.exit_code),
    }
    return [(name, value) for name, value in known.items() if value]


def recovery(incident: IncidentView) -> str:
    """Return how long the parts of a recovery took, as far as they are known."""
    words = {
        "detect": "seen after",
        "decide": "decided in",
        "form": "formed in",
        "transfer": "state copied in",
        "start": "started in",
        "firstStep": "first step after",
    }
    known = incident.milliseconds
    return ", ".join(f"{word} {_milliseconds(known[name])}" for name, word in words.items() if name in known)


def _milliseconds(value: float) -> str:
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms"


# --- logs


@dataclass(frozen=True)
class LogChoice:
    """The lines that the user wants: of all workers, of one worker or of one rank, and only those with a text."""

    slot: int | None = None
    rank: int | None = None
    text: str = ""

    @property
    def of(self) -> str:
        """The choice as it stands in an address."""
        if self.rank is not None:
            return f"rank-{self.rank}"
        return "" if self.slot is None else f"slot-{self.slot}"


def log_choice(of: str, text: str, view: JobView | None) -> LogChoice:
    """Return what an address asks for. A rank that no worker has is shown of all workers, which label their lines."""
    kind, _, digits = of.partition("-")
    if not re.fullmatch(r"\d{1,6}", digits) or not digits.isascii() or kind not in ("slot", "rank"):
        return LogChoice(text=text)
    number = int(digits)
    if kind == "slot":
        return LogChoice(slot=number, text=text)
    workers = view.workers if view is not None else ()
    return LogChoice(next((one.slot for one in workers if number in one.ranks), None), number, text)


def log_options(view: JobView) -> list[tuple[str, str]]:
    """Return the values and names of what can be chosen: all, each worker, and each rank of workers that have several."""
    out = [("", "All workers")]
    for slot in sorted({worker.slot for worker in view.workers}):
        its_ranks = sorted(rank for worker in view.workers if worker.slot == slot for rank in worker.ranks)
        if len(its_ranks) == 1:
            out.append((f"slot-{slot}", f"Worker {slot} (rank {its_ranks[0]})"))
            continue
        more = f" (ranks {its_ranks[0]} to {its_ranks[-1]})" if its_ranks else ""
        out.append((f"slot-{slot}", f"Worker {slot}{more}"))
        out += [(f"rank-{rank}", f"Rank {rank}, of worker {slot}") for rank in its_ranks]
    return out


def log_lines(lines: Sequence[Line], choice: LogChoice) -> list[Line]:
    """Return the newest lines that a choice wants, with bounded texts."""
    out: list[Line] = []
    left, wanted = MAX_LOG, choice.text.casefold()
    for line in reversed(lines):
        if (choice.rank is not None and line.rank not in (choice.rank, None)) or wanted not in line.text.casefold():
            continue
        text = bounded(line.text, MAX_LINE)
        left -= len(text) + 40
        if left < 0:
            break
        out.append(Line(line.at_ns, line.worker, line.rank, text))
    return out[::-1]


def label(line: Line) -> str:
    """Return slot and rank of a line, as `logs` prints them."""
    return f"{line.worker.slot}" if line.rank is None else f"{line.worker.slot}.{line.rank}"
