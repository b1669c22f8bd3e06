"""Finds in a process's stderr the line that explains its end, and the last lines of its traceback. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from regroup.protocol.text import shorten

KEPT_BYTES = 8192
"""Bytes at the end of a process's stderr that are kept. A deep traceback begins further up, but its end names the exception."""
MAX_LINE = 500
MAX_LINES = 12
MAX_TAIL = 1500

_TERMINATED = "terminate called after throwing an instance of "
_TRACEBACK = re.compile(
    r"^(\[[^\]]{1,32}\]: ?)?( *\+ Exception Group Traceback|Traceback \(most recent call last\):|Fatal Python error: |"
    + _TERMINATED
    + ")"
)
_CAUGHT = re.compile(r": Caught \w+ in ")
"""Text by which torch marks an exception from another process, such as a DataLoader's worker, whose traceback follows."""
_ORIGINAL = "Original Traceback (most recent call last):"
_LISTS = re.compile(r"(:|\d+ validation errors? for \S+)$")
"""End of a message's first line if the message goes on in a list below, as of torch's load_state_dict and pydantic."""
_LISTED = 4
"""Number of lines of such a list that are kept."""
_NOISE = re.compile(r"\[|.*Warning\b|\d{4}-\d\d")
"""Beginning of a line that a logger or a warning has put below a message."""
_GROUPED = re.compile(r"^ *\| (?! |Traceback |Exception Group Traceback |The above exception |During handling )(.+)")
"""Line of an exception group's traceback that names the group or an exception in it."""
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Text that torch puts before each line of a traceback once a process group is initialised."""


@dataclass(frozen=True)
class LastWords:
    """The end of a process's stderr, for the fault that reports its exit."""

    line: str = ""
    """The exception, or the last line of stderr if there is none."""
    tail: str = ""
    """Last lines of the traceback, or of stderr if there is none."""


def last_words(stderr: bytes) -> LastWords:
    """Return the last words of a process from the end of its stderr. Lines after the last traceback are left out."""
    lines = [line.rstrip() for line in stderr[-KEPT_BYTES:].decode("utf-8", "replace").splitlines() if line.strip()]
    begins = [index for index, line in enumerate(lines) if _TRACEBACK.match(line)]
    if not begins:
        return _words(lines, len(lines) - 1)
    begin = begins[-1]
    before = ""
    if len(begins) > 1 and _PREFIX.sub("", lines[begins[-2]]).startswith(_TERMINATED):
        before = " ".join(line.strip() for line in lines[begins[-2] : min(begin, begins[-2] + 2)]) + " "
    lines = [text for line in lines[begin:] if (text := _PREFIX.sub("", line))]  # drops lines that were only the prefix
    if lines[0].startswith("Fatal Python error"):
        return LastWords(
            shorten(before + lines[0], MAX_LINE), _bounded(lines[:MAX_LINES])
        )  # the innermost calls come first
    if lines[0].startswith(_TERMINATED):
        return _words(lines, 0, sum("what():" in line for line in lines[1:2]))
    if "Exception Group" in lines[0]:
        found = [line[1] for line in map(_GROUPED.match, lines) if line]
        return LastWords(shorten(" ".join(found[: 1 + _LISTED]), MAX_LINE), _bounded(lines[-MAX_LINES:]))
    at = _exception(lines, 0)
    while _CAUGHT.search(lines[at]) and _ORIGINAL in lines[at + 1 :]:
        at = _exception(lines, lines.index(_ORIGINAL, at))
    listed = []
    if _LISTS.search(lines[at]):
        below = lines[at + 1 : at + 1 + _LISTED]
        is_indented = lines[at].endswith(":") and bool(below) and below[0][0].isspace()
        for line in below:
            if (is_indented and not line[0].isspace()) or _NOISE.match(line):
                break
            listed.append(line)
    return _words(lines, at, len(listed))


def _words(lines: list[str], at: int, num_listed: int = 0) -> LastWords:
    """Return the words of an exception in line `at`: with `num_listed` lines below it, and with the lines above it as its tail."""
    if not lines:
        return LastWords()
    lines = [_PREFIX.sub("", line) for line in lines[: at + 1 + num_listed]]
    said = " ".join(line.strip() for line in lines[at:])
    return LastWords(shorten(said, MAX_LINE), _bounded(lines[-MAX_LINES:]))


def _bounded(kept: list[str]) -> str:
    """Return the lines as a text of at most MAX_TAIL characters. The first lines are left out if they are too many."""
    while len(kept) > 1 and sum(len(line) + 1 for line in kept) > MAX_TAIL:
        kept = kept[1:]
    return "\n".join(kept)[:MAX_TAIL]


def _exception(lines: list[str], begin: int) -> int:
    """Return the number of the line that names a traceback's exception: the first line below `begin` that is not indented."""
    for index in range(begin + 1, len(lines)):
        if not lines[index].startswith(" "):
            return index
    return len(lines) - 1
