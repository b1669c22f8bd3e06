"""Training always goes on: each liveness rule off, its trace is there; all rules on, every search and every walk ends well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.live.model import Live
from tests.model.live.records import ALL_RULES, BEST, HANDOVER, HEARD, RETRY, WORDS, Budget, LiveScenario
from tests.model.live.scenarios import FIRST_TRACE, HOLDS, QUICK, WILD, LiveTrace
from tests.model.search import follow, search, walk

MAX_STATES = 50_000
BY_ID = [pytest.param(trace, id=trace.id) for trace in QUICK]


@pytest.mark.parametrize("trace", BY_ID)
def test_without_the_rule_its_trace_is_found(trace: LiveTrace) -> None:
    got = search(Live(trace.without_rule), max_states=MAX_STATES, live=True, forever=True)
    assert got.verdict == trace.expected, got
    assert trace.words in got.detail, got
    assert got.num_states == trace.num_states[0], f"the model's behaviour changed; is this still the trace?\n{got}"


@pytest.mark.parametrize("trace", BY_ID)
def test_with_all_rules_training_goes_on(trace: LiveTrace) -> None:
    got = search(Live(trace.scenario), max_states=MAX_STATES, live=True, forever=True)
    assert got.verdict == "holds", got
    assert got.is_exhaustive
    assert got.num_states == trace.num_states[1], "the model's behaviour changed: read why, then update the number"


@pytest.mark.parametrize("name", HOLDS)
def test_with_all_rules_it_holds(name: str) -> None:
    scenario, num_states = HOLDS[name]
    got = search(Live(scenario), max_states=MAX_STATES, live=True, forever=True)
    assert got.verdict == "holds", got
    assert got.is_exhaustive
    assert got.num_states == num_states, "the model's behaviour changed: read why, then update the number"


def test_every_rule_has_its_trace() -> None:
    assert {trace.rule for trace in QUICK} == ALL_RULES


FIRST = LiveScenario(faults=Budget(scale=1, crash=3, total=4))


def test_the_trace_seen_first_waits_for_ever_in_what_was_written() -> None:
    """w1 asks for a word about g3, whose only member never entered it, is connected, and has heard g4."""
    model = Live(replace(FIRST, rules=ALL_RULES - {HEARD, WORDS, BEST, RETRY}))
    trace = (*FIRST_TRACE, "w1 refuses g4 (w)")
    state = follow(model, trace)
    assert list(model.moves(state)) == []
    assert not model.is_goal(state)


def test_the_trace_seen_first_goes_on_with_all_rules() -> None:
    model = Live(FIRST)
    got = search(model, max_states=MAX_STATES, live=True, forever=True, start=follow(model, FIRST_TRACE))
    assert got.verdict == "holds", got
    assert got.is_exhaustive


@pytest.mark.parametrize("name", WILD)
def test_with_all_rules_every_walk_ends_in_training(name: str) -> None:
    got = walk(Live(WILD[name]), num_walks=60, depth=60, settle=600, seed=1)
    assert got.violation is None, "\n".join((got.violation, *got.trace))
    assert got.num_finished == got.num_walks


QUICKLY_FOUND = {HANDOVER: ("two slots, each with a place for a successor", 1), WORDS: ("two workers", 3)}
"""Where, and from which seed on, walks meet what happens without a rule; else "three workers", 1."""


@pytest.mark.parametrize("rule", sorted(ALL_RULES - {BEST}))
def test_without_a_rule_a_walk_gets_stuck_or_loses_state(rule: str) -> None:
    """The walks can fail. (BEST takes more than 600 of them.)"""
    name, seed = QUICKLY_FOUND.get(rule, ("three workers", 1))
    got = walk(Live(replace(WILD[name], rules=ALL_RULES - {rule})), num_walks=600, depth=60, settle=300, seed=seed)
    assert got.violation is not None
