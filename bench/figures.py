"""What the benchmarks' figures share: they come out the same from the same figures, and name the command that draws them."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS = "#2a6f97"
FAINT = "#66727a"
"""Of notes beside bars."""


def blank(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches. Its white ground keeps it readable on a dark page."""
    mpl.rcParams["svg.hashsalt"] = "regroup"  # the same file from the same figures
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["font.size"] = 9
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def bare(axes: Axes) -> None:
    """Take the frame's upper and right line away."""
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path, module: str) -> None:
    """Write the figure as SVG. `module` draws it with `--figure`."""
    figure.savefig(path, metadata={"Date": None, "Description": f"python -m {module} --figure {path}"})
