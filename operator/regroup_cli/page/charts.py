"""Draw the charts of the page as SVG. Pure.

Colours are classes of page.css, so that the page's security policy needs no inline style, and dark mode changes them. Every text
is escaped by Markup.format. A chart has a label, which screen readers read instead of the drawing.

Places along the time axis are percentages, and heights are pixels. So a chart is as wide as the window, and its texts keep their
size. A curve alone is stretched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

HEIGHT, SIZES_HEIGHT = 150, 104
"""Heights of the plots in pixels. page.css leaves room around them for labels."""
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
"""Distances between two marks of a time axis, in seconds. Beyond a day they are 1, 2 or 5 times a power of ten days."""
MAX_MARKS = 4
MIN_GAP = 6.0
"""Least distance of two numbers of incidents, in percent of the axis: closer ones would overlap in a narrow window."""
_TRIANGLE = '<path class="mark failure" d="M0 -6 l7 12 h-14 z"/>'
_CIRCLE = '<circle class="mark planned" r="5"/>'
Scale = Callable[[float], float]
"""Maps a value to its place in the drawing. A value outside of the axis is drawn at its end."""


@dataclass(frozen=True)
class Mark:
    """An incident on the time axis."""

    seconds: float
    label: str
    text: str
    is_failure: bool


@dataclass(frozen=True)
class Size:
    """A number of workers, from a time on. None: unknown."""

    seconds: float
    workers: int | None


@dataclass(frozen=True)
class Dot:
    """A point of a curve, with the text that is shown under the pointer."""

    seconds: float
    value: float
    text: str


def curve(name: str, dots: Sequence[Dot], end_s: float, marks: Sequence[Mark] = ()) -> Markup:
    """Return the chart of a value over the time since the job's start, up to `end_s`; empty for fewer than two dots."""
    if len(dots) < 2:
        return Markup("")
    values = [dot.value for dot in dots]
    low, high = bounds(min(values), max(values))
    x, y = _scale(0, end_s, 0, 100), _scale(low, high, HEIGHT, 0)
    label = (
        f"{name}: from {number(values[0])} to {number(values[-1])} in {span(dots[-1].seconds - dots[0].seconds)}; "
        f"lowest {number(min(values))}, highest {number(max(values))}"
    )
    points = " ".join(f"{x(dot.seconds):.2f},{y(dot.value):.1f}" for dot in dots)
    dot = Markup('<circle class="dot" cx="{:.2f}%" cy="{:.1f}" r="5"><title>{}</title></circle>')
    parts = [
        _grid(ticks(low, high), y),
        _time_axis(end_s, x, HEIGHT),
        _lines(marks, x, HEIGHT),
        Markup(
            '<svg viewBox="0 0 100 {}" preserveAspectRatio="none" width="100%" height="{}" overflow="visible">'
            '<polyline class="curve" points="{}"/></svg>'
        ).format(HEIGHT, HEIGHT, points),
        *(dot.format(x(one.seconds), y(one.value), one.text) for one in dots),
        Markup('<circle class="last" cx="{:.2f}%" cy="{:.1f}" r="3"/>').format(x(dots[-1].seconds), y(dots[-1].value)),
    ]
    return _chart("curves", label, parts)


def timeline(sizes: Sequence[Size], end_s: float, marks: Sequence[Mark]) -> Markup:
    """Return the chart of the number of workers over time, with a numbered mark for each incident; empty without a size.

    Failures are marked above planned changes, since the workers that a failure cost join again soon after it.
    """
    known = [one.workers for one in sizes if one.workers is not None]
    if not known or end_s <= 0:
        return Markup("")
    high = max(known)
    x, y = _scale(0, end_s, 0, 100), _scale(0, high, SIZES_HEIGHT, 0)
    size = Markup('<rect class="size" x="{:.2f}%" y="{:.1f}" width="{:.2f}%" height="{:.1f}"/>')
    parts = []
    for one, until in zip(sizes, [*(later.seconds for later in sizes[1:]), end_s]):
        if one.workers is not None and until > one.seconds:
            left, top = x(one.seconds), y(one.workers)
            parts.append(size.format(left, top, x(until) - left, SIZES_HEIGHT - top))
    whole = [mark for mark in ticks(0, high) if mark == int(mark)]
    parts += [_grid(whole, y), _time_axis(end_s, x, SIZES_HEIGHT), _lines(marks, x, SIZES_HEIGHT)]
    parts += [
        _row([one for one in marks if one.is_failure], x, -32),
        _row([one for one in marks if not one.is_failure], x, -13),
    ]
    failures = sum(one.is_failure for one in marks)
    now = "unknown" if sizes[-1].workers is None else str(sizes[-1].workers)
    label = f"Workers over {span(end_s)}: now {now}, most {high}; failures: {failures}, planned changes: {len(marks) - failures}"
    return _chart("sizes", label, parts)


def _row(marks: Sequence[Mark], x: Scale, y: int) -> Markup:
    """Return a row of marks, with the numbers that have room."""
    out, taken = [], -math.inf
    for one in marks:
        shape = Markup(_TRIANGLE if one.is_failure else _CIRCLE)
        number_of_it = Markup("")
        if x(one.seconds) - taken >= MIN_GAP:
            taken = x(one.seconds)
            number_of_it = Markup('<text class="label" x="10" y="4">{}</text>').format(one.label)
        group = Markup('<svg x="{:.2f}%" y="{}" overflow="visible"><title>{}</title>{}{}</svg>')
        out.append(group.format(x(one.seconds), y, one.text, shape, number_of_it))
    return Markup("").join(out)


def shares(name: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """Return one bar that is split into parts, each a name and a percentage."""
    part = Markup('<rect class="s{}" x="{:g}%" width="{:g}%" height="100%"><title>{}</title></rect>')
    out, left = [], 0.0
    for index, (what, percent) in enumerate(parts):
        out.append(part.format(index % 6, left, max(0.0, min(percent, 100 - left)), f"{what} {percent:g} %"))
        left += percent
    label = f"{name}: " + ", ".join(f"{what} {percent:g} %" for what, percent in parts)
    return Markup('<svg class="bar" role="img" aria-label="{}">{}</svg>').format(label, Markup("").join(out))


def bounds(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis: a little more than the values, and zero if they are near it."""
    if high == low:
        room = abs(high) / 2 or 1.0
        return low - room, high + room
    room = (high - low) * 0.08
    near_zero = 0 <= low < (high - low) / 2
    return (0.0 if near_zero else low - room), high + room


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return round values within [low, high]: multiples of 1, 2 or 5 times a power of ten, about `most`."""
    rough = (high - low) / most
    if not math.isfinite(rough) or rough <= 0:
        return [low] if math.isfinite(low) else []
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def times(end_s: float, most: int = MAX_MARKS) -> list[float]:
    """Return the marks of a time axis from 0 to `end_s`, in seconds."""
    if end_s <= 0:
        return [0.0]
    step: float = next((one for one in _STEPS_S if end_s / one <= most), 0)
    if not step:
        days = ticks(0, end_s / 86400, most)
        return [day * 86400 for day in days]
    return [index * step for index in range(int(end_s // step) + 1)]


def span(seconds: float) -> str:
    """Return a duration in the largest unit that has a whole number of at most one decimal: 45 s, 2.5 min, 3 h, 2 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{round(seconds / size, 1):g} {unit}"
    return f"{seconds:.0f} s"


def number(value: float) -> str:
    """Return a number with at most four digits, and without an exponent where that is shorter."""
    if (value and abs(value) < 1e-4) or abs(value) >= 1e6:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _scale(low: float, high: float, first: float, last: float) -> Scale:
    width = (high - low) or 1.0
    return lambda value: first + (last - first) * (min(max(value, low), high) - low) / width


def _chart(kind: str, label: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="chart {}" role="img" aria-label="{}">{}</svg>').format(
        kind, label, Markup("").join(parts)
    )


def _grid(marks: Sequence[float], y: Scale) -> Markup:
    line = Markup(
        '<line class="grid" x2="100%" y1="{:.1f}" y2="{:.1f}"/><text class="label" x="-8" y="{:.1f}" text-anchor="end">{}</text>'
    )
    return Markup("").join(line.format(y(mark), y(mark), y(mark) + 4, number(mark + 0.0)) for mark in marks)


def _time_axis(end_s: float, x: Scale, height: int) -> Markup:
    text = Markup('<text class="label" x="{:.2f}%" y="{}" text-anchor="{}">{}</text>')
    out = []
    for mark in times(end_s):
        anchor = "start" if mark == 0 else "end" if x(mark) > 95 else "middle"
        out.append(text.format(x(mark), height + 18, anchor, span(mark) if mark else "0"))
    return Markup("").join(out)


def _lines(marks: Sequence[Mark], x: Scale, height: int) -> Markup:
    line = Markup('<line class="at {}" x1="{:.2f}%" x2="{:.2f}%" y1="0" y2="{}"><title>{}</title></line>')
    return Markup("").join(
        line.format("failure" if one.is_failure else "planned", x(one.seconds), x(one.seconds), height, one.text)
        for one in marks
    )
