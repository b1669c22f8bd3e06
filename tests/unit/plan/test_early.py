"""Pods that fail before they run: each further one comes later, and few are left."""

from __future__ import annotations

import pytest

from regroup_operator.model.plan import EarlyFailure
from regroup_operator.model.records import Pod
from regroup_operator.plan.pods.early import held_until, note_early, surplus
from tests.builders.plan import make_pod, uid_of

NOW_S = 100.0


def failed(slot: int = 0, attempt: int = 0, **changes: object) -> Pod:
    return make_pod(slot, attempt, phase="Failed", running_since_s=None, **changes)


@pytest.mark.parametrize(
    ("known", "pods", "want"),
    [
        pytest.param({}, [failed()], {0: EarlyFailure(1, 0, NOW_S)}, id="the first"),
        pytest.param({0: EarlyFailure(1, 0, 90.0)}, [failed()], {0: EarlyFailure(1, 0, 90.0)}, id="once"),
        pytest.param(
            {0: EarlyFailure(1, 0, 90.0)}, [failed(), failed(attempt=1)], {0: EarlyFailure(2, 1, NOW_S)}, id="the next"
        ),
        pytest.param(
            {0: EarlyFailure(3, 2, 90.0)}, [make_pod(0, 3, phase="Pending", running_since_s=None)],
            {0: EarlyFailure(3, 2, 90.0)}, id="one that is on its way proves nothing",
        ),
        pytest.param({0: EarlyFailure(3, 2, 90.0)}, [make_pod(0, 3, running_since_s=99.0)], {}, id="one that runs"),
        pytest.param(
            {0: EarlyFailure(3, 2, 90.0)}, [make_pod(0, 0, terminating=True), failed(0, 3)], {0: EarlyFailure(4, 3, NOW_S)},
            id="an older one that ran, on a node without power",
        ),
        pytest.param({0: EarlyFailure(3, 2, 90.0)}, [], {}, id="a slot that is gone"),
        pytest.param({}, [failed(last_exit_code=1)], {}, id="it ran, and ended"),
        pytest.param({}, [failed(1), failed(2)], {1: EarlyFailure(1, 0, NOW_S), 2: EarlyFailure(1, 0, NOW_S)}, id="slots"),
    ],
)  # fmt: skip
def test_note_early(known: dict[int, EarlyFailure], pods: list[Pod], want: dict[int, EarlyFailure]) -> None:
    assert note_early(known, pods, NOW_S) == want


@pytest.mark.parametrize(("count", "pause_s"), [(1, None), (2, 10.0), (3, 20.0), (6, 160.0), (7, 300.0), (5000, 300.0)])
def test_pause_doubles_up_to_five_minutes(count: int, pause_s: float | None) -> None:
    held = held_until({3: EarlyFailure(count, count, NOW_S)})
    assert held == ({} if pause_s is None else {3: NOW_S + pause_s})


def test_newest_failed_pod_of_each_slot_stays() -> None:
    pods = [
        failed(0, 0),
        failed(0, 2),
        failed(0, 1),
        failed(1),
        make_pod(1, 1),
        failed(2),
        failed(2, 1, terminating=True),
    ]
    assert [pod.uid for pod in surplus(pods)] == [uid_of(0, 1), uid_of(0, 0)]
    assert [pod.uid for pod in surplus(pods, {uid_of(0, 0)})] == [uid_of(0, 1)]
