"""The figure of `bench.strategies`: throughput beside torch alone, and what a failure and a resize cost, by strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.figures import FAINT, OURS, bare, blank, save

PLAIN, RECOVERY, RESIZE = "#b8c4cc", "#c8553d", "#e9a23b"


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw what the JSON file has of the strategies into an SVG."""
    titles = [one["title"] for one in found]
    rows = range(len(found))
    figure = blank(9.5, 0.52 * len(found) + 1.6)
    left, right = figure.subplots(1, 2, sharey=True)
    left.barh([row - 0.2 for row in rows], [one["tokens_per_s"] for one in found], 0.38, color=OURS, label="session")
    plain = [one["plain_tokens_per_s"] or 0 for one in found]
    left.barh([row + 0.2 for row in rows], plain, 0.38, color=PLAIN, label="torch alone")
    for row, one in zip(rows, found):
        if one["plain_tokens_per_s"] is None:
            left.text(0, row + 0.2, " torch has no counterpart", va="center", fontsize=7, color=FAINT)
    left.set(yticks=list(rows), yticklabels=titles, xlabel="tokens per second, two ranks of one thread")
    left.invert_yaxis()
    right.barh(
        [row - 0.2 for row in rows],
        [one["recovery_s"] or 0 for one in found],
        0.38,
        color=RECOVERY,
        label="SIGKILL to the next commit",
    )
    right.barh(
        [row + 0.2 for row in rows],
        [one["resize_s"] or 0 for one in found],
        0.38,
        color=RESIZE,
        label="longest pause of a growth",
    )
    right.set(xlabel="seconds, two model groups")
    for axes in (left, right):
        bare(axes)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    save(figure, path, "bench.strategies")
