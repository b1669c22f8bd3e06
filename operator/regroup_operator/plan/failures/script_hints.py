"""Say what a failure of an unmodified script is a consequence of, where the exit itself does not. Pure.

Each change of size starts a script's processes again, with SIGTERM in the middle of whatever they do. So a script fails for good at
a size that it refuses, or at a file that it was writing. Where one rank returns early, the others fail in their next collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from regroup_operator.api.conditions import TRAINING
from regroup_operator.api.members import MemberId, format_members
from regroup_operator.api.status import JobStatus
from regroup_operator.model.plan import Clock, Crash, Failure, seconds_of
from regroup_operator.model.worker import Current
from regroup_operator.plan.failures.crashes import STEADY_S

_TORN = (
    "PytorchStreamReader failed",
    "unexpected EOF, expected",
    "Ran out of input",
    "pickle data was truncated",
    "invalid header or archive is corrupted",
    "MetadataIncompleteBuffer",
    "HeaderTooLarge",
    "truncated file",
)
"""Texts of torch.load, pickle, safetensors and h5py about a file that was not written to its end."""


def with_returned(
    failures: tuple[Failure, ...], current: Current | None, returned: Iterable[MemberId]
) -> tuple[Failure, ...]:
    """Return the failures, those of the newest generation with its members whose script has `returned` 0."""
    if current is None or not failures:
        return failures
    words = format_members(returned)
    return tuple(replace(f, returned=words) if f.generation == current.number else f for f in failures)


def steady_size(known: int, status: JobStatus, current: Current | None, clock: Clock) -> int:
    """Return ScriptMemory.steady_size: the newest generation's workers once its script has run for STEADY_S, else as it was."""
    said = status.condition(TRAINING)
    if current is None or not current.adopted or said is None or said.status != "True":
        return known
    # The condition may be the one of the generation before, where this one is planned.
    since_s = max(clock.at_s(seconds_of(said.last_transition_time)), current.announced_at_s)
    return len(current.members) if clock.now_s >= since_s + STEADY_S else known


def crash_hints(crash: Crash, current: Current | None, steady: int) -> str:
    """Return what may be behind a crash that repeats in tier Script, or an empty text. `steady` is ScriptMemory.steady_size."""
    hints = []
    if current is not None and steady not in (0, len(current.members)):
        hints.append(
            f"The script trained with {_workers(steady)} before, and fails with {len(current.members)}. If it refuses this number, "
            "set spec.elasticPolicy.minReplicas and maxReplicas to the numbers that it takes, or leave spec.elasticPolicy out: the "
            "job then waits for all its workers."
        )
    if any(sign in f"{crash.last.tail} {crash.last.last_line}" for sign in _TORN):
        hints.append(
            "A file that it reads was not written to its end, as by a process that was ended while it saved. Remove the file, and "
            "have the script save under another name first, then rename (docs/how-to/scripts-without-the-library.md)."
        )
    return " ".join(hints)


def _workers(count: int) -> str:
    return f"{count} worker" + ("" if count == 1 else "s")
