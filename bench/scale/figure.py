"""The figure of `bench.scale`: what a pod costs with each system, at few and at many jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.figures import FAINT, OURS, bare, blank, save
from bench.scale.report import ORDER

PEER, FEWER = "#7d8f9a", "#d3dbe0"
PANELS = {
    "pods_per_s": "pods a second to Running\n(more is better)",
    "requests_per_pod": "API requests a pod\n(less is better)",
    "cpu_ms_per_pod": "controllers' CPU, ms a pod\n(less is better)",
    "rss_mib": "controllers' memory, MiB\n(less is better)",
}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw what the JSON file has of the systems into an SVG."""
    names = [name for name in ORDER if name in found]
    rows = range(len(names))
    figure = blank(11, 0.6 * len(names) + 1.6)
    for axes, (key, label) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items()):
        for row, name in zip(rows, names):
            one = found[name]
            fewer = next(iter(one["fewer"].values()), None)
            axes.barh(row - 0.2, one[key], 0.38, color=OURS if name.startswith("regroup") else PEER)
            axes.text(one[key], row - 0.2, f" {one[key]:.4g}", va="center", fontsize=8)
            if fewer is not None:
                axes.barh(row + 0.2, fewer[key], 0.38, color=FEWER)
                axes.text(fewer[key], row + 0.2, f" {fewer[key]:.4g}", va="center", fontsize=7, color=FAINT)
        axes.set(yticks=list(rows), yticklabels=[found[name]["title"] for name in names], xlabel=label)
        axes.margins(x=0.25)
        bare(axes)
    figure.axes[0].invert_yaxis()
    first = found[names[0]]
    pods, fewest = found["setup"]["pods_per_job"], next(iter(first["fewer"]), None)
    light = f"; light: {fewest} jobs" if fewest else ""
    figure.suptitle(f"{first['jobs']} jobs of {pods} pods created at once{light}", fontsize=9)
    save(figure, path, "bench.scale")
