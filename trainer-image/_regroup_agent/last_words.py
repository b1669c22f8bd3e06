"""What a process wrote to stderr last: the line that explains its end, and the last lines of its traceback. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

KEPT_BYTES = 8192
"""Of a process's stderr that are kept: a deep traceback begins further up, but its end is what explains."""
MAX_LINE = 500
MAX_LINES = 12
MAX_TAIL = 1500

_TRACEBACK = re.compile(r"^(\[[^\]]{1,32}\]: ?)?(Traceback \(most recent call last\):|Fatal Python error: )")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Torch puts it before each line of a traceback once a process group is initialised."""


@dataclass(frozen=True)
class LastWords:
    """`line`: the exception, or else the last line that was written. `tail`: the last lines of the traceback, or of stderr."""

    line: str = ""
    tail: str = ""


def last_words(stderr: bytes) -> LastWords:
    """Return the last words in the end of a process's stderr. What follows a traceback (warnings at exit) is left out."""
    lines = [line.rstrip() for line in stderr[-KEPT_BYTES:].decode("utf-8", "replace").splitlines() if line.strip()]
    begins = [index for index, line in enumerate(lines) if _TRACEBACK.match(line)]
    if begins:
        lines = _traceback(lines[begins[-1] :])
    lines = [_PREFIX.sub("", line) for line in lines]
    if not lines:
        return LastWords()
    kept = lines[-MAX_LINES:]
    while len(kept) > 1 and sum(len(line) + 1 for line in kept) > MAX_TAIL:
        kept = kept[1:]
    return LastWords(lines[-1].strip()[:MAX_LINE], "\n".join(kept)[:MAX_TAIL])


def _traceback(lines: list[str]) -> list[str]:
    """Return the lines from a traceback's first to the one that names the exception: the first that is not indented."""
    if _TRACEBACK.match(lines[0]) and "Fatal Python error" in lines[0]:
        return lines  # its frames follow, and nothing comes after it
    for index, line in enumerate(lines[1:], start=1):
        if not _PREFIX.sub("", line).startswith(" "):
            return lines[: index + 1]
    return lines
