"""The liveness rules as scenarios: each is searched once without its rule and once with all.

`QUICK` and `HOLDS` run in every test run; `WIDE` in `python -m tests.model` (minutes each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tests.model.live.records import (
    ALL_RULES,
    BEST,
    DEADLINE,
    HANDOVER,
    HEARD,
    JOIN,
    RETRY,
    WORDS,
    Budget,
    LiveScenario,
)


@dataclass(frozen=True)
class LiveTrace:
    """What happens without one rule."""

    id: str
    rule: str
    scenario: LiveScenario
    expected: Literal["violation", "stuck"]
    words: str
    """Part of what the search says."""
    num_states: tuple[int, int]
    """States seen with the rule off and on; another number means that the model's behaviour changed."""

    @property
    def without_rule(self) -> LiveScenario:
        return replace(self.scenario, rules=ALL_RULES - {self.rule})


SCALED = LiveScenario(faults=Budget(scale=1, crash=1, total=2))

QUICK = (
    LiveTrace("H16 HEARD", HEARD, SCALED, "stuck", "nothing can happen", (1110, 1559)),
    LiveTrace("H17 WORDS", WORDS, SCALED, "stuck", "nothing can happen", (875, 1559)),
    LiveTrace("H18 BEST", BEST, SCALED, "violation", "silent rollback", (1053, 1559)),
    LiveTrace(
        "H19 RETRY",
        RETRY,
        LiveScenario(has_checkpoint=True, faults=Budget(all_crash=1, disk=1, total=2)),
        "stuck",
        "nothing can happen",
        (1200, 1277),
    ),
    LiveTrace(
        "H20 DEADLINE",
        DEADLINE,
        LiveScenario(minimum=2, minimums=(2,), faults=Budget(crash=1, hang=1, total=2)),
        "stuck",
        "nothing can happen",
        (100, 736),
    ),
    LiveTrace(
        "H21 HANDOVER",
        HANDOVER,
        LiveScenario(slots=(0, 0), replicas=1, faults=Budget(drain=1, total=1)),
        "violation",
        "drained away",
        (6, 66),
    ),
    LiveTrace(
        "H22 JOIN",
        JOIN,
        LiveScenario(replicas=1, faults=Budget(scale=1, hang=1, total=2)),
        "violation",
        "for a joiner that has not arrived",
        (45, 3569),
    ),
)

ANY = Budget(
    crash=3, all_crash=1, container=2, pod=2, hang=2, stream=2, operator=2, scale=2, drain=1, slow=2, disk=1, total=1
)
"""Any fault, one in all unless `total` is replaced."""
LATE = LiveScenario(has_late_reports=True, has_late_generations=True, has_checkpoint=True, minimums=(1, 2), faults=ANY)

HOLDS = {
    "any one fault": (replace(LATE, has_late_reports=False), 1372),
    "any one fault, one replica of two": (replace(LATE, replicas=1), 298),
    "the operator restarts and a process dies": (LiveScenario(faults=Budget(operator=1, crash=1, total=2)), 1435),
    "a stream ends and a process dies": (LiveScenario(faults=Budget(stream=1, crash=1, total=2)), 1750),
    "a container restarts and replicas change": (LiveScenario(faults=Budget(container=1, scale=1, total=2)), 2015),
    "a member is taken for lost and a process dies": (LiveScenario(faults=Budget(lost=1, crash=1, total=2)), 19961),
    "a member of three is taken for lost": (
        LiveScenario(slots=(0, 1, 2), replicas=3, faults=Budget(lost=1, total=1)),
        1189,
    ),
    "two of two are needed, any one fault": (replace(LATE, minimum=2, minimums=(2,), has_late_reports=False), 311),
    "a drain in one slot and a process dies": (
        LiveScenario(slots=(0, 0), replicas=1, faults=Budget(drain=1, crash=1, total=2)),
        5888,
    ),
    "two drains, the second before the successor has arrived": (
        LiveScenario(slots=(0, 0, 1), replicas=1, faults=Budget(drain=2, total=2)),
        647,
    ),
}
"""All rules on: what holds, and its number of states."""

WIDE = {
    "any one fault, late reports": LATE,
    "scale, two crashes": LiveScenario(faults=Budget(scale=1, crash=2, total=3)),
    "any two faults": replace(LATE, has_late_reports=False, has_late_generations=False, faults=ANY._replace(total=2)),
    "a container restart and a crash": LiveScenario(faults=Budget(container=1, crash=1, total=2)),
    "a hang and a crash": LiveScenario(faults=Budget(hang=1, crash=1, total=2)),
    "any two faults, two of two needed": replace(
        LATE, minimum=2, minimums=(2,), has_late_reports=False, faults=ANY._replace(total=2)
    ),
    "two of three places of two slots are drained": LiveScenario(
        slots=(0, 1, 1), replicas=2, faults=Budget(drain=2, total=2)
    ),
    "one slot: any two faults": LiveScenario(slots=(0, 0), replicas=1, faults=ANY._replace(total=2)),
    "three workers: scale and a crash": LiveScenario(
        slots=(0, 1, 2), replicas=3, faults=Budget(scale=1, crash=1, total=2)
    ),
}
"""For `python -m tests.model LIVE`."""

MANY = Budget(
    crash=4,
    all_crash=1,
    container=2,
    pod=2,
    hang=2,
    stream=3,
    operator=2,
    scale=3,
    drain=1,
    slow=2,
    disk=1,
    lost=2,
    total=6,
)
WILD = {
    "two workers": replace(LATE, faults=MANY),
    "three workers, prompt reports": LiveScenario(slots=(0, 1, 2), minimums=(1, 2), faults=MANY),
    "three workers": replace(LATE, slots=(0, 1, 2), replicas=3, minimums=(1, 2, 3), faults=MANY),
    "two slots, each with a place for a successor": replace(LATE, slots=(0, 0, 1, 1), replicas=1, faults=MANY),
}
"""Where the random walks go."""

FIRST_TRACE = (
    "FAULT w0's process is killed",
    "w1 loses its group g1",
    "operator announces forced g2 = w[1]",
    "w1 hears g2",
    "w0 hears g2",
    "w1 enters g2 with state 1, adopted 1",
    "w1 adopts g2 from 1",
    "w1 commits in g2",
    "FAULT replicas 1, minReplicas 1",
    "FAULT w1's process is killed",
    "w0's process attaches",
    "operator announces forced g3 = w[0]",
    "w0 hears g3",
    "FAULT w0's process is killed",
    "w1 hears g3",
    "w1's process attaches",
    "operator announces forced g4 = w[1]",
    "w0 hears g4",
    "w1 hears g4",
    "w0's process attaches",
    "w1 enters g4 with state -1, adopted 2",
)
"""What was seen first, on the real code: g3 is announced to w0 alone, which dies before it enters."""
