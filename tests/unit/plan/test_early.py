"""Pods that fail before they run: each further one comes later, and few are left."""

from __future__ import annotations

import pytest

from regroup_operator.model.plan import Clock, Verdict
from regroup_operator.model.pod_row import FORGOTTEN_S, PodRow
from regroup_operator.model.records import Pod
from regroup_operator.plan.pods.early import early_words, held_until, note_early, surplus
from tests.builders.plan import make_pod, uid_of

NOW_S = 100.0


def failed(slot: int = 0, attempt: int = 0, **changes: object) -> Pod:
    return make_pod(slot, attempt, phase="Failed", running_since_s=None, **changes)


@pytest.mark.parametrize(
    ("known", "pods", "want"),
    [
        pytest.param({}, [failed()], {0: PodRow(1, 0, NOW_S)}, id="the first"),
        pytest.param({0: PodRow(1, 0, 90.0)}, [failed()], {0: PodRow(1, 0, 90.0)}, id="once"),
        pytest.param(
            {0: PodRow(1, 0, 90.0)}, [failed(), failed(attempt=1)], {0: PodRow(2, 1, NOW_S)}, id="the next"
        ),
        pytest.param(
            {0: PodRow(3, 2, 90.0)}, [make_pod(0, 3, phase="Pending", running_since_s=None)],
            {0: PodRow(3, 2, 90.0)}, id="one that is on its way proves nothing",
        ),
        pytest.param({0: PodRow(3, 2, 90.0)}, [make_pod(0, 3, running_since_s=99.0)], {}, id="one that runs"),
        pytest.param(
            {0: PodRow(3, 2, 90.0)}, [make_pod(0, 0, terminating=True), failed(0, 3)], {0: PodRow(4, 3, NOW_S)},
            id="an older one that ran, on a node without power",
        ),
        pytest.param(
            {0: PodRow(3, 3, 90.0)}, [make_pod(0, 0, running_since_s=1.0)], {0: PodRow(3, 3, 90.0)},
            id="an older one that runs yet, and the failed ones were deleted",
        ),
        pytest.param(
            {0: PodRow(3, 3, NOW_S - FORGOTTEN_S)}, [make_pod(0, 0, running_since_s=1.0)], {},
            id="an older one that goes on, and none has failed for long",
        ),
        pytest.param(
            {0: PodRow(3, 3, NOW_S - FORGOTTEN_S)}, [make_pod(0, 0, running_since_s=1.0), failed(0, 3)],
            {0: PodRow(0, 3, NOW_S - FORGOTTEN_S)}, id="nor has the one that is still there for its log",
        ),
        pytest.param(
            {0: PodRow(3, 2, NOW_S - FORGOTTEN_S)}, [make_pod(0, 3, phase="Pending", running_since_s=None)],
            {0: PodRow(3, 2, NOW_S - FORGOTTEN_S)}, id="one that pulls a large image",
        ),
        pytest.param({0: PodRow(3, 2, 90.0)}, [], {0: PodRow(3, 2, 90.0)}, id="its pods are gone from the API"),
        pytest.param({0: PodRow(3, 2, NOW_S - FORGOTTEN_S)}, [], {}, id="they have been for long"),
        pytest.param({5: PodRow(3, 2, 90.0)}, [], {}, id="a slot that is gone"),
        pytest.param({}, [failed(last_exit_code=1)], {}, id="it ran, and ended"),
        pytest.param({}, [failed(1), failed(2)], {1: PodRow(1, 0, NOW_S), 2: PodRow(1, 0, NOW_S)}, id="slots"),
    ],
)  # fmt: skip
def test_note_early(known: dict[int, PodRow], pods: list[Pod], want: dict[int, PodRow]) -> None:
    assert note_early(known, pods, NOW_S, slots=5) == want


@pytest.mark.parametrize(("count", "pause_s"), [(1, None), (2, 10.0), (3, 20.0), (6, 160.0), (7, 300.0), (5000, 300.0)])
def test_pause_doubles_up_to_five_minutes(count: int, pause_s: float | None) -> None:
    held = held_until({3: PodRow(count, count, NOW_S)})
    assert held == ({} if pause_s is None else {3: NOW_S + pause_s})


def refused(slot: int = 0, attempt: int = 0) -> Pod:
    said = "Allocate failed due to no devices."
    return failed(slot, attempt, status_reason="UnexpectedAdmissionError", status_message=said)


@pytest.mark.parametrize(
    ("known", "pods", "want"),
    [
        pytest.param({}, [make_pod()], None, id="none fails"),
        pytest.param({0: PodRow(1, 0, NOW_S)}, [refused()], None, id="once is replaced at once"),
        pytest.param(
            {0: PodRow(2, 1, NOW_S)},
            [refused(0, 1)],
            ("UnexpectedAdmissionError",
             "digits-worker-0-1 failed before it ran: UnexpectedAdmissionError: Allocate failed due to no devices; "
             "the next one is made at 1970-01-01T00:00:10Z"),
            id="again",
        ),
        pytest.param(
            {0: PodRow(2, 1, NOW_S)},
            [refused(0, 1), make_pod(0, 2, phase="Pending", running_since_s=None)],
            ("UnexpectedAdmissionError",
             "digits-worker-0-1 failed before it ran: UnexpectedAdmissionError: Allocate failed due to no devices"),
            id="the next one is there",
        ),
        pytest.param(
            {0: PodRow(2, 1, NOW_S - 60.0), 1: PodRow(3, 2, NOW_S - 50.0), 2: PodRow(1, 0, NOW_S)},
            [refused(0, 1), failed(1, 2), refused(2)],
            ("PodFailed", "digits-worker-1-2 failed before it ran"),
            id="the slot that failed last, and nothing is known of why",
        ),
        pytest.param(
            {0: PodRow(2, 1, NOW_S - 60.0)}, [], ("PodFailed", "A pod of worker 0 failed before it ran"), id="deleted"
        ),
    ],
)  # fmt: skip
def test_words_for_pods_that_fail_again_and_again(
    known: dict[int, PodRow], pods: list[Pod], want: tuple[str, str] | None
) -> None:
    assert early_words(known, pods, Clock(NOW_S, 0.0)) == (None if want is None else Verdict(*want))


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
