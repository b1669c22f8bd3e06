"""Keep a bounded curve of a job's progress in its status, so that a client that looks late sees how the job got there. Pure.

The curve has at most 64 points, evenly spaced in time over the whole run. It changes only with the progress itself, so it costs no
write of its own. It is for people: no decision reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from regroup_operator.api.status import MAX_CURVE_BYTES, MAX_CURVE_POINTS

_POINT = re.compile(r"(\d{1,18}) (\d{1,12})(?: ([-+.e0-9]{1,12}))?")
_Point = tuple[int, int, str]
"""Step, seconds since the job's start, and the loss as text."""


def extended(curve: Sequence[str], *, step: int, seconds: float, loss: float | None) -> list[str]:
    """Return the curve with a point for the newest step, thinned to its bounds.

    The last point is always the newest one. A point before it stays only if it is far enough from its predecessor, by the spacing
    that 64 points over the whole time have. Points of steps that were rolled back are removed.
    """
    said = f"{loss:.4g}" if loss is not None and math.isfinite(loss) else ""
    before = [point for point in map(_parsed, curve) if point is not None]
    if before and before[-1][0] == step:  # the same step again must not change more, for each change is written
        *others, (_, at_s, loss_before) = before
        return [_text(point) for point in [*others, (step, at_s, said or loss_before)]]
    points = [point for point in before if point[0] < step]
    points.append((step, max([0, round(seconds), *(point[1] for point in points[-1:])]), said))
    spacing_s = (points[-1][1] - points[0][1]) / (MAX_CURVE_POINTS - 1)
    if len(points) > 2 and points[-2][1] - points[-3][1] < spacing_s:
        del points[-2]
    while len(points) > 1 and (len(points) > MAX_CURVE_POINTS or _size(points) > MAX_CURVE_BYTES):
        del points[_densest(points)]
    return [_text(point) for point in points]


def _densest(points: Sequence[_Point]) -> int:
    """Return the index of the inner point whose neighbours are closest to each other. Of two points it is the first."""
    if len(points) == 2:
        return 0
    return min(range(1, len(points) - 1), key=lambda index: (points[index + 1][1] - points[index - 1][1], index))


def _parsed(text: str) -> _Point | None:
    """Return a point, or None for a text that somebody has edited: a curve must not stop a job."""
    found = _POINT.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2]), found[3] or "")


def _text(point: _Point) -> str:
    return " ".join(str(part) for part in point if part != "")


def _size(points: Sequence[_Point]) -> int:
    """Return the bytes of the curve in JSON: each entry has quotes and a comma."""
    return 2 + sum(len(_text(point)) + 3 for point in points)
