"""Pods for which no node has room are given back, and tried again later."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.api.spec import ElasticPolicy
from regroup_operator.model.plan import Clock
from regroup_operator.model.pod_row import FORGOTTEN_S, PodRow
from regroup_operator.model.records import Pod
from regroup_operator.plan.pods.capacity import Capacity, Demand, judge_capacity, put_off
from tests.builders.plan import make_pod, uid_of

CLOCK = Clock(1000.0, 1_800_000_000.0)
POLICY = ElasticPolicy.model_validate({"minReplicas": 2, "maxReplicas": 9, "pendingTimeoutSeconds": 30})


def unplaced(slot: int, attempt: int = 0, **changes: Any) -> Pod:
    given = {"phase": "Pending", "running_since_s": None, "node": "", "unscheduled_reason": "Unschedulable"}
    return make_pod(slot, attempt, **given | {"unschedulable": "0/3 nodes are available."} | changes)


def judge(*pods: Pod, **given: Any) -> Capacity:
    values: dict[str, Any] = {
        "policy": POLICY, "released": frozenset(), "unplaced": {}, "rows": {}, "clock": CLOCK,
    }  # fmt: skip
    demand = Demand(given.pop("slots", 3), given.pop("minimum", 2), given.pop("per_group", 1))
    return judge_capacity(pods=pods, demand=demand, **values | given)


PLACED = (make_pod(0), make_pod(1))


def test_unschedulable_pod_has_its_time() -> None:
    got = judge(*PLACED, unplaced(2))
    assert (got.given_back, got.unplaced, got.due_s) == (frozenset(), {uid_of(2): 1000.0}, 1030.0)
    got = judge(*PLACED, unplaced(2), unplaced={uid_of(2): 970.1})
    assert (got.given_back, got.due_s) == (frozenset(), 1000.1)


@pytest.mark.parametrize(("count", "pause_s"), [(0, 60), (1, 120), (4, 960), (5, 1800), (5000, 1800)])
def test_then_it_is_given_back_and_tried_again_later_each_time(count: int, pause_s: int) -> None:
    rows = {2: PodRow(count, 3, 0.0)} if count else {}
    got = judge(*PLACED, unplaced(2, 4), unplaced={uid_of(2, 4): 970.0}, rows=rows)
    assert got.given_back == {uid_of(2, 4)}
    assert got.rows == {2: PodRow(count + 1, 4, 1000.0)}
    assert got.held == {2: 1000.0 + pause_s}
    assert got.notes[0].note.endswith(
        f"has been unschedulable for 30 s (0/3 nodes are available.); it is deleted and tried again in {pause_s} s."
    )


@pytest.mark.parametrize(
    ("pods", "given"),
    [
        pytest.param((make_pod(0), unplaced(2)), {}, id="fewer than minReplicas have a node"),
        pytest.param((*PLACED, unplaced(2)), {"minimum": 3}, id="the script refuses as many as have a node"),
        pytest.param((*PLACED, unplaced(2)), {"released": frozenset({uid_of(2)})}, id="it goes anyway"),
        pytest.param((*PLACED, unplaced(2, terminating=True)), {}, id="it goes already"),
        pytest.param((*PLACED, unplaced(2, unscheduled_reason="SchedulingGated")), {}, id="a queue holds it back"),
        pytest.param((*PLACED, unplaced(2, node="a")), {}, id="it has a node by now"),
        pytest.param((*PLACED, unplaced(2)), {"policy": None}, id="a fixed size"),
        pytest.param(
            (*PLACED, unplaced(2)), {"policy": POLICY.model_copy(update={"pending_timeout_seconds": None})}, id="not asked for"
        ),
    ],
)  # fmt: skip
def test_pod_that_is_not_given_back(pods: tuple[Pod, ...], given: dict[str, Any]) -> None:
    assert judge(*pods, unplaced={uid_of(2): 0.0}, **given).given_back == frozenset()


@pytest.mark.parametrize(
    ("pods", "slots", "kept"),
    [
        pytest.param(PLACED, 3, True, id="it is held"),
        pytest.param((*PLACED, unplaced(2, 1)), 3, True, id="the next one waits, too"),
        pytest.param((*PLACED, make_pod(2, 1)), 3, False, id="the next one has a node"),
        pytest.param(PLACED, 2, False, id="the slot is not wanted any more"),
    ],
)
def test_row_ends(pods: tuple[Pod, ...], slots: int, kept: bool) -> None:
    row = PodRow(1, 0, 990.0)
    got = judge(*pods, rows={2: row}, slots=slots)
    assert got.rows == ({2: row} if kept else {})
    assert got.words == (
        "1 worker was unschedulable for too long; the next try is at 2027-01-15T08:00:50Z" if kept else ""
    )


def test_room_for_one_is_tried_for_all_at_once() -> None:
    rows = {slot: PodRow(4, 0, 990.0) for slot in (2, 3, 4)}
    assert judge(*PLACED, rows=rows, slots=5).held == dict.fromkeys((2, 3, 4), 990.0 + 480.0)
    got = judge(*PLACED, make_pod(3, 1), rows=rows, slots=5)
    assert (got.rows, got.held) == ({}, {})
    leaving = judge(*PLACED, make_pod(3, 0), rows=rows, slots=5)
    assert leaving.rows == rows, "the pod before it, which leaves, proves no room"


@pytest.mark.parametrize(
    ("slots", "given_back"),
    [
        pytest.param((0, 1), True, id="a whole group"),
        pytest.param((0, 2), False, id="as many, but no group"),
        pytest.param((0, 1, 2), True, id="a group, and a part of another one"),
        pytest.param((1, 2), True, id="a group of other slots"),
    ],
)
def test_workers_count_by_whole_groups(slots: tuple[int, ...], given_back: bool) -> None:
    pods = (*map(make_pod, slots), unplaced(5))
    rows = {3: PodRow(4, 0, 990.0)}
    got = judge(*pods, unplaced={uid_of(5): 0.0}, rows=rows, slots=6, per_group=2)
    assert (bool(got.given_back), 3 in (got.held or {})) == (given_back, given_back), "what is missing is tried at once"
    assert got.rows[3] == rows[3]


@pytest.mark.parametrize(
    ("pods", "given", "want"),
    [
        pytest.param((), {}, {2, 3, 4, 5}, id="a start: the first group comes first"),
        pytest.param((), {"per_group": 1}, set(), id="a worker is a group"),
        pytest.param((), {"minimum": 6}, set(), id="all are needed"),
        pytest.param((make_pod(0), unplaced(1)), {}, {2, 3, 4, 5}, id="one has no node yet"),
        pytest.param((make_pod(0), make_pod(1)), {}, set(), id="a whole group has"),
        pytest.param((make_pod(0), make_pod(3)), {}, set(), id="of any slots"),
        pytest.param((make_pod(2),), {}, {0, 3, 4, 5}, id="one of each position is enough"),
        pytest.param((make_pod(0), make_pod(2)), {"minimum": 4}, {4, 5}, id="of one position there are enough"),
        pytest.param((), {"held": [0]}, {3, 4, 5}, id="another one of the position of a slot that is held back"),
        pytest.param((make_pod(0), make_pod(1)), {"released": {uid_of(1)}}, {2, 3, 4, 5}, id="one leaves"),
    ],
)
def test_pods_of_further_groups_are_made_once_the_first_have_nodes(
    pods: tuple[Pod, ...], given: dict[str, Any], want: set[int]
) -> None:
    values: dict[str, Any] = {"slots": 6, "per_group": 2, "minimum": 2, "released": (), "held": ()} | given
    assert put_off(pods, values.pop("released"), values.pop("held"), **values) == want


@pytest.mark.parametrize(
    ("ago_s", "pods", "kept"),
    [
        pytest.param(1800.0 + FORGOTTEN_S - 1.0, PLACED, True, id="not yet"),
        pytest.param(1800.0 + FORGOTTEN_S, PLACED, False, id="nothing has come of it for long"),
        pytest.param(1800.0 + FORGOTTEN_S, (*PLACED, make_pod(2)), False, id="the pod of before serves"),
        pytest.param(1800.0 + FORGOTTEN_S, (*PLACED, unplaced(2, 1)), True, id="the next one waits"),
    ],
)
def test_row_is_forgotten(ago_s: float, pods: tuple[Pod, ...], kept: bool) -> None:
    rows = {2: PodRow(9, 0, CLOCK.now_s - ago_s)}
    assert judge(*pods, rows=rows).rows == (rows if kept else {})


def test_memory_keeps_only_pods_that_wait() -> None:
    assert judge(*PLACED, unplaced={uid_of(2): 1.0}).unplaced == {}
