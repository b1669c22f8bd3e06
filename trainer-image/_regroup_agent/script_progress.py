"""Makes one report of what an unmodified script says of its progress. Pure; the table is tests/unit/agent/test_script_progress.py.

A script speaks in up to three ways (docs/design/adr/0079-progress-of-any-program.md), in the order of trust:

- Logged: its lines match the pattern of spec.progress.log, which the user wrote for this program.
- Reported: it posts its status to the agent, as Kubeflow's protocol says.
- Counted: the hook in its process counts optimizer steps. That number begins at 0 with each process.

Step, total and share are those of the first way that gives a step or a share. They are never mixed with those of another way. The
loss is that of the first way that gives one. If several processes of the worker speak in one way, the lowest local rank counts. A
change of any of their numbers is a sign that the program goes on. The time between two signs is that of one process in one way. If
eight processes change their numbers together each minute, it is a minute.
"""

from __future__ import annotations

import collections
import math
import statistics
from dataclasses import dataclass
from typing import TypeVar

from regroup.protocol import wire

_T = TypeVar("_T")
ORDER = (wire.LOGGED, wire.REPORTED, wire.COUNTED)
POINTS = 20
"""The pace is taken over so many changes of the number, and the median time between two signs over as many."""
MOST = 2**53
"""Bound for steps: a larger number is no step."""
JUMP = 10
"""A first change that is so many times as large as the usual one is no work: the program has gone on from a checkpoint."""


@dataclass(frozen=True)
class Words:
    """The words of a program on its progress at one time. None: it does not say that."""

    step: int | None = None
    total: int | None = None
    percent: float | None = None
    """Share of the work that is done, 0 to 100."""
    loss: float | None = None
    """It may be no finite number; then no loss is reported."""
    step_s: float | None = None
    """Seconds that a step takes, by the program's own measure."""

    def checked(self) -> Words:
        """Return these words without what cannot be true, such as a negative step or a share above 100."""
        return Words(
            step=self.step if self.step is not None and 0 <= self.step < MOST else None,
            total=self.total if self.total is not None and 0 < self.total < MOST else None,
            percent=self.percent if self.percent is not None and 0 <= self.percent <= 100 else None,
            loss=self.loss,
            step_s=self.step_s if self.step_s is not None and 0 <= self.step_s < math.inf else None,
        )


class _Voice:
    """The words of one process in one way."""

    def __init__(self) -> None:
        self.words = Words()
        self._points: collections.deque[tuple[float, float]] = collections.deque(maxlen=POINTS + 1)
        """Times of changes of the place, and the place: a step, or a share of a program that says no step."""
        self.moved_s: float | None = None
        """Time of the last change of the place."""
        self.gaps: collections.deque[float] = collections.deque(maxlen=POINTS)
        """Times between two changes."""
        self.longest_s: float | None = None

    @property
    def place(self) -> float | None:
        """The step that the program has reached, or its share; None: it has not said.

        A share of 0 without a step is none: Hugging Face's Trainer begins with it after a resume, too.
        """
        if self.words.step is not None:
            return self.words.step
        return self.words.percent or None

    @property
    def pace_s(self) -> float | None:
        """Seconds for one step, or for one percent of a program that says no step; None: they are not known yet."""
        if len(self._points) < 2:
            return self.words.step_s
        points = list(self._points)
        if len(points) > 2:
            first, *others = (later[1] - earlier[1] for earlier, later in zip(points, points[1:]))
            points = points[1:] if first > JUMP * statistics.median(others) else points
        (begin_s, begin), (end_s, end) = points[0], points[-1]
        return (end_s - begin_s) / (end - begin)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the end at the present pace; None: end or pace is not known."""
        words, pace_s = self.words, self.pace_s
        if pace_s is None or self.place is None:
            return None
        if words.step is not None and words.total is not None:
            return max(0, words.total - words.step) * pace_s
        if words.percent is None:
            return None
        if words.step is None:
            return (100 - words.percent) * pace_s
        return words.step * (100 - words.percent) / words.percent * pace_s if words.percent else None

    def hear(self, words: Words, now_s: float) -> None:
        """Take in new words."""
        old, was_step = self.place, self.words.step is not None
        # Each message of a program that says its share says it again: an old share does not belong to a new step.
        percent = words.percent if words.percent is not None or words.step is not None else self.words.percent
        self.words = Words(
            step=_or(words.step, self.words.step),
            total=_or(words.total, self.words.total),
            percent=percent,
            loss=_or(words.loss, self.words.loss),
            step_s=_or(words.step_s, self.words.step_s),
        )
        place = self.place
        if place is None or place == old:
            return
        if old is not None and (place < old or was_step != (self.words.step is not None)):
            self._points.clear()  # it counts anew, or something else: the pace of before says nothing
        self._points.append((now_s, place))
        if self.moved_s is not None:
            gap_s = now_s - self.moved_s
            self.gaps.append(gap_s)
            self.longest_s = max(gap_s, self.longest_s or 0.0)
        self.moved_s = now_s


class ScriptProgress:
    """The newest words of the worker's present processes, and the time at which they are reported."""

    def __init__(self) -> None:
        self.due_s: float | None = None
        """Time at which the newest words are reported; None: the operator knows them."""
        self._sent_s = -math.inf
        self._has_dropped = False
        """A way was dropped. The operator is told so for all later processes, too, since it would wait for their first word."""
        self.begin()

    def begin(self) -> None:
        """Forget everything, because new processes start."""
        self.due_s = None
        self._voices: dict[tuple[int, int], _Voice] = {}
        """Maps a place in ORDER and a local rank to what was said so. There are at most three for each process."""
        self._incarnation = 0
        """Incarnation of the newest process that has said something."""
        self._has_reported = False

    def told(self, way: str, process: tuple[int, int], words: Words, *, interval_s: float, now_s: float) -> None:
        """Take in what the `process` (local rank, incarnation) says in one way of ORDER."""
        local_rank, incarnation = process
        voice = self._voices.setdefault((ORDER.index(way), local_rank), _Voice())
        before, self._incarnation = voice.words, max(self._incarnation, incarnation)
        voice.hear(words.checked(), now_s)
        if voice.words != before:
            self._changed(interval_s, now_s)

    def drop(self, way: str, incarnation: int, *, interval_s: float, now_s: float) -> None:
        """Forget what was said in this way, because nothing more will be, and report that.

        The operator would take the last word for a hang. If there is none, it would wait for a word of the processes up to this
        `incarnation`.
        """
        self._voices = {key: voice for key, voice in self._voices.items() if key[0] != ORDER.index(way)}
        self._has_dropped = True
        self.spawned(incarnation, interval_s=interval_s, now_s=now_s)

    def spawned(self, incarnation: int, *, interval_s: float, now_s: float) -> None:
        """Take in that a process runs. Its first report is due if a way was dropped, even if it says nothing."""
        if self._has_dropped:
            self._incarnation, self._has_reported = max(self._incarnation, incarnation), True
            self._changed(interval_s, now_s)

    def hurry(self, interval_s: float) -> None:
        """Shorten the delay of the newest words to `interval_s` after the last report. The operator has just asked for that."""
        if self.due_s is not None:
            self.due_s = min(self.due_s, self._sent_s + interval_s)

    def take(self, now_s: float) -> wire.ScriptProgress | None:
        """Return the report of the newest words, and note it as sent. None: there is none.

        A report without a step, a share and a loss takes back the one before it, or says that there will be none.
        """
        self.due_s = None
        voices = [(ORDER[key[0]], self._voices[key]) for key in sorted(self._voices)]
        found = next(((way, voice) for way, voice in voices if voice.place is not None), None)
        loss = next((voice.words.loss for _, voice in voices if voice.words.loss is not None), None)
        if found is None and loss is None and not self._has_reported:
            return None
        self._sent_s, self._has_reported = now_s, True
        way, shown = found if found is not None else (wire.LOGGED, _Voice())
        words, remaining_s = shown.words, shown.remaining_s
        all_moved_s = [voice.moved_s for _, voice in voices if voice.moved_s is not None]
        return wire.ScriptProgress(
            incarnation=self._incarnation,
            way=way,
            step=words.step,
            total_steps=words.total,
            percent=words.percent,
            loss=loss,
            step_s=shown.pace_s if words.step is not None else None,
            remaining_s=None if remaining_s is None else min(wire.MAX_REMAINING_S, remaining_s),
            every_s=max((statistics.median(voice.gaps) for _, voice in voices if voice.gaps), default=None),
            longest_s=max((voice.longest_s for _, voice in voices if voice.longest_s is not None), default=None),
            age_ms=round((now_s - max(all_moved_s)) * 1000, 1) if all_moved_s else 0.0,
        )

    def _changed(self, interval_s: float, now_s: float) -> None:
        if self.due_s is None:
            self.due_s = max(now_s, self._sent_s + interval_s)


def _or(new: _T | None, old: _T | None) -> _T | None:
    return old if new is None else new
