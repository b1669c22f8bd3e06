"""The figure of `bench.strategies`: throughput beside torch alone, and what a failure and a resize cost, by strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

OURS, PLAIN, RECOVERY, RESIZE = "#2a6f97", "#b8c4cc", "#c8553d", "#e9a23b"
COMMAND = "python -m bench.strategies --figure {path}"


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw what the JSON file has of the strategies into an SVG."""
    mpl.rcParams["svg.hashsalt"] = "regroup"  # the same file from the same figures
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["font.size"] = 9
    titles = [one["title"] for one in found]
    rows = range(len(found))
    figure = Figure(figsize=(9.5, 0.52 * len(found) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.barh([row - 0.2 for row in rows], [one["tokens_per_s"] for one in found], 0.38, color=OURS, label="session")
    plain = [one["plain_tokens_per_s"] or 0 for one in found]
    left.barh([row + 0.2 for row in rows], plain, 0.38, color=PLAIN, label="torch alone")
    for row, one in zip(rows, found):
        if one["plain_tokens_per_s"] is None:
            left.text(0, row + 0.2, " torch has no counterpart", va="center", fontsize=7, color="#66727a")
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.savefig(path, metadata={"Date": None, "Description": COMMAND.format(path=path)})
