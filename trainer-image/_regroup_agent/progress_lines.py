"""Finds in the lines of a program what it says of its progress, by the pattern of spec.progress.log.

A regular expression may take exponential time, and Python's matcher knows no limit. An alarm ends it: the matcher looks for signals
every few thousand steps. So the agent never stands still, which the operator would take for a lost worker. A pattern that
was too slow a few times is given up, with a sentence. Runs in the main thread, because signals arrive there.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from regroup.protocol.progress_log import LOSS, PERCENT, STEP, TOTAL

from .script_progress import Words

LOOK_S = 0.05
"""Longest time of one look at new output. A look at a line takes microseconds."""
MAX_LINE = 1000
"""Characters of a line to which the pattern is applied."""
MAX_KEPT = 1 << 16
"""Bytes that wait for the next look. Of a program that writes more, the newest lines count."""
REST = 20
"""A look that took t seconds is followed by a rest of REST * t. So looks take a twentieth of one core at most."""
MAX_SLOW = 3
"""So many looks that were too slow end the use of the pattern."""
_SEPARATORS = str.maketrans("", "", ",_")


class _TooSlowError(Exception):
    pass


class ProgressPattern:
    """The pattern of one worker. All streams of its processes share it.

    `on_words(local_rank, incarnation, words)` gets what a process has said.
    """

    def __init__(
        self, pattern: re.Pattern[str], log: Callable[[str], None], on_words: Callable[[int, int, Words], None]
    ) -> None:
        self._pattern: re.Pattern[str] | None = pattern
        self._names = frozenset(pattern.groupindex)
        self._log, self._on_words, self._num_slow = log, on_words, 0

    def reader(self, local_rank: int, incarnation: int) -> ProgressReader:
        """Return a reader for one output stream of a process."""
        return ProgressReader(self, lambda words: self._on_words(local_rank, incarnation, words))

    def find(self, text: str) -> Words | None:
        """Return the newest number of each group in these lines; None: no line matches."""
        pattern = self._pattern
        if pattern is None:
            return None
        found: dict[str, str] = {}
        try:
            with _alarm(LOOK_S):
                for line in reversed(text.splitlines()):
                    match = pattern.search(line[:MAX_LINE])
                    if match is not None:
                        found = {**{k: v for k, v in match.groupdict().items() if v is not None}, **found}
                        if found.keys() == self._names:
                            break
        except _TooSlowError:
            self._slow()
        return _words(found) if found else None

    def _slow(self) -> None:
        self._num_slow += 1
        if self._num_slow >= MAX_SLOW:
            self._pattern = None
            self._log(
                f"The pattern of spec.progress.log took longer than {LOOK_S * 1000:.0f} ms {MAX_SLOW} times, and is not used any "
                "more. Write it without a repetition inside of a repetition, and with fewer .* in it."
            )


class ProgressReader:
    """The output of one stream of a process."""

    def __init__(
        self, pattern: ProgressPattern, on_words: Callable[[Words], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pattern, self._on_words, self._clock = pattern, on_words, clock
        self._kept = b""
        self._rests_until_s = -math.inf

    def add(self, data: bytes) -> None:
        """Take in output, and pass on what its complete lines say. A carriage return ends a line, as in a progress bar."""
        self._kept = (self._kept + data)[-MAX_KEPT:]
        now_s = self._clock()
        if now_s < self._rests_until_s:
            return
        end = max(self._kept.rfind(b"\n"), self._kept.rfind(b"\r")) + 1
        lines, self._kept = self._kept[:end], self._kept[end:]
        self._look(lines)
        after_s = self._clock()
        self._rests_until_s = after_s + REST * (after_s - now_s)

    def end(self) -> None:
        """Pass on what the rest says. Called when the process has ended."""
        rest, self._kept = self._kept, b""
        self._look(rest)

    def _look(self, lines: bytes) -> None:
        words = self._pattern.find(lines.decode("utf-8", "replace")) if lines else None
        if words is not None:
            self._on_words(words)


def _words(found: dict[str, str]) -> Words:
    numbers = {name: _number(text) for name, text in found.items()}
    loss = numbers.get(LOSS)
    return Words(
        step=_whole(numbers.get(STEP)),
        total=_whole(numbers.get(TOTAL)),
        percent=numbers.get(PERCENT),
        loss=loss,
    ).checked()


def _number(text: str) -> float | None:
    """Return the number that a group has matched. Separators of thousands and a percent sign may be in it."""
    try:
        return float(text.strip().rstrip("%").translate(_SEPARATORS))
    except ValueError:
        return None


def _whole(number: float | None) -> int | None:
    return int(number) if number is not None and math.isfinite(number) else None


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise _TooSlowError in the block after so many seconds."""

    def expire(number: int, frame: Any) -> None:  # noqa: ARG001
        raise _TooSlowError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
