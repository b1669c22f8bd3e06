"""Choose the member whose word on a script's progress is shown, and say when that progress last changed. Pure.

No decision on membership, checkpoints or lineage reads this: a script may say what it likes. It only ends the trial of a new size
sooner (failures/refused_size.py). Only words of the newest generation are shown, because its processes may have gone back to an
older checkpoint (docs/design/adr/0079-progress-of-any-program.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from regroup.protocol.wire import COUNTED, LOGGED, REPORTED, ScriptProgress
from regroup_operator.model.worker import Current, Worker

_ORDER = {LOGGED: 0, REPORTED: 1, COUNTED: 2}
"""The ways in the order in which they count: a pattern of the user, a report of the program, a count of ours."""


@dataclass(frozen=True)
class ScriptWords:
    """The words of the newest generation's script on its progress."""

    word: ScriptProgress
    """The word that is shown."""
    told_s: float
    """Time of its last change."""
    moved_s: float
    """Time of the last change of any member's word."""
    every_s: float | None
    """Median time between two changes, of the member where it is longest; None: it is not known yet."""
    longest_s: float
    """The longest time between two changes that any member has seen."""

    @property
    def goes_on(self) -> bool:
        """Return whether a process of the generation has got further since its first word: then it trains."""
        return self.every_s is not None

    @property
    def is_at_end(self) -> bool:
        """Return whether the script says that all its steps are done."""
        word = self.word
        reached = word.step is not None and word.total_steps is not None and word.step >= word.total_steps
        return reached or (word.percent or 0.0) >= 100


def script_words(current: Current | None, members: Iterable[Worker]) -> ScriptWords | None:
    """Return what the newest generation's members say; None: nothing.

    A word with a step or a share counts first, then the best way, then the lowest rank. Rank 0 reports in most programs. The loss
    is the first one that is said.
    """
    if current is None:
        return None
    places = {member: place for place, member in enumerate(current.members)}
    said = [
        (_order(w.session.script), places[w.id], w.session.script, w.session.script_at_s)
        for w in members
        if w.session is not None and w.session.script is not None and w.session.script_generation == current.number
    ]
    if not said:
        return None
    said.sort(key=lambda one: one[:2])
    _, _, word, told_s = said[0]
    return ScriptWords(
        word=replace(word, loss=next((one[2].loss for one in said if one[2].loss is not None), None)),
        told_s=told_s,
        moved_s=max(one[3] for one in said),
        every_s=max((one[2].every_s for one in said if one[2].every_s is not None), default=None),
        longest_s=max(one[2].longest_s or 0.0 for one in said),
    )


def _order(word: ScriptProgress) -> tuple[bool, int]:
    """Return the place of a word among those of all members: a loss alone hides no step of another worker."""
    return word.step is None and word.percent is None, _ORDER[word.way]
