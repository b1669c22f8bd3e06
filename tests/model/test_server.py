"""Each rule of the parameter server earns its place: off, its trace is there; all rules on, the same scenario holds."""

from __future__ import annotations

import pytest

from tests.model.search import search, walk
from tests.model.server import (
    AGE,
    ALL_RULES,
    COPY,
    DEALT,
    LEAVE,
    LEDGER,
    MEET,
    OWED,
    WILD,
    Budget,
    Server,
    ServerScenario,
)

MAX_STATES = 50_000
CRASH = ServerScenario(shares=1, faults=Budget(crash=1))
DEAF = ServerScenario(shares=1, faults=Budget(deaf=1))
BOTH = ServerScenario(shares=1, faults=Budget(crash=1, deaf=1))
LATE = ServerScenario(max_generations=1, faults=Budget(late=1))
SYNCHRONOUS = ServerScenario(staleness=0, max_generations=1)
LOST, TWICE = "a generation goes on without a version that was seen", "a share is applied twice"
TRACES = [
    pytest.param(COPY, CRASH, LOST, id=COPY),
    pytest.param(LEDGER, CRASH, TWICE, id=LEDGER),
    pytest.param(LEAVE, DEAF, LOST, id=LEAVE),
    pytest.param(DEALT, LATE, TWICE, id=DEALT),
    pytest.param(OWED, CRASH, "a share is lost", id=OWED),
    pytest.param(MEET, CRASH, LOST, id=MEET),
    pytest.param(AGE, SYNCHRONOUS, "a gradient is older than the bound", id=AGE),
]


@pytest.mark.parametrize(("rule", "scenario", "words"), TRACES)
def test_without_the_rule_its_trace_is_found(rule: str, scenario: ServerScenario, words: str) -> None:
    got = search(Server(scenario._replace(rules=ALL_RULES - {rule})), max_states=MAX_STATES)
    assert (got.verdict, got.detail) == ("violation", words), got


@pytest.mark.parametrize(
    ("scenario", "num_states"),
    [
        pytest.param(BOTH, 27_100, id="two generations, a crash, and one that hears nothing of the second"),
        pytest.param(LATE, 817, id="a share that is given up"),
        pytest.param(SYNCHRONOUS, 264, id="no staleness"),
    ],
)
def test_with_all_rules_it_holds(scenario: ServerScenario, num_states: int) -> None:
    got = search(Server(scenario), max_states=MAX_STATES, live=True)
    assert got.verdict == "holds", got
    assert got.is_exhaustive
    assert got.num_states == num_states, "the model's behaviour changed: read why, then update the number"


def test_with_all_rules_no_walk_meets_a_violation() -> None:
    got = walk(Server(WILD), num_walks=800, depth=80, seed=1)
    assert got.violation is None, "\n".join((got.violation, *got.trace))
    assert got.num_finished > 200, "walks that hardly ever finish a job prove little"


@pytest.mark.parametrize("rule", sorted(ALL_RULES))
def test_without_a_rule_the_walks_meet_a_violation(rule: str) -> None:
    """The walks can fail."""
    got = walk(Server(WILD._replace(rules=ALL_RULES - {rule})), num_walks=2000, depth=80, seed=1)
    assert got.violation is not None
