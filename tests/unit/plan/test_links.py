"""Broken links (rule CLIQUE): what is remembered of them, who goes, and who comes back."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.generation.links import Links, cut_off, with_links, with_returning
from tests.builders.plan import make_current, make_fault, make_session, make_worker, uid_of

UNFORMED = make_current(adopted=False)


def broken(slot: int, peer: int | None = None) -> Worker:
    """A member whose group broke, and whom it lost."""
    fault = make_fault(peer=uid_of(peer) if peer is not None else None)
    session = make_session(slot, Phase.BROKEN, 1, fault=fault, fault_generation=1)
    return make_worker(slot, Standing.BROKEN, session=session, since_s=90.0)


def links(*pairs: tuple[int, int]) -> Links:
    return frozenset(frozenset(map(uid_of, pair)) for pair in pairs)


OUTSIDE = [make_worker(slot, Standing.OUTSIDE) for slot in range(4)]


@pytest.mark.parametrize(
    ("known", "current", "workers", "want"),
    [
        pytest.param(links(), UNFORMED, [broken(0, 1), broken(1)], links((0, 1)), id="one side's word is enough"),
        pytest.param(links((0, 1)), UNFORMED, [broken(0, 2), OUTSIDE[1], broken(2)], links((0, 1), (0, 2)),
                     id="those of an earlier generation are kept"),
        pytest.param(links((0, 1)), UNFORMED, [broken(0), broken(2)], links(), id="a pod that is gone is forgotten"),
        pytest.param(links(), UNFORMED, [broken(0, 3), broken(1, 0), broken(2, 0), OUTSIDE[3]], links(),
                     id="it left because of one that is no link's end, and the others miss it"),
        pytest.param(links((0, 1), (0, 2)), make_current((0, 1)), [broken(0, 1), broken(1), OUTSIDE[2]], links((0, 2)),
                     id="two that have trained in one group are forgotten, and what breaks it is no link"),
        pytest.param(links((0, 1)), None, [OUTSIDE[0], OUTSIDE[1]], links(), id="no generation"),
    ],
)  # fmt: skip
def test_what_is_remembered_of_broken_links(known: Links, current: Any, workers: list[Worker], want: Links) -> None:
    assert with_links(known, current, workers) == want


@pytest.mark.parametrize(
    ("workers", "known", "want"),
    [
        pytest.param([broken(0, 2), broken(2)], links(), {2}, id="nothing more is known: the younger slot"),
        pytest.param([broken(0, 2), broken(2)], links((0, 1)), {0}, id="whose link to another is broken, too"),
        pytest.param([broken(0, 2), broken(2)], links((2, 1)), {2}, id="the same of the other one"),
        pytest.param([broken(0), broken(2)], links((0, 2)), set(), id="a link that nobody missed this time"),
    ],
)
def test_who_goes(workers: list[Worker], known: Links, want: set[int]) -> None:
    current = make_current((0, 2), adopted=False)
    assert cut_off(current, workers, with_links(known, current, [*workers, OUTSIDE[1]])) == {
        MemberId(s, 0) for s in want
    }


@pytest.mark.parametrize(
    ("spared", "want"),
    [
        pytest.param([], {1}, id="the younger slot"),
        pytest.param([1], {0}, id="not who alone holds the newest state of its position"),
        pytest.param([0, 1], set(), id="nobody: without either of them nobody can train, and the link may heal"),
    ],
)
def test_who_goes_for_a_link_that_broke_a_generation_before_the_one_that_refused(
    spared: list[int], want: set[int]
) -> None:
    current = make_current((2, 3), number=2, adopted=False)
    chosen = [OUTSIDE[0], OUTSIDE[1], broken(2)]
    got = cut_off(current, chosen, links((0, 1)), refused=True, spared=frozenset(MemberId(slot, 0) for slot in spared))
    assert got == {MemberId(slot, 0) for slot in want}
    assert cut_off(current, chosen, links((0, 1))) == set(), "nobody refused: other sets are tried as they come"


@pytest.mark.parametrize(
    ("others", "barred", "known", "want"),
    [
        pytest.param([2], [1], links((0, 1), (0, 2)), [2, 1], id="its only broken link was to who goes now"),
        pytest.param([2], [1], links((0, 1), (1, 2)), [2], id="it has one to somebody who stays"),
        pytest.param([2], [1, 3], links((0, 1), (0, 3), (1, 3)), [2, 1], id="of two without a link one comes back"),
        pytest.param([2], [1], links((0, 2)), [2], id="it is left out for something else"),
        pytest.param([1, 2], [1], links((0, 1)), [1, 2], id="it is needed, and in already"),
    ],
)
def test_who_comes_back(others: list[int], barred: list[int], known: Links, want: list[int]) -> None:
    got = with_returning([OUTSIDE[s] for s in others], [OUTSIDE[s] for s in barred], known)
    assert [w.id.slot for w in got] == want
