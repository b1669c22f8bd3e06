"""Pods that fail one after the other: how many there were, and how long the next one is waited for."""

import pytest

from regroup_operator.model.pod_row import FORGOTTEN_S, REPLACED, TRIED_AGAIN, Pauses, PodRow


@pytest.mark.parametrize(
    ("pauses", "count", "pause_s"),
    [
        pytest.param(REPLACED, 0, 0.0, id="a row that was forgotten"),
        pytest.param(REPLACED, 1, 0.0, id="the first is replaced at once"),
        pytest.param(REPLACED, 2, 10.0, id="the second is not"),
        pytest.param(REPLACED, 6, 160.0, id="twice as long each time"),
        pytest.param(REPLACED, 7, 300.0, id="the longest pause"),
        pytest.param(REPLACED, 10_000, 300.0, id="no number is too large"),
        pytest.param(TRIED_AGAIN, 1, 60.0, id="a pod without a node is not made again at once"),
        pytest.param(TRIED_AGAIN, 6, 1800.0, id="and at last every half hour"),
    ],
)
def test_pause_after_failures_in_a_row(pauses: Pauses, count: int, pause_s: float) -> None:
    row = PodRow(count, 3, 100.0)
    assert row.pause_s(pauses) == pause_s
    assert row.held_until_s(pauses) == (100.0 + pause_s if pause_s else float("-inf"))


def test_row_grows_by_its_newest_pod() -> None:
    first = PodRow.after(None, 0, 1.0, reason="Evicted")
    assert first == PodRow(1, 0, 1.0, "Evicted")
    assert PodRow.after(first, 4, 9.0, num=2) == PodRow(3, 4, 9.0)


def test_row_ends_without_another_failure() -> None:
    row = PodRow(1, 0, 100.0)
    assert (row.is_over(99.0 + FORGOTTEN_S), row.is_over(100.0 + FORGOTTEN_S)) == (False, True)
