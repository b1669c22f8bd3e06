"""Finds in the lines of a program what it says of its progress, by the pattern of spec.progress.log.

A regular expression may take exponential time, and Python's matcher knows no limit. An alarm ends it: the matcher looks for signals
every few thousand steps. So the agent never stands still, which the operator would take for a lost worker. A pattern that
was too slow a few times is given up, with a sentence. All limits are in CPU time, because a busy node makes no pattern slow. Runs
in the main thread, because signals arrive there.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from regroup.protocol.progress_log import LOSS, PERCENT, STEP, TOTAL

from .script_progress import Words

LOOK_S = 0.05
"""Most CPU time of one look at new output. A look at a line takes microseconds."""
MAX_LINE = 1000
"""Characters of a line to which the pattern is applied."""
MAX_KEPT = 1 << 16
"""Bytes that wait for the next look. Of a program that writes more, the newest lines count."""
REST = 20
"""A look that took t seconds is followed by a rest of REST * t. So looks take a twentieth of one core at most."""
MAX_SLOW = 3
"""So many looks that were too slow end the use of the pattern, ..."""
GOOD = 100
"""... unless so many others lay between two of them."""
_SEPARATORS = str.maketrans("", "", ",_")


class Timer(Protocol):
    """A call that is due."""

    def cancel(self) -> None:
        """Call it off."""


Later = Callable[[float, Callable[[], None]], Timer]
"""Calls a function after some seconds."""


class _TooSlowError(Exception):
    pass


class ProgressPattern:
    """The pattern of one worker. All streams of its processes share it.

    - `on_words(local_rank, incarnation, words)` gets what a process has said.
    - `on_given_up()` is called once, after the last words.
    """

    def __init__(
        self,
        pattern: re.Pattern[str],
        log: Callable[[str], None],
        on_words: Callable[[int, int, Words], None],
        on_given_up: Callable[[], None],
    ) -> None:
        self._pattern: re.Pattern[str] | None = pattern
        self._names = frozenset(pattern.groupindex)
        self._log, self._on_words, self._on_given_up = log, on_words, on_given_up
        self._num_slow = self._num_good = 0
        """Looks that were too slow, and others since the last of these."""

    def reader(self, local_rank: int, incarnation: int, later: Later) -> ProgressReader:
        """Return a reader for one output stream of a process. `later`: call_later of the event loop."""
        return ProgressReader(self, lambda words: self._on_words(local_rank, incarnation, words), later)

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
        else:
            self._num_good += 1
        return _words(found) if found and self._pattern is not None else None

    def _slow(self) -> None:
        self._num_slow = 1 if self._num_good >= GOOD else self._num_slow + 1
        self._num_good = 0
        if self._num_slow >= MAX_SLOW:
            self._pattern = None
            self._log(
                f"The pattern of spec.progress.log took longer than {LOOK_S * 1000:.0f} ms {MAX_SLOW} times, and is not used any "
                "more. Write it without a repetition inside of a repetition, and with fewer .* in it."
            )
            self._on_given_up()


class ProgressReader:
    """The output of one stream of a process."""

    def __init__(
        self,
        pattern: ProgressPattern,
        on_words: Callable[[Words], None],
        later: Later,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Take a reader that measures its looks with `clock`, and rests for the seconds that it gives to `later`."""
        self._pattern, self._on_words, self._later, self._clock = pattern, on_words, later, clock
        self._kept = b""
        self._is_cut = False
        """The first line of what is kept has lost its beginning."""
        self._rest: Timer | None = None
        """End of the rest; None: the reader does not rest."""

    def add(self, data: bytes) -> None:
        """Take in output, and pass on what its complete lines say. A carriage return ends a line, as in a progress bar."""
        self._kept += data
        if len(self._kept) > MAX_KEPT:
            self._kept, self._is_cut = self._kept[-MAX_KEPT:], True
        if self._rest is None:
            self._read()

    def end(self) -> None:
        """Pass on what the rest says. Called when the process has ended."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        rest, self._kept = self._kept, b""
        self._look(rest)

    def _rested(self) -> None:
        self._rest = None
        self._read()

    def _read(self) -> None:
        end = max(self._kept.rfind(b"\n"), self._kept.rfind(b"\r")) + 1
        if not end:
            return
        lines, self._kept = self._kept[:end], self._kept[end:]
        began_s = self._clock()
        self._look(lines)
        self._rest = self._later(REST * (self._clock() - began_s), self._rested)

    def _look(self, lines: bytes) -> None:
        if self._is_cut:
            _, end, lines = lines.replace(b"\r", b"\n").partition(b"\n")
            self._is_cut = not end
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
    """Raise _TooSlowError in the block after so many seconds of CPU time."""

    def expire(number: int, frame: Any) -> None:  # noqa: ARG001
        raise _TooSlowError

    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
