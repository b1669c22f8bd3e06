"""Make a job's log lines readable: cut them, find out which process wrote them, and take out what could steer a terminal. Pure.

A log line is text of a program that may be hostile or broken. So nothing of it reaches a terminal but printable characters, and its
length is bounded. This module knows no cluster and no files: logs of pods and of local workers have the same form, a time and
a text.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

MAX_SHOWN = 4000
"""Longest text of a line, in characters."""
MAX_RAW = 1 << 20
"""Bytes of an unfinished line that are kept. Further bytes of the line are dropped."""
FRAME_S = 5.0
"""Shortest time between two shown states of a progress bar that has not ended its line."""
WINDOW_S = 1.0
"""Time for which a followed line waits for older lines of other workers."""
MAX_HELD = 20_000
"""Number of followed lines that wait at once. More lines are shown sooner."""

_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)(?: |$)")
_LABEL = re.compile(r"\[(?:rank|process) (\d{1,9})\] ")
_LABELLED_RANK = re.compile(r"\[rank (\d{1,9})\] ")
_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC: titles, links, clipboard
    r"|\x1b[ -/]*[0-~]"  # other escapes
    r"|\x9b[0-?]*[ -/]*[@-~]"  # CSI as one character
)
# C0 and C1 controls but the tab, line separators, and what changes the direction of text or is invisible: Unicode's category Cf,
# fillers, and the plane of tags, in which a text can be hidden. It is a table, because asking for the category of each character
# takes 0.1 s at each start. Variation selectors of the basic plane are left: signs such as \u26a0\ufe0f are common in logs.
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True)
class Worker:
    """A pod, or a local worker, that writes a log."""

    slot: int
    attempt: int = 0


@dataclass(frozen=True)
class Line:
    """A line of a log, as it is shown."""

    at_ns: int
    """Time on the clock of the worker's node, in nanoseconds since the epoch. 0 if the line has no time."""
    worker: Worker
    rank: int | None
    """Rank of the process that wrote it. None: unknown, or the agent wrote it."""
    text: str

    def __str__(self) -> str:
        """Return the line with [slot.rank] in front."""
        return shown(self, colour=False)


def clean(text: str) -> str:
    """Return text that a terminal can be shown: no escape sequence acts, and no character is invisible or changes the direction.

    Sequences are removed, other control characters are written as their code."""
    text = _SEQUENCES.sub("", text)
    return _UNSAFE.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def bounded(text: str, limit: int = MAX_SHOWN, dropped: int = 0) -> str:
    """Return at most `limit` characters of a line, and how many more there are. `dropped`: characters that are gone already."""
    more = max(0, len(text) - limit) + dropped
    return f"{text[:limit]} … ({more} more character{'' if more == 1 else 's'})" if more else text


def split_time(raw: bytes) -> tuple[int, bytes]:
    """Return the time before a line, in nanoseconds since the epoch, and the text after it. The time is 0 if there is none."""
    found = _TIME.match(raw)
    if found is None:
        return 0, raw
    whole, fraction, zone = found.groups()
    try:
        at = datetime.fromisoformat(whole.decode() + zone.decode().replace("Z", "+00:00"))
        seconds = int(at.timestamp())
    except (ValueError, OverflowError):
        return 0, raw
    return seconds * 10**9 + int((fraction or b"").ljust(9, b"0")), raw[found.end() :]


@dataclass
class Cutter:
    """Cuts the output of one worker into lines. A progress bar is one line that shows its last state."""

    _partial: bytes = b""
    _dropped: int = 0
    _shown_s: float = float("-inf")
    _shown: bytes = b""

    def feed(self, data: bytes) -> list[tuple[bytes, int]]:
        """Take in output. Return the lines that are complete, each with the number of bytes that were dropped from it."""
        out = []
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._grow(part)
            out.append(self._take())
        self._grow(rest)
        return out

    @property
    def is_empty(self) -> bool:
        """True if no line is unfinished."""
        return not self._partial and not self._dropped

    def end(self) -> list[tuple[bytes, int]]:
        """Return the unfinished line, if there is one. Called at the end of the output."""
        return [] if self.is_empty else [self._take()]

    def frame(self, now_s: float) -> list[tuple[bytes, int]]:
        """Return the state of a progress bar that is still being drawn, at most every FRAME_S seconds and only if it changed."""
        last = self._partial.rfind(b"\r")
        if last < 0 or now_s - self._shown_s < FRAME_S or self._partial[:last] == self._shown:
            return []
        self._shown_s, self._shown = now_s, self._partial[:last]
        return [(self._shown, 0)]

    def _grow(self, data: bytes) -> None:
        self._partial += data
        if len(self._partial) <= MAX_RAW:
            return
        cut = self._partial.rfind(b"\r", 0, -1)
        if cut > 0:  # earlier states of a progress bar
            time = _TIME.match(self._partial)
            self._partial = (time[0] if time else b"") + self._partial[cut + 1 :]
        if len(self._partial) > MAX_RAW:
            self._dropped += len(self._partial) - MAX_RAW
            self._partial = self._partial[:MAX_RAW]

    def _take(self) -> tuple[bytes, int]:
        taken = self._partial, self._dropped
        self._partial, self._dropped = b"", 0
        return taken


def lines_of(raw: bytes, worker: Worker, rank: int | None, dropped: int = 0) -> list[Line]:
    """Return the lines that a raw one shows.

    It is one line, or one for each process of the worker that drew a progress bar there. `rank` is the rank of the worker's
    only process: the agent labels no line of it, so a label is a part of its text.
    """
    at_ns, rest = split_time(raw)
    text = rest.decode("utf-8", "replace")
    states: dict[str, str] = {}
    *_, last = frames = [frame for frame in text.split("\r") if frame.strip()] or [""]
    for frame in frames:
        label = _LABEL.match(frame) if rank is None else None
        key = label[0] if label else ""
        states.pop(key, None)  # the order is that of the last states
        states[key] = frame
    out = []
    for key, frame in states.items():
        if key == "" and frame is not last and len(states) > 1:
            continue  # a rest of a bar that has no label
        found = _LABELLED_RANK.match(frame) if key else None
        of_process = int(found[1]) if found else (rank if not key and not frame.startswith("regroup: ") else None)
        said = frame[found.end() :] if found else frame
        out.append(Line(at_ns, worker, of_process, bounded(clean(said).rstrip(), dropped=dropped)))
    return out


def merged(streams: Iterable[Iterator[Line]]) -> Iterator[Line]:
    """Yield the lines of streams that end, in the order of their times.

    Each stream keeps its own order, even if a clock was set back.
    """
    return (line for _, line in heapq.merge(*(_monotonic(stream) for stream in streams), key=lambda pair: pair[0]))


def _monotonic(stream: Iterator[Line]) -> Iterator[tuple[int, Line]]:
    newest = 0
    for line in stream:
        newest = max(newest, line.at_ns)
        yield newest, line


@dataclass
class Reorder:
    """Puts lines that arrive now in the order of their times: each waits WINDOW_S seconds for older ones.

    A line that comes later than that is shown out of order, so that nothing waits for a worker that is silent.
    """

    window_s: float = WINDOW_S
    max_held: int = MAX_HELD
    _held: list[tuple[int, int, float, Line]] = field(default_factory=list)
    _count: int = 0
    _newest: dict[Worker, int] = field(default_factory=dict)

    def add(self, line: Line, now_s: float) -> None:
        """Take in a line that arrived at `now_s` on a monotonic clock."""
        at_ns = self._newest[line.worker] = max(self._newest.get(line.worker, 0), line.at_ns)
        self._count += 1
        heapq.heappush(self._held, (at_ns, self._count, now_s, line))

    def due(self, now_s: float) -> list[Line]:
        """Return the lines that are shown now: none of them waits longer than the window, and few enough are held."""
        out: list[Line] = []
        waited = [at_ns for at_ns, _, arrived_s, _ in self._held if now_s - arrived_s >= self.window_s]
        newest = max(waited, default=-1)
        while self._held and (self._held[0][0] <= newest or len(self._held) > self.max_held):
            out.append(heapq.heappop(self._held)[3])
        return out

    def rest(self) -> list[Line]:
        """Return all lines that are held, in order."""
        out = [entry[3] for entry in sorted(self._held, key=lambda entry: entry[:2])]
        self._held.clear()
        return out


_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def duration(text: str) -> timedelta:
    """Return a duration such as 90s, 10m or 1h30m. Raises ValueError for any other text."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        raise ValueError(f"{text!r} is not a duration; give one such as 90s, 10m or 1h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    try:
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except OverflowError:
        raise ValueError(f"{text!r} is too long; give a duration such as 90s, 10m or 1h30m") from None


COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
"""ANSI colours of workers, by slot. Red is not among them, as people read it as an error."""


def shown(line: Line, *, colour: bool, time: bool = False) -> str:
    """Return a line with `[slot.rank]` in front, or `[slot]` if the rank is unknown."""
    label = f"[{line.worker.slot}]" if line.rank is None else f"[{line.worker.slot}.{line.rank}]"
    if colour:
        label = f"\x1b[{COLOURS[line.worker.slot % len(COLOURS)]}m{label}\x1b[0m"
    stamp = f"{stamp_of(line.at_ns)} " if time and line.at_ns else ""
    return f"{stamp}{label} {line.text}"


def stamp_of(at_ns: int) -> str:
    """Return a time of day in UTC with milliseconds."""
    seconds, rest = divmod(at_ns, 10**9)
    of_day = seconds % 86400
    return f"{of_day // 3600:02}:{of_day // 60 % 60:02}:{of_day % 60:02}.{rest // 10**6:03}"
