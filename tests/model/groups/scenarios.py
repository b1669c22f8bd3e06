"""The rules of model groups as scenarios: each is searched once without its rule and once with all.

`QUICK`, `WEAKER`, `HOLDS` and `WILD` run in every test run; `WIDE` in `python -m tests.model GROUPS` (minutes each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.model.groups.records import (
    ALL_RULES,
    COPIES_FORGOTTEN,
    EXACT,
    GUESTS,
    INNER,
    INNER_ONCE,
    KEEP,
    KEEP_UNTIL_BACKWARD,
    LOCAL,
    ONE_SNAPSHOT,
    REDUCED,
    ROWS,
    ROWS_UNTIL_ROW,
    SERVE,
    Budget,
    GroupScenario,
)


@dataclass(frozen=True)
class GroupTrace:
    """What happens without one rule."""

    id: str
    rule: str
    scenario: GroupScenario
    words: str
    """Part of the violation's sentence."""
    num_states: tuple[int, int]
    """States seen with the rule off and on; another number means that the model's behaviour changed."""

    @property
    def without_rule(self) -> GroupScenario:
        return replace(self.scenario, rules=ALL_RULES - {self.rule})


ONE_CRASH = Budget(crash=1, total=1)
ROLLBACK = "silent rollback"
NOTHING_LEFT = "each inner index of g1 has a living member"

LEFT_OVER = GroupScenario(sets=(((0, 1),),), faults=ONE_CRASH)
"""Two model groups train, then one of them goes on alone, at any moment."""
REBUILT = GroupScenario(sets=(((0, 1, 2, 3),),), restarts=True, faults=ONE_CRASH)
"""A rank dies and comes back with nothing; its group is rebuilt from the other one."""
REDONE = GroupScenario(max_generations=3, sets=(((0, 1),), ((0, 3),)))
"""One group goes on alone, then a group is put together of ranks of both."""
CUT_OFF = GroupScenario(first=(0, 1), sets=(((2, 3),),), faults=Budget(cut_off=1, total=1))
"""One group trains, one was left over and goes on alone."""

QUICK = (
    GroupTrace("M1 REDUCED", REDUCED, LEFT_OVER, NOTHING_LEFT, (3669, 6667)),
    GroupTrace("M2 KEEP", KEEP, LEFT_OVER, NOTHING_LEFT, (2833, 6667)),
    GroupTrace("M3 EXACT", EXACT, REDONE, "mixed", (18652, 20760)),
    GroupTrace("M4 SERVE", SERVE, REBUILT, "mixed", (12251, 14452)),
    GroupTrace("M5 ROWS", ROWS, LEFT_OVER, "batch rows left out", (3882, 6667)),
    GroupTrace("M6 LOCAL", LOCAL, LEFT_OVER, NOTHING_LEFT, (4232, 6667)),
    GroupTrace("M7 INNER", INNER, CUT_OFF, ROLLBACK, (1320, 2300)),
    GroupTrace("M8 GUESTS", GUESTS, LEFT_OVER, ROLLBACK, (1264, 6667)),
)


@dataclass(frozen=True)
class Weaker:
    """What happens where a rule is on in a weaker form."""

    form: str
    scenario: GroupScenario
    prefix: tuple[str, ...]
    """From where on it is searched: the whole scenario takes minutes."""
    words: str
    num_states: int

    @property
    def weakened(self) -> GroupScenario:
        return replace(self.scenario, weaker=frozenset({self.form}))


REDUCED_BY_ALL = tuple(f"r{slot} has reduced step 1 in g1" for slot in range(4))
APPLIED_BY_ONE = (*REDUCED_BY_ALL, "r0 applies step 1 in g1")

WEAKER = (
    Weaker(
        KEEP_UNTIL_BACKWARD,
        GroupScenario(max_generations=3, faults=Budget(cut_off=1, crash=2, total=3)),
        (
            *APPLIED_BY_ONE,
            "FAULT r0 cut off from the operator",
            "FAULT r3 dies",
            "operator announces g2 members [1, 2]",
            "r1 enters g2 with (), reduced in g1 on ()",
            "r2 enters g2 with (), reduced in g1 on ()",
            "r1 keeps () in g2",
            "r2 keeps () in g2",
        ),
        NOTHING_LEFT,
        483,
    ),
    Weaker(
        ROWS_UNTIL_ROW,
        GroupScenario(steps=2, max_generations=3, faults=ONE_CRASH),
        (
            *APPLIED_BY_ONE,
            "operator announces g2 members [0, 1]",
            "r0 enters g2 with (1,)",
            "r1 enters g2 with (), reduced in g1 on ()",
            "r2 enters g2 as guest with (), reduced in g1 on ()",
            "r3 enters g2 as guest with (), reduced in g1 on ()",
            "r0 keeps (1,) in g2",
            "r1 rolls forward to (1,) in g2",
            "r0 has reduced step 2 in g2",
        ),
        ROLLBACK,
        4439,
    ),
    Weaker(
        ONE_SNAPSHOT,
        GroupScenario(steps=2, snapshots=True, restarts=True, faults=Budget(crash=2, total=2)),
        (
            *APPLIED_BY_ONE,
            *(f"r{slot} applies step 1 in g1" for slot in (1, 2, 3)),
            "r0 has reduced step 2 in g1",
            "r2 has reduced step 2 in g1",
            "FAULT r1 dies",
            "r1 starts again",
            "operator announces g2 members [0, 1]",
        ),
        "has a snapshot",
        215,
    ),
    Weaker(
        INNER_ONCE,
        GroupScenario(
            steps=2,
            max_generations=3,
            sets=(((0, 1),), ((1, 2),)),
            faults=Budget(cut_off=1, crash=1, total=2),
        ),
        (
            *REDUCED_BY_ALL,
            *(f"r{slot} applies step 1 in g1" for slot in range(4)),
            "operator announces g2 members [0, 1]",
            *(f"r{slot} enters g2 with (1,)" for slot in (0, 1)),
            *(f"r{slot} enters g2 as guest with (1,)" for slot in (2, 3)),
            *(f"r{slot} keeps (1,) in g2" for slot in (0, 1)),
            *(f"r{slot} has reduced step 2 in g2" for slot in (0, 1)),
            "r1 applies step 2 in g2",
        ),
        ROLLBACK,
        2254,
    ),
    Weaker(
        COPIES_FORGOTTEN,
        GroupScenario(
            first=(0, 1),
            spares=1,
            max_generations=3,
            sets=(((0, 1, 2, 3),), ((1, 4),)),
            faults=Budget(cut_off=1, crash=1, total=2),
        ),
        (
            *(f"r{slot} has reduced step 1 in g1" for slot in (0, 1)),
            *(f"r{slot} applies step 1 in g1" for slot in (0, 1)),
            "operator announces g2 members [0, 1, 2, 3]",
            "r0 enters g2 with (1,)",
            "r1 enters g2 with (1,)",
            "r2 enters g2 with ()",
            "r3 enters g2 with ()",
            "r0 keeps (1,) in g2",
            "r2 starts to copy (1, 1) in g2",
            "r2 has copied (1,) from r0 in g2",
        ),
        ROLLBACK,
        6067,
    ),
)


HOLDS = {
    "any sets, one crash": (GroupScenario(faults=ONE_CRASH), 32024),
    "a rank is cut off, then all are named": (
        GroupScenario(
            first=(0, 1),
            max_generations=3,
            sets=(((2, 3),), ((0, 1, 2, 3),)),
            faults=Budget(cut_off=1, total=1),
        ),
        33792,
    ),
}
"""All rules on, also searched for a group that waits for ever."""

WILD = {
    "four ranks": GroupScenario(steps=2, max_generations=4, faults=Budget(crash=2, cut_off=1, total=3)),
    "two spares": GroupScenario(
        steps=3, max_generations=5, spares=2, restarts=True, faults=Budget(crash=3, cut_off=2, total=4)
    ),
    "snapshots": GroupScenario(
        steps=3,
        max_generations=5,
        spares=1,
        restarts=True,
        snapshots=True,
        faults=Budget(crash=3, cut_off=1, pod=2, total=5),
    ),
}

WIDE = {
    "three generations": GroupScenario(max_generations=3),
    "three generations, one crash": GroupScenario(max_generations=3, faults=ONE_CRASH),
    "a rank comes back with nothing": GroupScenario(restarts=True, faults=ONE_CRASH),
    "two steps, a crash and a rank cut off": GroupScenario(steps=2, faults=Budget(crash=1, cut_off=1, total=2)),
    "a rank comes back with nothing, then all are named": GroupScenario(
        first=(0, 1), max_generations=3, restarts=True, sets=(((1, 2),), ((0, 1, 2, 3),)), faults=ONE_CRASH
    ),
    "one of two groups trains": GroupScenario(first=(0, 1), faults=Budget(crash=1, cut_off=1, total=2)),
    "one of two groups trains, three generations": GroupScenario(
        first=(0, 1), max_generations=3, restarts=True, faults=Budget(crash=1, cut_off=1, total=2)
    ),
    "snapshots, two crashes": GroupScenario(restarts=True, snapshots=True, faults=Budget(crash=2, pod=2, total=2)),
}
"""All rules on, also searched for a group that waits for ever. Exhausted, or as far as `GROUPS_MAX_STATES` of
tests/model/__main__.py goes: adr/0027 says which."""
