"""Style of the benchmarks' figures. Equal data gives the same file, and the file names the command that draws it."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS = "#2a6f97"
FAINT = "#66727a"  # of the notes beside the bars


def blank(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches. Its white ground keeps it readable on a dark page."""
    mpl.rcParams["svg.hashsalt"] = "regroup"  # the same file from the same figures
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["font.size"] = 9
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def bare(axes: Axes) -> None:
    """Remove the upper and the right line of the frame."""
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path, module: str) -> None:
    """Write the figure as SVG. `module` draws it with `--figure`."""
    figure.savefig(path, metadata={"Date": None, "Description": f"python -m {module} --figure {path}"})
