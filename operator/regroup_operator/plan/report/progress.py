"""Make status.progress, samples and checkpoint from what members report. Pure.

What counts as the newest report is facts/stalls.py's affair. A checkpoint is named only once the generation's startStep is known
(rule MAD), and never an older one.
"""

from __future__ import annotations

from regroup.protocol.wire import COUNTED
from regroup_operator.api.status import CheckpointStatus, Progress
from regroup_operator.model.plan import Clock
from regroup_operator.model.worker import Current
from regroup_operator.plan.facts.script_words import ScriptWords
from regroup_operator.plan.facts.stalls import Reported


def progress_status(newest: Reported, stored: Progress | None, clock: Clock, step_time: str | None = None) -> Progress:
    """Return status.progress. `step_time`: see breakdown.py.

    What is unchanged keeps its time, since the two clocks drift against each other."""
    report, stored = newest.report, stored or Progress()
    # Who adopts says its step without a loss; a step that was committed without one had a loss that is not a number.
    is_newer = stored.step is None or newest.step > stored.step
    loss = report.loss if report.loss is not None or is_newer else stored.loss
    progress = Progress(
        step=newest.step,
        total_steps=report.total_steps if report.total_steps is not None else stored.total_steps,
        loss=loss,
        samples_per_second=report.samples_per_second,
        noise_scale=report.noise_scale,
        step_time=step_time,
        at=stored.at,
        curve=stored.curve,
    )
    noise_scale = stored.noise_scale if report.noise_scale is not None else None
    same = stored.at is not None and progress == stored.with_fields(noise_scale=noise_scale, step_time=step_time)
    return progress if same else progress.with_fields(at=clock.stamp(newest.at_s))


def script_progress_status(words: ScriptWords, stored: Progress | None, clock: Clock) -> Progress:
    """Return status.progress of a job whose script does not use the library.

    Nothing of `stored` is kept but the time of what is unchanged: the step of a process before may be one that is lost."""
    word, is_counted = words.word, words.word.way == COUNTED
    progress = Progress(
        source=word.way,
        step=None if is_counted else word.step,
        optimizer_steps=word.step if is_counted else None,
        total_steps=word.total_steps,
        percent=word.percent,
        loss=word.loss,
        step_time=None if word.step_s is None else f"{word.step_s:.3g} s",
        remaining_seconds=None if word.remaining_s is None else round(word.remaining_s),
        at=None if stored is None else stored.at,
        curve=None if stored is None else stored.curve,
    )
    return (
        progress
        if progress.at is not None and progress == stored
        else progress.with_fields(at=clock.stamp(words.told_s))
    )


def checkpoint_status(
    newest: Reported,
    stored: CheckpointStatus | None,
    current: Current,
    *,
    has_started: bool,
    finished: int | None = None,
    keep: int,
    clock: Clock,
) -> CheckpointStatus | None:
    """Return the new status.checkpoint, or None to leave the known one. `has_started`: startStep is in the status. `finished`: the
    generation in which all steps were committed, which may be the one before the newest."""
    named = newest.report.checkpoint
    counts = newest.generation == finished or (newest.generation == current.number and has_started)
    if named is None or not counts:
        return None
    pair = (named["generation"], named["step"])
    if stored is not None and pair <= (stored.generation, stored.step):
        return None
    kept = [] if stored is None else stored.kept
    return CheckpointStatus(
        generation=pair[0],
        step=pair[1],
        directory=named["directory"],
        kept=[*kept, named["directory"]][-keep:],
        at=clock.stamp(newest.at_s),
    )
