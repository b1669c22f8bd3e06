"""How long the tour took, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FIRST_RUN_S, LATER_RUN_S = 900, 180
"""What a run is meant to take on two cores, without downloads: with something to build, and with everything cached."""


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
