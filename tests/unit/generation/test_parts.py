"""Whose parts a generation of model groups continues from: the traces M1 to M8 of docs/design/protocol.md, on the real code.

Two model groups of two ranks, A and B: "aAbB" are the workers of A0, A1, B0 and B1, one process each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from regroup.generation.adoption import Arrival, Refuse
from regroup.generation.parts import (
    CopyParts,
    Decision,
    FallbackParts,
    RestoreParts,
    beginners,
    decide,
    odd_seed,
    rolls,
)
from regroup.protocol.document import Document, LineageEntry
from regroup.protocol.state import StatePair
from tests.unit.generation.test_adoption import document, empty, holds, seal

RECORD = [[1, 6], 0.5, 48.0, None, [0.1], False]


def part(
    generation: int, step: int, *kept: tuple[int, tuple[int, int]], adopted: int | None = None, agent: int | None = None
) -> Arrival:
    """A rank that holds its part of a state; `kept`: (generation, base) of gradients that it has reduced and not applied."""
    pending = tuple((number, StatePair(*base)) for number, base in kept)
    one = holds(generation, step, adopted, agent)
    return replace(one, group_size=2, pending=pending, record=RECORD if step else None)


def fresh(agent: int = 0) -> Arrival:
    """A rank without a state."""
    return replace(empty(agent), group_size=2)


def kept(arrival: Arrival, *snapshots: tuple[int, int]) -> Arrival:
    """The same, and snapshots of these states in its worker's memory."""
    return replace(arrival, snapshots=tuple(StatePair(*pair) for pair in snapshots))


def last(generation: int, step: int, *snapshots: tuple[int, int]) -> Arrival:
    """A new process whose worker's earlier one copied its part as it ended."""
    return kept(replace(part(generation, step), from_snapshot=True), (generation, step), *snapshots)


def restore(generation: int, step: int, *sources: int) -> RestoreParts:
    return RestoreParts(StatePair(generation, step), sources)


def copy(generation: int, step: int, *sources: int) -> CopyParts:
    return CopyParts(StatePair(generation, step), sources, RECORD)


AHEAD, BEHIND = part(1, 6), part(1, 5)
KEPT = part(1, 5, (1, (1, 5)))
"""It has reduced step 6 on (1, 5), and has not got the rows."""


@pytest.mark.parametrize(
    ("doc", "arrivals", "want"),
    [
        pytest.param(document(1, "aAbB"), [fresh()] * 4, FallbackParts(False), id="first generation"),
        pytest.param(document(2, "aAbB", {1: "aAbB"}), [AHEAD] * 4, copy(1, 6, 0, 1), id="all hold one state"),
        pytest.param(
            document(2, "aAbB", {1: "aAbB"}),
            [AHEAD, KEPT, KEPT, KEPT],
            copy(1, 6, 0, 1),
            id="KEEP: one rank has applied, the others follow with what they have reduced",
        ),
        pytest.param(
            document(2, "aXbB", {1: "aAbB"}, lost="A"),
            [AHEAD, fresh(), KEPT, KEPT],
            copy(1, 6, 0, 3),
            id="SERVE: a new A1 copies from B1, which rolls forward first",
        ),
        pytest.param(
            document(2, "aXbB", {1: "aAbB"}, lost="A"),
            [AHEAD, fresh(), BEHIND, BEHIND],
            copy(1, 5, 2, 3),
            id="M2: nobody has kept inner index 1 of step 6, and A1 is lost: the state before",
        ),
        pytest.param(
            document(2, "aXbB", {1: "aA"}),
            [AHEAD, fresh(), BEHIND, BEHIND],
            Refuse,
            id="INNER: A1 is alive somewhere and holds step 6 or has what leads to it",
        ),
        pytest.param(
            document(3, "aAbB", {1: "aAbB", 2: "bB"}),
            [part(1, 6, agent=1), part(1, 5, (1, (1, 5)), agent=1), part(2, 6, adopted=2), part(2, 6, adopted=2)],
            copy(2, 6, 2, 3),
            id="EXACT: g2 has redone step 6 with other sums; what g1 reduced of it is not used",
        ),
        pytest.param(
            document(3, "aBbX", {1: "aAbB", 2: "aA"}, lost="A"),
            [part(2, 9, adopted=2), part(1, 5, agent=1), part(1, 5, agent=1), fresh()],
            copy(1, 5, 2, 1),
            id="a state whose inner index 1 is lost for certain is given up",
        ),
        pytest.param(
            document(3, "axbB", {1: "aAbB", 2: "aA"}),
            [part(2, 9, adopted=2), fresh(), part(1, 5, agent=1), part(1, 5, agent=1)],
            Refuse,
            id="M7: A1 trained in g2 and is cut off: B is no witness of it",
        ),
        pytest.param(
            document(2, "bB", {1: "aAbB"}, seals=(seal("a", 1, (1, 6), 1),), lost="A"),
            [KEPT, KEPT],
            Refuse,
            id="M8: A0 has applied step 6, is connected and no member",
        ),
        pytest.param(
            document(2, "bB", {1: "aAbB"}, seals=(seal("a", 1, (1, 5), 1),), lost="A"),
            [BEHIND, BEHIND],
            copy(1, 5, 0, 1),
            id="A0 is connected, and holds no more",
        ),
        pytest.param(
            document(2, "aX", {1: "aA"}, lost="A"),
            [part(1, 6), fresh()],
            FallbackParts(True),
            id="one group, one rank lost: inner index 1 is gone",
        ),
        pytest.param(
            document(2, "aX", {1: "aA"}),
            [part(1, 6), fresh()],
            Refuse,
            id="one group, one rank cut off: it is waited for",
        ),
        pytest.param(
            document(2, "aA", {1: "aA"}),
            [part(1, 6), fresh(agent=1)],
            FallbackParts(True),
            id="one group, a process was restarted in place: what it held is gone",
        ),
        pytest.param(
            replace(document(2, "xX", {1: "aA"}, lost="aA"), silent=("b",)),
            [fresh(), fresh()],
            Refuse,
            id="BEST: a connected worker has not said yet what it holds",
        ),
        pytest.param(
            document(3, "xX", {1: "aA", 2: "aAbB"}, lost="aA"),
            [fresh(), fresh()],
            Refuse,
            id="COPIES: b and B may have copied the state before they were cut off",
        ),
        pytest.param(
            document(3, "aX", {1: "aA", 2: "aAbB"}, lost="A"),
            [fresh(agent=1), fresh()],
            Refuse,
            id="COPIES: the same where g2 has never trained, as a did not adopt it",
        ),
        pytest.param(
            document(3, "xX", {1: "aA", 2: "aAbB"}, lost="aAb", seals=(seal("B", 2, None, 1),)),
            [fresh(), fresh()],
            FallbackParts(False),
            id="COPIES: B says that it left g2 with nothing",
        ),
        pytest.param(
            document(3, "bX", {1: "cA", 2: "cAbB"}, lost="AB", seals=(seal("c", 1, None, 1),)),
            [fresh(), fresh()],
            Refuse,
            id="COPIES: c says that it left g1 with nothing, but may have entered g2 since, and copied",
        ),
        pytest.param(
            document(3, "aAbB", {1: "aAbB", 2: "aAcC"}, lost="C"),
            [part(2, 9, adopted=2), part(2, 8, adopted=2), part(1, 5, agent=1), part(1, 5, agent=1)],
            Refuse,
            id="who holds step 9 is no witness of step 8, which c may hold and A1 does",
        ),
        pytest.param(
            document(3, "bB", {1: "aAbB", 2: "aA"}, seals=(seal("a", 2, (1, 5), 1),)),
            [BEHIND, BEHIND],
            copy(1, 5, 0, 1),
            id="g2 has never trained: a is connected and did not adopt it",
        ),
        pytest.param(
            document(3, "axbB", {1: "aAbB", 2: "aA"}),
            [BEHIND, fresh(), BEHIND, BEHIND],
            copy(1, 5, 0, 3),
            id="g2 has never trained: a is a member and did not adopt it",
        ),
        pytest.param(
            document(2, "aX", {1: "aA"}, seals=(seal("A", 1, None, 1),)),
            [AHEAD, fresh()],
            FallbackParts(True),
            id="a worker that is connected and holds nothing is not waited for",
        ),
        pytest.param(
            document(2, "aCcX", {1: "aAbBcC"}, seals=(seal("B", 1, (1, 5), 1),), lost="Ab"),
            [AHEAD, BEHIND, BEHIND, fresh()],
            Refuse,
            id="BEST: B is connected, and may have kept what leads to the state that C lacks",
        ),
        pytest.param(
            replace(document(2, "aAbB", {1: "aAbB"}), silent=("c",)),
            [AHEAD] * 4,
            copy(1, 6, 0, 1),
            id="a worker that has not said what it holds is not waited for where the newest state is whole",
        ),
        pytest.param(
            replace(document(4, "cC", {3: "aA"}, lost="aA"), silent=("b",)),
            [BEHIND, BEHIND],
            Refuse,
            id="BEST: all of g3 is lost, and b, which may hold a state of g2, has not said so yet",
        ),
        pytest.param(
            document(3, "aXbC", {1: "aAbBcC", 2: "aAbB"}),
            [part(2, 6, adopted=2), fresh(), part(1, 5, adopted=2), BEHIND],
            Refuse,
            id="INNER: b, which has not trained in g2, is no witness for the inner index of A, which is cut off",
        ),
        pytest.param(
            replace(document(3, "xX"), lineage=(LineageEntry(1, 0),)),
            [fresh(), fresh()],
            FallbackParts(True),
            id="all workers are new, and the job has trained before",
        ),
        pytest.param(
            document(2, "aA", {1: "aA"}),
            [kept(part(1, 6), (1, 4), (1, 2)), kept(fresh(agent=1), (1, 4), (1, 2))],
            FallbackParts(True, restore(1, 4, 0, 1)),
            id="BACKUP: a process was restarted; both have a snapshot of step 4",
        ),
        pytest.param(
            document(2, "aA", {1: "aA"}),
            [kept(fresh(agent=1), (1, 6), (1, 4)), kept(fresh(agent=1), (1, 4), (1, 2))],
            FallbackParts(True, restore(1, 4, 0, 1)),
            id="BACKUP: the newest snapshot is not whole, the one before it is",
        ),
        pytest.param(
            document(2, "aA", {1: "aA"}),
            [kept(part(1, 6), (1, 4)), kept(fresh(agent=1), (1, 6), (1, 4))],
            FallbackParts(True, restore(1, 6, 0, 1)),
            id="BACKUP: who holds the state itself needs no snapshot of it",
        ),
        pytest.param(
            document(2, "aX", {1: "aA"}, lost="A"),
            [kept(part(1, 6), (1, 4)), fresh()],
            FallbackParts(True),
            id="BACKUP: the snapshot went with the pod",
        ),
        pytest.param(
            document(2, "aAbB", {1: "aAbB"}),
            [kept(part(1, 6), (1, 4)), kept(fresh(agent=1)), part(1, 5), kept(fresh(agent=1), (1, 4))],
            FallbackParts(True, restore(1, 4, 0, 3)),
            id="BACKUP: all copies of inner index 1 died; one of their workers has a snapshot",
        ),
        pytest.param(
            document(2, "aAbB", {1: "aAbB"}),
            [kept(part(1, 6), (1, 4)), kept(fresh(agent=1), (1, 4)), part(1, 5), part(1, 5)],
            copy(1, 5, 2, 3),
            id="BACKUP: a state that is whole in processes comes before an older snapshot",
        ),
        pytest.param(
            document(3, "aAbB", {1: "aAbB", 2: "aA"}),
            [kept(fresh(agent=2), (2, 9)), kept(fresh(agent=2), (2, 9)), BEHIND, BEHIND],
            restore(2, 9, 0, 1),
            id="BACKUP: a snapshot of a generation that those with a whole state were not in",
        ),
        pytest.param(
            document(2, "aA", {1: "aA"}),
            [last(1, 6, (1, 4)), last(1, 6, (1, 4))],
            copy(1, 6, 0, 1),
            id="BACKUP: both processes copied their parts as they ended, which is what they held",
        ),
        pytest.param(
            document(2, "aA", {1: "aA"}),
            [last(1, 6, (1, 4)), last(1, 5, (1, 4))],
            FallbackParts(True, restore(1, 4, 0, 1)),
            id="BACKUP: they had ended a step apart",
        ),
        pytest.param(
            document(2, "bB", {1: "aAbB"}, seals=(seal("a", 1, (1, 6), 1, is_backup=True),), lost="A"),
            [BEHIND, BEHIND],
            copy(1, 5, 0, 1),
            id="BACKUP: the snapshot of a worker that is no member decides nothing",
        ),
        pytest.param(
            document(2, "aX", {1: "aA"}, seals=(seal("A", 1, (1, 4), 1, is_backup=True),)),
            [AHEAD, fresh()],
            FallbackParts(True),
            id="BACKUP: nor is it waited for",
        ),
    ],
)
def test_decision(doc: Document, arrivals: list[Arrival], want: Decision | type[Refuse]) -> None:
    got = decide(doc, arrivals, 2)
    if isinstance(want, type):
        assert isinstance(got, want), got
        assert got.reason
    else:
        assert got == want


def test_the_place_of_a_worker_says_which_parts_it_may_hold() -> None:
    """Two workers of two processes hold one copy: a is lost, A is cut off, and has the last two parts."""
    doc = document(2, "xX", {1: "aA"}, lost="a", processes=2)
    doc = replace(doc, older=(replace(doc.older[0], positions=(0, 1)),))
    got = decide(doc, [replace(fresh(), group_size=4)] * 4, 4)
    assert isinstance(got, Refuse)
    assert "inner index 2" in got.reason
    assert "(pod UIDs A)" in got.reason


def test_workers_that_split_the_model_differently_are_refused() -> None:
    got = decide(document(1, "ab"), [fresh(), replace(fresh(), group_size=1)], 2)
    assert isinstance(got, Refuse)
    assert "one regroup.mesh()" in got.reason


@pytest.mark.parametrize(
    ("arrival", "want"),
    [
        (KEPT, True),
        (BEHIND, False),
        (part(1, 5, (2, (1, 5))), False),
        (part(1, 5, (2, (1, 5)), (1, (1, 5))), True),
        (part(2, 5, (1, (1, 5))), False),
        (replace(fresh(), pending=((1, StatePair(1, 5)),)), False),
    ],
    ids=["kept", "nothing kept", "kept in another generation", "kept in two", "kept on another base", "no state"],
)
def test_kept_gradients_are_applied_to_exactly_their_base(arrival: Arrival, want: bool) -> None:
    assert rolls(arrival, StatePair(1, 6)) == want


def test_a_job_begins_with_parts_that_nobody_has_trained() -> None:
    torn = replace(fresh(), torn=True)
    assert beginners([fresh()] * 4, 2) == (0, 1)
    assert beginners([torn, fresh(), fresh(), fresh()], 2) == (2, 1)
    assert beginners([part(1, 6), fresh(), part(1, 6), fresh()], 2) is None


@pytest.mark.parametrize(
    ("seeds", "first", "want"),
    [([3, 3], (0, 1), None), ([3, 4], (0, 1), 1), ([5, 4, 3, 4], (2, 3), 3), ([5, 4, 4], (2, 1), None)],
)
def test_parts_of_different_models_do_not_make_one(seeds: list[int], first: tuple[int, int], want: int | None) -> None:
    assert odd_seed([replace(fresh(), seed=one) for one in seeds], first) == want
