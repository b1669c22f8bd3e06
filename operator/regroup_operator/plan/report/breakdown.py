"""Say where the time of a step goes: the parts that dominate, and the worker that the others wait for. Pure.

Reads what each member's process measured itself (`Times`, seconds, means over its last steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

from regroup.protocol.state import Times
from regroup_operator.model.worker import Worker

NAMES = {
    "data": "fetching data",
    "forward": "forward",
    "backward": "backward",
    "device": "GPU",
    "communication": "communication",
    "waits": "waits",
    "apply": "optimizer",
    "between": "between steps",
}
"""Name of each part in the sentence; docs/reference/library.md explains them."""
NOTABLE = 0.1
"""A part below this share of a step is not named. Neither is a slowest worker for which others wait less than this."""
MOST_PARTS = 3


def times_of(members: Iterable[Worker], generation: int) -> dict[str, Times]:
    """Return what members have measured in a generation, by the worker's name."""
    return {
        f"worker {worker.id}": worker.session.progress.times
        for worker in members
        if worker.session is not None
        and worker.session.progress is not None
        and worker.session.progress_generation == generation
        and worker.session.progress.times is not None
    }


def breakdown(members: Mapping[str, Times]) -> str | None:
    """Return one line, such as "0.84 s: backward 61 %, waits 22 % (worker 3 is slowest: fetching data 0.3 s)"; None: nobody has
    measured a step. `members`: by the worker's name."""
    parts = {name: vars(times) for name, times in members.items()}  # all are seconds
    step_s = fmean(sum(one.values()) for one in parts.values()) if parts else 0.0
    if step_s <= 0:
        return None
    means = {part: fmean(one[part] for one in parts.values()) for part in NAMES}
    largest = sorted(means, key=lambda part: -means[part])[:MOST_PARTS]
    named = [f"{NAMES[part]} {100 * means[part] / step_s:.0f} %" for part in largest if means[part] >= NOTABLE * step_s]
    return f"{_seconds(step_s)}: {', '.join(named)}{_slowest(parts, step_s)}"


def _slowest(parts: Mapping[str, Mapping[str, float]], step_s: float) -> str:
    """Return who waits least, where others wait for it, and in which part of the step it takes longer than they do."""
    if len(parts) < 2:
        return ""
    name = min(parts, key=lambda one: parts[one]["waits"])
    others = [one for other, one in parts.items() if other != name]
    if fmean(one["waits"] for one in others) - parts[name]["waits"] < NOTABLE * step_s:
        return ""
    own = [part for part in NAMES if part not in ("waits", "communication")]
    part = max(own, key=lambda part: parts[name][part] - fmean(one[part] for one in others))
    return f" ({name} is slowest: {NAMES[part]} {_seconds(parts[name][part])})"


def _seconds(value: float) -> str:
    """Return a duration with two digits: 1.2 s, 0.35 s, 12 ms, 0.28 ms."""
    if value >= 0.1:
        return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
    return f"{value * 1e3:.2g} ms"
