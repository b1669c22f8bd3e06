"""Time of the tour, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

BUSY = 4.0
"""Runnable processes for each core up to which the bounds stay as they are. On a machine that is no busier, a
late step has no excuse."""
FIRST_RUN_S, LATER_RUN_S = 900, 180
"""Expected seconds of a run on two cores, without downloads: one that builds, and one with everything cached."""


def allowance(load: float, cores: int) -> float:
    """Return the factor by which the tour's bounds are wider on a busy machine; 1 on any other.

    `load` is the load average of the last minute.
    """
    return max(1.0, load / (BUSY * cores))


def bounded(bound_s: float, factor: float) -> str:
    """Return a bound for the text of a claim. It names the factor if that is not 1."""
    if factor == 1.0:
        return f"{bound_s:g} s"
    return f"{bound_s * factor:.3g} s ({bound_s:g} s x {factor:.1f}: busy machine)"


def sentences(total_s: float, steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a sentence with the time since the command began and its downloads, and a note if the run took too long.

    `steps` are those recorded in this run (cluster.progress). A run that takes too long is no failed claim, since the
    machine may be busy.
    """
    steps = list(steps)
    downloads_s = sum(s["seconds"] for s in steps if s["kind"] == "download")
    built = any(s["kind"] == "build" for s in steps)
    bound_s = FIRST_RUN_S if built else LATER_RUN_S
    out = [f"{total_s:.0f} s since the command was typed, {downloads_s:.0f} s of it downloads."]
    if total_s - downloads_s > bound_s:
        kind = "a run that builds" if built else "a run with everything cached"
        out.append(f"Without downloads {kind} should take at most {bound_s} s on two cores: is the machine busy?")
    return out
