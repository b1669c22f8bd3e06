"""The figure of `bench.goodput`: recovery from a kill, and goodput under kills, for each system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.figures import FAINT, OURS, bare, blank, save
from bench.peers import OURS as REGROUP

PEER = "#7d8f9a"


def draw(goodput: dict[str, Any], recovery: dict[str, Any], path: Path) -> None:
    """Draw what the two JSON files have of the same systems into an SVG. Systems that only one of them has are left out."""
    keys = [key for key in goodput if key != "setup" and key in recovery]
    titles = [goodput[key]["title"] for key in keys]
    every = list(goodput[keys[0]]["every"])
    first = {key: (recovery[key]["survivors"]["p50"], _seconds) for key in keys}
    full = {key: (recovery[key]["full_size"]["p50"], _seconds) for key in keys}
    panels = [
        ("SIGKILL to the next step, s\n(p50, less is better)", first),
        ("SIGKILL to all ranks, s\n(p50, less is better)", full),
    ]
    for seconds in every:
        shares = {key: (100 * goodput[key]["every"][seconds]["goodput"], _percent) for key in keys}
        panels.append((f"goodput, a kill every {seconds} s, %\n(more is better)", shares))
    rows = range(len(keys))
    figure = blank(2.7 * len(panels), 0.42 * len(keys) + 1.1)
    for axes, (label, values) in zip(figure.subplots(1, len(panels), sharey=True), panels):
        for row, key in zip(rows, keys):
            value, text = values[key]
            axes.barh(row, value, 0.6, color=OURS if key == REGROUP else PEER)
            axes.text(value, row, f" {text(value)}", va="center", fontsize=8)
        axes.set(yticks=list(rows), yticklabels=titles, xlabel=label)
        axes.margins(x=0.25)
        bare(axes)
    figure.axes[0].invert_yaxis()
    ranks, cpus = goodput["setup"]["ranks"], goodput["setup"]["cpus"]
    figure.suptitle(f"{ranks} ranks on {cpus} cores, one of them killed at a time", fontsize=9, color=FAINT)
    save(figure, path, "bench.goodput")


def _seconds(value: float) -> str:
    return f"{value:.2g} s"


def _percent(value: float) -> str:
    return f"{value:.1f} %"
