"""One job as a screen of text that is drawn again in place, with four escape sequences and no package.

`lines` is pure: it returns what is shown in a given width and height. `Screen` draws it over what it drew before. So lines
above it, such as the output of workers, stay in the terminal's history.
"""

from __future__ import annotations

import itertools
import os
import shutil
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from regroup_cli.logs import has_colour
from regroup_client.log_lines import clean
from regroup_client.views import JobView, Point, counted

BARS = "▁▂▃▄▅▆▇█"
MAX_WORKERS = 8
"""Rows of workers at most; the rest is counted."""
MAX_INCIDENTS = 3
_STATE_COLOURS = {"Running": 32, "Succeeded": 32, "Failed": 31, "Killed": 31}
_OTHER_STATE = 33
_HIDE_CURSOR, _SHOW_CURSOR, _CLEAR_BELOW = "\x1b[?25l", "\x1b[?25h", "\x1b[J"


def lines(view: JobView, width: int, height: int = 40) -> list[str]:
    """Return what is shown of a job: at most `height` lines of at most `width` cells, without colours.

    The first line is the state, and those after it are left out from the end where there is no room.
    """
    out = [f"{view.name}  {view.state}" + (f"  {view.ready} ready" if view.ready else "")]
    numbers = {
        "step": f"{view.steps}{f' ({view.percent})' if view.percent and view.percent != view.steps else ''}"
        if view.steps
        else "",
        "loss": view.loss,
        "ETA": view.eta,
        "samples/s": "" if view.samples_per_second is None else f"{view.samples_per_second:,.0f}",
        "steps/s": _pace(view.curve),
        "goodput": "" if view.goodput_percent is None else f"{view.goodput_percent:g}%",
    }
    out.append("  ".join(f"{name} {value}" for name, value in numbers.items() if value))
    if curve := sparkline([point.loss for point in view.curve], width - 8):
        out.append(f"loss    {curve}")
    if view.generation is not None:
        restarts = f", {counted(view.restarts, 'restart')}" if view.restarts else ""
        out.append(f"generation {view.generation} of {counted(view.ranks or 0, 'rank')}{restarts}")
    out += _workers(view)
    out += [
        f"{one.at}  {one.cause}: {one.decision.splitlines()[0]}"
        for one in view.incidents[-MAX_INCIDENTS:]
        if one.decision
    ]
    if view.state != "Running":
        out += [sentence.splitlines()[0] for sentence in view.why[1:3]]
    return [cut(clean(line), width) for line in out if line][: max(1, height)]


def _workers(view: JobView) -> list[str]:
    rows = []
    for one in view.workers[:MAX_WORKERS]:
        place = "  ".join(filter(None, (one.phase, one.node)))
        rows.append(f"  [{one.slot}] {_ranks(one.ranks)}  {one.pod}  {place}".rstrip())
    more = len(view.workers) - MAX_WORKERS
    return [*rows, f"  and {counted(more, 'more worker')}"] if more > 0 else rows


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "no rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a curve in one line of at most `width` characters, or "" for fewer than two values."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or width < 2:
        return ""
    if len(known) > width:
        known = [known[index * (len(known) - 1) // (width - 1)] for index in range(width)]
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in known)


def _pace(curve: Sequence[Point]) -> str:
    """Return the steps a second between the last two points, or "" if that is not known."""
    if len(curve) < 2 or curve[-1].seconds <= curve[-2].seconds:
        return ""
    return f"{(curve[-1].step - curve[-2].step) / (curve[-1].seconds - curve[-2].seconds):.3g}"


def cut(text: str, width: int) -> str:
    """Return as much of a text as a terminal shows in `width` cells."""
    text = text.replace("\t", " ")  # a tab has as many cells as are left to the next stop
    if sum(map(_cells, text)) <= width:
        return text
    ends = itertools.accumulate(map(_cells, text))
    return text[: sum(1 for end in ends if end < width)] + "…"


def _cells(char: str) -> int:
    """Return the number of cells of a character: two for a wide letter, none for an accent that is drawn over the one before."""
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


class Screen:
    """Draws a job on a terminal, over what it drew before."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawing: list[str] = []
        self._in_colour = has_colour(out.isatty(), os.environ.get("NO_COLOR"), os.environ.get("TERM"))

    @property
    def can_draw(self) -> bool:
        """True if the terminal understands the escape sequences."""
        return self._out.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def add(self, above: Sequence[str]) -> None:
        """Write lines above the drawing, and draw it again."""
        if above:
            drawing = "".join(f"{line}\n" for line in self._drawing)
            self._out.write(f"{self._erasure()}" + "".join(f"{line}\n" for line in above) + drawing)
            self._out.flush()

    def show(self, view: JobView) -> None:
        """Draw the job's newest state."""
        width, height = shutil.get_terminal_size()
        text = lines(view, width - 1, height - 1)
        if self._in_colour:
            colour = _STATE_COLOURS.get(view.state, _OTHER_STATE)
            text[0] = text[0].replace(view.state, f"\x1b[1;{colour}m{view.state}\x1b[0m", 1)
        self._out.write(f"{self._erasure()}{_HIDE_CURSOR}" + "".join(f"{line}\n" for line in text))
        self._out.flush()
        self._drawing = text

    def _erasure(self) -> str:
        """Return what removes the drawing, so that other lines can be written in its place."""
        return f"\x1b[{len(self._drawing)}A\r{_CLEAR_BELOW}" if self._drawing else ""

    def close(self) -> None:
        """Leave the last drawing, and show the cursor again."""
        self._out.write(_SHOW_CURSOR)
        self._out.flush()
