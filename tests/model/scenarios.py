"""The traces of docs/design/protocol.md as scenarios: each is searched once without its rule and once with all.

`QUICK` runs in every test run; each scenario there is the smallest that still shows its trace. `WIDE` has the larger
ones that the protocol was reviewed with (minutes, gigabytes): `python -m tests.model`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tests.model.records import (
    ALL_RULES,
    BACKUP,
    CLIQUE,
    COPIES,
    CUTALL,
    FINISH,
    INC,
    LINGER,
    LOST,
    MAD,
    PERSIST,
    RESAY,
    SEAL,
    STATE,
    TORN,
    WITNESS,
    Budget,
    Scenario,
)


@dataclass(frozen=True)
class Trace:
    """What happens without one rule."""

    id: str
    """The trace's name in protocol.md, then the rule."""
    rule: str
    scenario: Scenario
    expected: Literal["violation", "stuck"]
    words: str = ""
    """Part of the violation's sentence."""
    num_states: tuple[int, int] = (0, 0)
    """States seen with the rule off and on. They are those of the reviewed model: another number means that the
    model's behaviour changed. Read the difference before you update it. In WIDE not stated."""
    max_states: int = 400_000
    is_on_exhausted: bool = True
    """False: with all rules on, only `num_states[1]` states are searched, and the test's name says so."""

    @property
    def is_live(self) -> bool:
        return self.expected == "stuck"

    @property
    def without_rule(self) -> Scenario:
        return replace(self.scenario, rules=ALL_RULES - {self.rule})


SPLIT = "split brain"
ROLLBACK = "silent rollback"

QUICK = (
    Trace(
        "H1 PERSIST",
        PERSIST,
        Scenario(steps=1, announces="seen", replaces=False, faults=Budget(link=1, operator=1, total=2)),
        "violation",
        SPLIT,
        (172522, 22489),
    ),
    Trace(
        "H1 PERSIST, planned from an earlier status",
        PERSIST,
        Scenario(
            steps=1, announces="seen", replaces=False, stale_reads=True, faults=Budget(link=1, operator=1, total=2)
        ),
        "violation",
        SPLIT,
        (233173, 31899),
    ),
    Trace(
        "H2 STATE",
        STATE,
        Scenario(announces="seen", faults=Budget(cut_off=1, total=1)),
        "violation",
        "different histories",
        (80514, 147946),
    ),
    Trace(
        "H3 TORN",
        TORN,
        Scenario(steps=1, members=(0,)),
        "violation",
        "trains on a torn state",
        (8718, 22591),
    ),
    Trace(
        "H4 WITNESS",
        WITNESS,
        Scenario(steps=1, members=(0,), faults=Budget(cut_off=1, total=1)),
        "violation",
        SPLIT,
        (3668, 90568),
    ),
    Trace(
        "H5 LOST",
        LOST,
        Scenario(
            steps=1,
            max_announcements=2,
            announces="seen",
            replaces=False,
            liveness="left",
            faults=Budget(crash=1, pod=1, total=2),
        ),
        "stuck",
        "",
        (33730, 33912),
    ),
    Trace(
        "H6 RESAY",
        RESAY,
        Scenario(
            steps=1,
            max_announcements=2,
            min_members=2,
            announces="seen",
            replaces=False,
            faults=Budget(crash=1, operator=1, total=2),
        ),
        "stuck",
        "",
        (7454, 14926),
    ),
    Trace(
        "H7 INC",
        INC,
        Scenario(
            max_announcements=1, snapshots=True, stale_store=True, announces="seen", faults=Budget(crash=1, total=1)
        ),
        "violation",
        "steps apart in one generation",
        (1884, 1096),
    ),
    Trace(
        "H8 BACKUP",
        BACKUP,
        Scenario(max_announcements=2, snapshots=True, faults=Budget(crash=1, total=1)),
        "violation",
        ROLLBACK,
        (98074, 100_000),
        is_on_exhausted=False,
    ),
    Trace(
        "H9 LINGER",
        LINGER,
        Scenario(max_announcements=2, exits=True, faults=Budget(pod=1, total=1)),
        "violation",
        "drained away",
        (19455, 57691),
    ),
    Trace(
        "H10 FINISH",
        FINISH,
        Scenario(max_announcements=2, exits=True, faults=Budget(pod=1, total=1)),
        "violation",
        "exits 'done'",
        (8978, 57691),
    ),
    Trace(
        "H11 CUTALL",
        CUTALL,
        Scenario(min_members=2, announces="seen", has_planned=True, heals=False, faults=Budget(cut_off=1, total=1)),
        "stuck",
        "",
        (204, 176),
    ),
    Trace(
        "H12 CLIQUE",
        CLIQUE,
        Scenario(
            steps=1,
            max_announcements=4,
            announces="seen",
            replaces=False,
            liveness="strict",
            faults=Budget(link=1, total=1),
        ),
        "stuck",
        "",
        (80530, 8578),
    ),
    Trace(
        "rule 7 MAD",
        MAD,
        Scenario(max_announcements=2, faults=Budget(crash=1, total=1)),
        "violation",
        ROLLBACK,
        (57413, 134305),
    ),
)

SEALED = Trace(
    "H5 SEAL",
    SEAL,
    Scenario(
        steps=1,
        max_announcements=4,
        announces="seen",
        replaces=False,
        liveness="left",
        faults=Budget(cut_off=1, link=1, total=2),
    ),
    "stuck",
    "",
    (132176, 679774),
    max_states=800_000,
)
"""With all rules on, exhausting it takes close to a minute: QUICK tests only look on from where the trace is stuck."""

COPIED = Trace(
    "H4 COPIES",
    COPIES,
    Scenario(workers=3, members=(0,), steps=3, max_announcements=3, faults=Budget(pod=1, cut_off=1, total=2)),
    "violation",
    ROLLBACK,
    (58, 672),
)
"""Too large to be exhausted: both numbers are those from the end of COPIED_PREFIX on."""
COPIED_PREFIX = (
    "w0 contributes to step 1 in g1#0",
    "w0 all-reduce done, commits step 1",
    "w0 contributes to step 2 in g1#0",
    "w0 all-reduce done, commits step 2",
    "operator 0 persists and announces g2#1 members [0, 1, 2]",
    *(f"w{slot} hears g2#1 members [0, 1, 2]" for slot in (0, 1, 2)),
    "w0 enters g2#1 with (0, 0)",
    "w1 enters g2#1 with None",
    "w2 enters g2#1 with None",
    "w0 formed g2#1, keeps its state (0, 0)",
    "w1 formed g2#1, starts copying from w0 (0, 0)",
    "w2 formed g2#1, starts copying from w0 (0, 0)",
    "w1 copy complete",
    "FAULT w1 cut off from the operator",
    "FAULT w0 pod lost",
    "operator 0 persists and announces g3#2 members [2]",
)
"""w1 has copied the state of g1 in g2, which never stepped, because w2 has not; then w1 cannot be reached, and w0 is gone."""

WIDE = (
    replace(
        next(t for t in QUICK if t.rule == RESAY),
        scenario=Scenario(
            steps=1,
            min_members=2,
            announces="seen",
            snapshots=True,
            replaces=False,
            faults=Budget(crash=1, operator=1, total=2),
        ),
    ),
    SEALED,
    replace(SEALED, id="H5 SEAL, five generations", scenario=replace(SEALED.scenario, max_announcements=5)),
    Trace(
        "H9 LINGER",
        LINGER,
        Scenario(steps=3, max_announcements=2, exits=True, faults=Budget(pod=1, total=1)),
        "violation",
        "drained away",
    ),
    Trace(
        "H8 BACKUP",
        BACKUP,
        Scenario(steps=3, max_announcements=2, snapshots=True, faults=Budget(crash=1, cut_off=1, total=2)),
        "violation",
        ROLLBACK,
    ),
    Trace("H1 PERSIST", PERSIST, Scenario(faults=Budget(operator=1, total=1)), "violation", SPLIT),
    Trace("H1 PERSIST, two leaders", PERSIST, Scenario(steps=1, leaders=2), "violation", SPLIT),
    Trace(
        "H4 WITNESS",
        WITNESS,
        Scenario(steps=3, members=(0,), faults=Budget(cut_off=1, total=1)),
        "violation",
        SPLIT,
    ),
    Trace(
        "H5 LOST",
        LOST,
        Scenario(steps=1, announces="seen", replaces=False, liveness="left", faults=Budget(crash=1, pod=1, total=2)),
        "stuck",
    ),
    Trace(
        "rule 7 MAD",
        MAD,
        Scenario(max_announcements=2, faults=Budget(crash=1, cut_off=1, total=2)),
        "violation",
        ROLLBACK,
    ),
    Trace("H2 STATE", STATE, Scenario(), "violation", "different histories"),
    Trace(
        "H3 TORN",
        TORN,
        Scenario(steps=1, snapshots=True, faults=Budget(pod=1, total=1)),
        "violation",
        "trains on a torn state",
    ),
)
WIDE_MAX_STATES = 1_400_000

WILD = Scenario(
    workers=3,
    members=(0, 1),
    steps=4,
    max_announcements=7,
    snapshots=True,
    exits=True,
    leaders=2,
    stale_reads=True,
    faults=Budget(crash=2, pod=2, stop=2, cut_off=2, operator=2, link=1, total=4),
)
"""Where the random walks go: every kind of fault, a joiner, two leaders, statuses that are not the newest."""
