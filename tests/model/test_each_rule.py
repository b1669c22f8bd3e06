"""Each rule earns its place: off, its trace is there; all rules on, the same scenario holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.core import Core
from tests.model.records import ALL_RULES, INC
from tests.model.scenarios import COPIED, COPIED_PREFIX, QUICK, SEALED, Trace
from tests.model.search import Model, Outcome, follow, search
from tests.model.side import Ckpt, GivenUp, Import, Quota, Release

SIDE_MAX_STATES = 10_000


def as_params(traces: tuple[Trace, ...], suffix: str = "") -> list[object]:
    return [pytest.param(trace, id=trace.id + suffix) for trace in traces]


@pytest.mark.parametrize("trace", as_params(QUICK))
def test_without_the_rule_its_trace_is_found(trace: Trace) -> None:
    got = search(Core(trace.without_rule), max_states=trace.max_states, live=trace.is_live)
    assert got.verdict == trace.expected, got
    assert trace.words in got.detail, got
    assert got.num_states == trace.num_states[0], f"the model's behaviour changed; is this still the trace?\n{got}"


@pytest.mark.parametrize("trace", as_params(tuple(trace for trace in QUICK if trace.is_on_exhausted)))
def test_with_all_rules_it_holds(trace: Trace) -> None:
    got = search(Core(trace.scenario), max_states=trace.max_states, live=trace.is_live)
    assert got.verdict == "holds", got
    assert got.is_exhaustive, f"not exhausted: raise max_states of {trace.id}"
    assert got.num_states == trace.num_states[1], "the model's behaviour changed: read why, then update the number"


@pytest.mark.parametrize(
    "trace", as_params(tuple(trace for trace in QUICK if not trace.is_on_exhausted), " (not exhausted)")
)
def test_with_all_rules_it_holds_for_more_states_than_the_trace_needed(trace: Trace) -> None:
    max_states = trace.num_states[1]
    assert max_states > trace.num_states[0]
    got = search(Core(trace.scenario), max_states=max_states)
    assert got.verdict == "holds", got
    assert not got.is_exhaustive, f"exhausted after {got.num_states} states: say so in {trace.id}"


@pytest.fixture(scope="module")
def sealed_stuck() -> Outcome:
    """The search of H5 SEAL without its rule; several tests need it and it takes seconds."""
    return search(Core(SEALED.without_rule), max_states=SEALED.max_states, live=True)


def test_without_the_rule_its_trace_is_found_h5_seal(sealed_stuck: Outcome) -> None:
    assert sealed_stuck.verdict == SEALED.expected, sealed_stuck
    assert sealed_stuck.num_states == SEALED.num_states[0], f"is this still the trace?\n{sealed_stuck}"


def test_with_all_rules_everybody_gets_on_from_where_h5_seal_was_stuck(sealed_stuck: Outcome) -> None:
    """From the first state on this takes a minute: `python -m tests.model SEAL`."""
    model = Core(SEALED.scenario)
    got = search(model, max_states=SEALED.max_states, live=True, start=follow(model, sealed_stuck.trace))
    assert got.verdict == "holds", got
    assert got.is_exhaustive


def test_a_seal_is_worth_nothing_without_inc(sealed_stuck: Outcome) -> None:
    """Where a process may return to a generation that it has left, its "I have left" is no promise: H5 again."""
    model = Core(replace(SEALED.scenario, rules=ALL_RULES - {INC}))
    got = search(model, max_states=SEALED.max_states, live=True, start=follow(model, sealed_stuck.trace))
    assert got.verdict == "stuck", got


@pytest.mark.parametrize("is_on", [False, True], ids=["without the rule", "with all rules"])
def test_copy_of_a_state_made_in_a_generation_that_never_stepped(is_on: bool) -> None:
    model = Core(COPIED.scenario if is_on else COPIED.without_rule)
    got = search(model, max_states=COPIED.max_states, start=follow(model, COPIED_PREFIX))
    assert (got.verdict, got.is_exhaustive) == (("holds", True) if is_on else ("violation", False)), got
    assert is_on or COPIED.words in got.detail, got
    assert got.num_states == COPIED.num_states[is_on]


def test_every_rule_has_its_trace() -> None:
    assert {trace.rule for trace in (*QUICK, SEALED, COPIED)} == ALL_RULES


@pytest.mark.parametrize(
    ("model", "words", "num_states"),
    [
        pytest.param(Quota("none"), "step 1 used samples [0, 2, 3]", 102, id="H14 QUOTA, no guard"),
        pytest.param(Quota("count"), "step 1 used samples [0, 1, 1, 3]", 117, id="H14 QUOTA, counting samples only"),
        pytest.param(Ckpt("step"), "g3 restores the fenced branch step-2.g1", 113, id="H15 CKPT, newest by step"),
        pytest.param(
            Import(is_pinned=False),
            "g1 began with step 7, g2 begins with step 9",
            19,
            id="H23 IMPORT, newest each time",
        ),
        pytest.param(
            Import(is_named_zero=False), "g2 goes back to step 7 behind", 10, id="H23 IMPORT, named as it was"
        ),
        pytest.param(Release(is_persisted=False), "deleted by the old leader", 9, id="H9 RELEASE, not persisted"),
        pytest.param(
            GivenUp(is_named_kept=False),
            "w1, which holds the state of g2, is released",
            16,
            id="H9 RELEASE, given up though named",
        ),
    ],
)
def test_beside_the_core_without_the_rule_its_trace_is_found(model: Model, words: str, num_states: int) -> None:
    got = search(model, max_states=SIDE_MAX_STATES)
    assert got.verdict == "violation", got
    assert words in got.detail, got
    assert got.num_states == num_states


@pytest.mark.parametrize(
    ("model", "num_states"),
    [
        pytest.param(Quota("hash"), 400, id="H14 QUOTA, sum of hashes"),
        pytest.param(Quota("versioned"), 400, id="H14 QUOTA, in force when all have them"),
        pytest.param(Ckpt("generation"), 424, id="H15 CKPT, newest by generation and step"),
        pytest.param(Import(), 14, id="H23 IMPORT, named by the spec, as (0, N)"),
        pytest.param(Release(is_persisted=True), 8, id="H9 RELEASE, persisted"),
        pytest.param(GivenUp(is_named_kept=True), 31, id="H9 RELEASE, given up and not named"),
    ],
)
def test_beside_the_core_with_the_rule_it_holds(model: Model, num_states: int) -> None:
    got = search(model, max_states=SIDE_MAX_STATES, live=True)
    assert got.verdict == "holds", got
    assert got.is_exhaustive
    assert got.num_states == num_states
