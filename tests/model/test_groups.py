"""Each rule of model groups earns its place: off, its trace is there; all rules on, the same scenario holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.groups.model import Groups
from tests.model.groups.records import ALL_RULES, WEAKER_FORMS, Budget, GroupScenario
from tests.model.groups.scenarios import HOLDS, QUICK, WEAKER, WILD, GroupTrace, Weaker
from tests.model.search import follow, search, walk

MAX_STATES = 100_000
BY_ID = [pytest.param(trace, id=trace.id) for trace in QUICK]
ONCE = list({trace.scenario: trace for trace in QUICK}.values())
"""Several rules have one scenario: with all rules on it is searched once."""
BY_FORM = [pytest.param(weaker, id=weaker.form) for weaker in WEAKER]


@pytest.mark.parametrize("trace", BY_ID)
def test_without_the_rule_its_trace_is_found(trace: GroupTrace) -> None:
    got = search(Groups(trace.without_rule), max_states=MAX_STATES)
    assert got.verdict == "violation", got
    assert trace.words in got.detail, got
    assert got.num_states == trace.num_states[0], f"the model's behaviour changed; is this still the trace?\n{got}"


@pytest.mark.parametrize("trace", [pytest.param(trace, id=trace.id) for trace in ONCE])
def test_with_all_rules_it_holds(trace: GroupTrace) -> None:
    got = search(Groups(trace.scenario), max_states=MAX_STATES)
    assert got.verdict == "holds", got
    assert got.is_exhaustive
    assert got.num_states == trace.num_states[1], "the model's behaviour changed: read why, then update the number"


@pytest.mark.parametrize("name", HOLDS)
def test_with_all_rules_no_search_meets_a_violation_or_a_group_that_waits_for_ever(name: str) -> None:
    scenario, num_states = HOLDS[name]
    got = search(Groups(scenario), max_states=MAX_STATES, live=True)
    assert got.verdict == "holds", got
    assert got.is_exhaustive
    assert got.num_states == num_states, "the model's behaviour changed: read why, then update the number"


def test_who_cannot_be_reached_and_was_only_in_a_generation_that_never_stepped_is_not_waited_for() -> None:
    """r1 may have adopted g2, but r0 has not: nobody has committed in it, and what g1 left is all here."""
    model = Groups(GroupScenario(max_generations=3, faults=Budget(cut_off=1, total=1)))
    trace = (
        "operator announces g2 members [0, 1]",
        "r0 enters g2 with ()",
        "FAULT r1 cut off from the operator",
        "operator announces g3 members [0, 3]",
        "r0 enters g3 with ()",
        "r2 enters g3 as guest with ()",
        "r3 enters g3 with ()",
    )
    assert {"r0 keeps () in g3", "r3 keeps () in g3"} <= {move.label for move in model.moves(follow(model, trace))}


def test_every_rule_has_its_trace() -> None:
    assert {trace.rule for trace in QUICK} == ALL_RULES
    assert {weaker.form for weaker in WEAKER} == WEAKER_FORMS


@pytest.mark.parametrize("weaker", BY_FORM)
def test_a_weaker_form_of_a_rule_has_a_trace(weaker: Weaker) -> None:
    model = Groups(weaker.weakened)
    got = search(model, max_states=MAX_STATES, start=follow(model, weaker.prefix))
    assert got.verdict == "violation", got
    assert weaker.words in got.detail, got
    assert got.num_states == weaker.num_states, f"the model's behaviour changed; is this still the trace?\n{got}"


@pytest.mark.parametrize("weaker", BY_FORM)
def test_from_there_on_the_rule_itself_holds(weaker: Weaker) -> None:
    model = Groups(weaker.scenario)
    got = search(model, max_states=MAX_STATES, start=follow(model, weaker.prefix))
    assert got.verdict == "holds", got
    assert got.is_exhaustive


@pytest.mark.parametrize("name", WILD)
def test_with_all_rules_no_walk_meets_a_violation(name: str) -> None:
    got = walk(Groups(WILD[name]), num_walks=150, depth=120, seed=1)
    assert got.violation is None, "\n".join((got.violation, *got.trace))
    assert got.num_finished > 40, "walks that hardly ever finish a job prove little"


@pytest.mark.parametrize("rule", sorted(ALL_RULES))
def test_without_a_rule_the_walks_meet_a_violation(rule: str) -> None:
    """The walks can fail."""
    got = walk(Groups(replace(WILD["two spares"], rules=ALL_RULES - {rule})), num_walks=1500, depth=120, seed=1)
    assert got.violation is not None
