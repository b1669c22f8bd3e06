"""`python -m tests.model [RULE ...]`: search the wide scenarios, each rule off and on. Minutes, and 4 GB of memory.

LIVE, GROUPS or SERVER in place of a rule: the wide searches and the walks of the liveness model, of the model of model groups, of
that of a parameter server only.
"""

from __future__ import annotations

import sys

from tests.model.core import Core
from tests.model.groups.model import Groups
from tests.model.groups.scenarios import WIDE as GROUPS_WIDE
from tests.model.groups.scenarios import WILD as GROUPS_WILD
from tests.model.live.model import Live
from tests.model.live.scenarios import WIDE as LIVE_WIDE
from tests.model.live.scenarios import WILD as LIVE_WILD
from tests.model.scenarios import QUICK, WIDE, WIDE_MAX_STATES
from tests.model.search import search, walk
from tests.model.server import WIDE as SERVER_WIDE
from tests.model.server import WILD as SERVER_WILD
from tests.model.server import Server

LIVE_MAX_STATES = 400_000
LIVE_WALKS = 1_000
"""In each of the wild scenarios."""
GROUPS_MAX_STATES = 800_000
GROUPS_WALKS = 8_000
SERVER_MAX_STATES = 800_000
SERVER_WALKS = 8_000


def main(rules: list[str]) -> int:
    """Print every outcome; 1 if one is not as expected. A bound that was hit is said, and is no failure."""
    surprises = liveness() if not rules or "LIVE" in rules else 0
    surprises += model_groups() if not rules or "GROUPS" in rules else 0
    surprises += parameter_server() if not rules or "SERVER" in rules else 0
    for trace in (*QUICK, *WIDE):
        if rules and trace.rule not in rules:
            continue
        for title, scenario, expected in (
            (f"{trace.id}, {trace.rule} off", trace.without_rule, trace.expected),
            (f"{trace.id}, all rules on", trace.scenario, "holds"),
        ):
            got = search(Core(scenario), max_states=WIDE_MAX_STATES, live=trace.is_live)
            is_expected = got.verdict == expected and trace.words in (
                got.detail if expected != "holds" else trace.words
            )
            surprises += not is_expected
            print(f"{title}: {'' if is_expected else 'UNEXPECTED '}{got}", flush=True)
    return min(surprises, 1)


def liveness() -> int:
    """Print the outcome of every wide search and of the walks of the liveness model, all rules on; return the surprises."""
    surprises = 0
    for name, scenario in LIVE_WIDE.items():
        got = search(Live(scenario), max_states=LIVE_MAX_STATES, live=True, forever=True)
        surprises += got.verdict != "holds"
        print(f"liveness, {name}: {'' if got.verdict == 'holds' else 'UNEXPECTED '}{got}", flush=True)
    for name, scenario in LIVE_WILD.items():
        walked = walk(Live(scenario), num_walks=LIVE_WALKS, depth=80, settle=600, seed=7)
        surprises += walked.violation is not None
        words = f"{walked.num_finished} of {walked.num_walks} walks end in training, {walked.num_moves} moves"
        print(f"liveness, {name}: {words}", flush=True)
        if walked.violation is not None:
            print("\n".join((f"UNEXPECTED {walked.violation}", *walked.trace)), flush=True)
    return surprises


def model_groups() -> int:
    """Print the outcome of every wide search and of the walks of the model of model groups, all rules on; return the surprises."""
    surprises = 0
    for name, groups in GROUPS_WIDE.items():
        got = search(Groups(groups), max_states=GROUPS_MAX_STATES, live=True)
        surprises += got.verdict != "holds"
        print(f"model groups, {name}: {'' if got.verdict == 'holds' else 'UNEXPECTED '}{got}", flush=True)
    for name, groups in GROUPS_WILD.items():
        walked = walk(Groups(groups), num_walks=GROUPS_WALKS, depth=120, seed=7)
        surprises += walked.violation is not None
        words = f"{walked.num_finished} of {walked.num_walks} walks end with the last step, {walked.num_moves} moves"
        print(f"model groups, {name}: {words}", flush=True)
        if walked.violation is not None:
            print("\n".join((f"UNEXPECTED {walked.violation}", *walked.trace)), flush=True)
    return surprises


def parameter_server() -> int:
    """Print the outcome of the wide searches and walks of the model of a parameter server, all rules on; return the surprises."""
    surprises = 0
    for name, scenario in SERVER_WIDE.items():
        got = search(Server(scenario), max_states=SERVER_MAX_STATES, live=True)
        surprises += got.verdict != "holds"
        print(f"parameter server, {name}: {'' if got.verdict == 'holds' else 'UNEXPECTED '}{got}", flush=True)
    walked = walk(Server(SERVER_WILD), num_walks=SERVER_WALKS, depth=80, seed=7)
    surprises += walked.violation is not None
    words = f"{walked.num_finished} of {walked.num_walks} walks count every share, {walked.num_moves} moves"
    print(f"parameter server, walks: {words}", flush=True)
    if walked.violation is not None:
        print("\n".join((f"UNEXPECTED {walked.violation}", *walked.trace)), flush=True)
    return surprises


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
