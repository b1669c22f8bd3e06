"""What is told of notices, and which nodes replacements avoid."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.generation.target import target_of
from regroup_operator.plan.pods.notices import judge_notices, with_tainted
from tests.builders.plan import make_bounds, make_pod, make_session, make_worker, uid_of

TAINT: dict[str, Any] = {"node": "n2", "drain_taint": "a/b"}


def worker(slot: int = 0, **pod: Any) -> Worker:
    return make_worker(slot, pod=make_pod(slot, **pod))


@pytest.mark.parametrize(
    ("given", "noticed", "released", "told", "kept"),
    [
        pytest.param(worker(), (), (), [], set(), id="nothing"),
        pytest.param(worker(**TAINT), (), (), ["Worker 0 is asked to leave: its node n2 has taint a/b."], {uid_of(0)}, id="new"),
        pytest.param(worker(**TAINT), (uid_of(0),), (), [], {uid_of(0)}, id="told already"),
        pytest.param(worker(), (uid_of(0),), (), ["Worker 0 is not asked to leave any more."], set(), id="taken back"),
        pytest.param(worker(terminating=True, **TAINT), (uid_of(0),), (), [], set(), id="deleted meanwhile"),
        pytest.param(worker(phase="Failed"), (uid_of(0),), (), [], set(), id="it has ended"),
        pytest.param(worker(**TAINT), (), (uid_of(0),), [], set(), id="it leaves anyway"),
        pytest.param(worker(disruption="PreemptionByScheduler"), (), (),
                     ["Worker 0 is asked to leave: its condition DisruptionTarget says PreemptionByScheduler."], {uid_of(0)},
                     id="it has to make room"),
    ],
)  # fmt: skip
def test_events(
    given: Worker, noticed: tuple[str, ...], released: tuple[str, ...], told: list[str], kept: set[str]
) -> None:
    got = judge_notices([given], frozenset(noticed), frozenset(released))
    assert ([note.note for note in got.notes], got.noticed) == (told, frozenset(kept))


def test_worker_is_asked_to_leave_by_a_notice_as_by_a_deletion() -> None:
    assert [worker(**given).draining for given in ({}, TAINT, {"disruption": "X"}, {"terminating": True})] == [
        False, True, True, True,
    ]  # fmt: skip
    told = make_worker(0, pod=make_pod(0, **TAINT), session=make_session(0, draining=object()))
    assert told.notice == "", "it has heard itself, and has a grace period"


def test_replacements_avoid_nodes_whose_end_is_announced() -> None:
    pods = [make_pod(0, **TAINT), make_pod(1, node="n1"), make_pod(2, node="n3", drain_taint="a/b")]
    assert with_tainted({1: ("n0",)}, pods, 2) == {0: ("n2", "n3"), 1: ("n0", "n2", "n3")}
    assert with_tainted({1: ("n0",)}, pods[1:2], 2) == {1: ("n0",)}


def left(slot: int, attempt: int = 0) -> Worker:
    """Return a member that has a notice."""
    return make_worker(slot, attempt=attempt, pod=make_pod(slot, attempt, **TAINT))


def ending(slot: int) -> Worker:
    return make_worker(slot, pod=make_pod(slot, terminating=True))


def joiner(slot: int, attempt: int = 1) -> Worker:
    return make_worker(slot, Standing.OUTSIDE, attempt)


@pytest.mark.parametrize(
    ("members", "joiners", "want"),
    [
        pytest.param([left(0), make_worker(1), make_worker(2)], [], "0,1,2", id="it trains on, although the others are enough"),
        pytest.param([ending(0), make_worker(1), make_worker(2)], [], "1,2", id="one whose grace period runs does not"),
        pytest.param([left(0), make_worker(1), make_worker(2)], [joiner(0)], "0.1,1,2", id="its successor takes its place"),
        pytest.param([left(0), make_worker(1), make_worker(2)], [joiner(3, 0)], "0,1,2", id="no place beyond the slots"),
        pytest.param([left(0), left(1), left(2)], [], "0,1,2", id="all, and nobody comes"),
        pytest.param([left(0), left(1), left(2)], [joiner(1)], "0,1.1,2", id="all, and one comes: it gets the state"),
        pytest.param([left(0), ending(1), left(2)], [joiner(1)], "0,1.1,2", id="one of them is ended"),
        pytest.param([left(0), left(1), left(2)], [joiner(0), joiner(1), joiner(2)], "0,1.1,2.1", id="all come: one keeps it"),
        pytest.param([left(0), make_worker(1), make_worker(2), make_worker(3)], [], "1,2,3", id="shrinking takes it first"),
    ],
)  # fmt: skip
def test_who_trains(members: list[Worker], joiners: list[Worker], want: str) -> None:
    before = [w.id for w in members]
    got = target_of(tuple(members), joiners, make_bounds(3, 2), before)
    assert ",".join(str(w.id) for w in got) == want
