"""Say what a failure of an unmodified script is a consequence of, where the exit itself does not. Pure.

Each change of size starts a script's processes again, with SIGTERM in the middle of whatever they do. So a script fails for good at
a file that it was writing. Where one rank returns early, the others fail in their next collective. A size that a script refuses is
judged in refused_size.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from regroup_operator.api.members import MemberId, format_members
from regroup_operator.model.plan import Crash, Failure
from regroup_operator.model.worker import Current

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


def is_torn(failure: Failure) -> bool:
    """Return whether a process failed at a file that was not written to its end."""
    return any(sign in f"{failure.tail} {failure.last_line}" for sign in _TORN)


def crash_hint(crash: Crash) -> str:
    """Return what may be behind a crash that repeats in tier Script, or an empty text."""
    if not is_torn(crash.last):
        return ""
    return (
        "A file that it reads was not written to its end, as by a process that was ended while it saved. Remove the file, and "
        "have the script save under another name first, then rename (docs/how-to/scripts-without-the-library.md)."
    )
