"""Seeded random walks with every kind of fault, three workers and seven generations: far beyond the searches' reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.core import Core
from tests.model.records import ALL_RULES, BACKUP, FINISH, LINGER, PERSIST, TORN, WITNESS
from tests.model.scenarios import WILD
from tests.model.search import walk

DEPTH = 150


@pytest.mark.parametrize("leaders", [1, 2], ids=["one operator", "two leaders"])
@pytest.mark.parametrize("has_planned", [False, True], ids=["forced only", "forced and planned"])
def test_with_all_rules_no_walk_meets_a_violation(leaders: int, has_planned: bool) -> None:
    model = Core(replace(WILD, leaders=leaders, has_planned=has_planned))
    got = walk(model, num_walks=250, depth=DEPTH, seed=1)
    assert got.violation is None, "\n".join((got.violation, *got.trace))
    assert got.num_finished > 50, "walks that hardly ever finish a job prove little"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (PERSIST, "split brain"),
        (TORN, "trains on a torn state"),
        (WITNESS, "silent rollback"),
        (LINGER, "drained away"),
        (FINISH, "exits 'done'"),
        (BACKUP, "silent rollback"),
    ],
)
def test_without_a_rule_the_walks_meet_its_violation(rule: str, words: str) -> None:
    """The walks can fail. (STATE and MAD take more than 1500 walks; the other rules are about liveness or INC.)"""
    got = walk(Core(replace(WILD, rules=ALL_RULES - {rule})), num_walks=1500, depth=DEPTH, seed=2)
    assert got.violation is not None
    assert words in got.violation
