"""Rule END: each part of it off, its trace is there; all on, no script is lost and none is run again without a reason."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.model.end import END_RULES, End, EndRule
from tests.model.end_together import TOGETHER_RULES, EndTogether, TogetherRule
from tests.model.search import search

MAX_STATES = 10_000


@pytest.mark.parametrize(
    ("model", "num_states"),
    [
        pytest.param(End(), 576, id="two faults"),
        pytest.param(End(faults=3), 1084, id="three faults"),
        pytest.param(End(suspends=True), 1648, id="suspended and resumed"),
        pytest.param(End(faults=3, restores=True), 1844, id="restored from a backup"),
        pytest.param(End(checkpoint="older"), 528, id="without the state of the last step"),
        pytest.param(End(checkpoint="older", suspends=True), 1068, id="suspended without the state of the last step"),
        pytest.param(EndTogether(), 2220, id="all run again: a model group"),
        pytest.param(EndTogether(scripts=True), 8499, id="all run again: a script"),
    ],
)
def test_with_all_rules_each_job_ends_and_complete_is_true(model: End | EndTogether, num_states: int) -> None:
    got = search(model, max_states=MAX_STATES, live=True)
    assert got.verdict == "holds", got
    assert got.is_exhaustive
    assert got.num_states == num_states, "the model's behaviour changed: read why, then update the number"


@pytest.mark.parametrize(
    ("rule", "words", "suspends", "checkpoint"),
    [
        ("ORDER", "g2 copies the state of a worker whose script has left its loop", False, "exact"),
        ("STAYS", "the script of w0 is run again, and nothing has failed", False, "exact"),
        ("PROOF", "Complete, and a script has not returned 0", True, "exact"),
        ("EXACT", "w0 runs the end of its script with an older state", False, "older"),
        ("PLACE", "two pods run the end of w0 at once", False, "exact"),
        ("WRITTEN", "g2 copies the state of a worker whose script has left its loop", False, "exact"),
    ],
)
def test_without_a_part_of_the_rule_its_trace_is_found(
    rule: EndRule, words: str, suspends: bool, checkpoint: Literal["exact", "older"]
) -> None:
    model = End(END_RULES - {rule}, suspends=suspends, restores=rule == "WRITTEN", checkpoint=checkpoint)
    got = search(model, max_states=MAX_STATES)
    assert (got.verdict, words in got.detail) == ("violation", True), got


@pytest.mark.parametrize(
    ("rule", "verdict", "words"),
    [
        ("SAME", "violation", "Complete, and a script has not returned 0 in g2"),
        ("BACK", "stuck", ""),
    ],
)
def test_where_all_run_their_end_again_each_part_is_needed(rule: TogetherRule, verdict: str, words: str) -> None:
    got = search(EndTogether(TOGETHER_RULES - {rule}, scripts=rule == "SAME"), max_states=MAX_STATES, live=True)
    assert (got.verdict, words in got.detail) == (verdict, True), got
