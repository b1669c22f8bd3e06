"""How long the tour took, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

BUSY = 4.0
"""So many runnable processes for each core of the machine are no excuse for a late step."""
FIRST_RUN_S, LATER_RUN_S = 900, 180
"""What a run is meant to take on two cores, without downloads: with something to build, and with everything cached."""


def allowance(load: float, cores: int) -> float:
    """Return the factor by which the bounds of the tour's claims are wider now: 1, and more on a machine that has much other work.

    `load` is the load average of the last minute.
    """
    return max(1.0, load / (BUSY * cores))


def bounded(bound_s: float, factor: float) -> str:
    """Return a bound for the text of a claim, with the factor if it is wider than on an idle machine."""
    if factor == 1.0:
        return f"{bound_s:g} s"
    return f"{bound_s * factor:.3g} s ({bound_s:g} s x {factor:.1f}: busy machine)"


def sentences(total_s: float, steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the time since the command was typed and the downloads in it; then, if it took longer than meant, a note.

    `steps` are those recorded in this run (cluster.progress). Too long is no failed claim: a busy machine is no defect of ours.
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
