"""Make status.progress, samples and checkpoint from what members report. Pure.

What counts as the newest report is facts/stalls.py's affair. A checkpoint is named only once the generation's startStep is known
(rule MAD), and never an older one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regroup_operator.model.plan import Clock
from regroup_operator.model.worker import Current
from regroup_operator.plan.facts.stalls import Reported


def progress_status(
    newest: Reported, known: Mapping[str, Any], clock: Clock, step_time: str | None = None
) -> dict[str, Any]:
    """Return status.progress. `step_time`: see breakdown.py.

    What is unchanged keeps its time, since the two clocks drift against each other."""
    report = newest.report
    # Who adopts says its step without a loss; a step that was committed without one had a loss that is not a number.
    loss = report.loss if report.loss is not None or newest.step > known.get("step", -1) else known.get("loss")
    progress = {
        "step": newest.step,
        "totalSteps": report.total_steps if report.total_steps is not None else known.get("totalSteps"),
        "loss": loss,
        "samplesPerSecond": report.samples_per_second,
    }
    if report.noise_scale is not None:
        progress["noiseScale"] = report.noise_scale
    same = known.get("at") is not None and all(known.get(key) == value for key, value in progress.items())
    progress["stepTime"] = step_time
    progress["at"] = known["at"] if same else clock.stamp(newest.at_s)
    return {key: value for key, value in progress.items() if value is not None}


def checkpoint_status(
    newest: Reported,
    known: Mapping[str, Any] | None,
    current: Current,
    *,
    has_started: bool,
    finished: int | None = None,
    keep: int,
    clock: Clock,
) -> dict[str, Any] | None:
    """Return the new status.checkpoint, or None to leave the known one. `has_started`: startStep is in the status. `finished`: the
    generation in which all steps were committed, which may be the one before the newest."""
    named = newest.report.checkpoint
    counts = newest.generation == finished or (newest.generation == current.number and has_started)
    if named is None or not counts:
        return None
    pair = (named["generation"], named["step"])
    if known is not None and pair <= (known["generation"], known["step"]):
        return None
    kept = [*(known or {}).get("kept", ()), named["directory"]][-keep:]
    return {
        "generation": pair[0],
        "step": pair[1],
        "directory": named["directory"],
        "at": clock.stamp(newest.at_s),
        "kept": kept,
    }
