"""What is said of members that are asked to leave while nobody has taken their place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regroup_operator.model.worker import Announce, Current, Decision, Keep, Worker
from regroup_operator.plan.report.leaving import leaving_words
from tests.builders.plan import make_current, make_pod, make_session, make_worker

A = make_worker(0)
NEWEST = make_current((0, 1))
KEEP = Keep(1.0)
ANNOUNCE = Announce("planned", (A,), "Drained", "1 to leave: 1 worker trains on.")
TRAINS = "Worker 1 is asked to leave and trains on until another pod has the state, at most until the end of its grace period."


def leaves(slot: int) -> Worker:
    return make_worker(slot, pod=make_pod(slot, terminating=True))


@pytest.mark.parametrize(
    ("members", "current", "decision", "saves", "want"),
    [
        pytest.param([A, make_worker(1)], NEWEST, KEEP, False, "", id="nobody leaves"),
        pytest.param([A, leaves(1)], NEWEST, ANNOUNCE, False, "", id="it is not needed, and gone after the step"),
        pytest.param([A, leaves(1)], replace(NEWEST, adopted=False), KEEP, False, "", id="the change is under way"),
        pytest.param([A, leaves(1)], None, KEEP, False, "", id="there is no generation yet"),
        pytest.param(
            [A, make_worker(1, pod=make_pod(1, terminating=True), session=make_session(1, connected=False))], NEWEST, KEEP,
            False, "", id="it cannot be reached: others say so",
        ),
        pytest.param(
            [A, leaves(1)], NEWEST, KEEP, False, f"{TRAINS} If none is ready by then, the others wait for one.",
            id="of several, one that is needed",
        ),
        pytest.param(
            [leaves(1)], NEWEST, KEEP, True,
            f"{TRAINS} If none is ready by then, training continues from the checkpoint that is written at its end.", id="all"
        ),
        pytest.param(
            [leaves(0), leaves(1)], NEWEST, KEEP, False,
            "Workers 0, 1 are asked to leave and train on until another pod has the state, at most until the end of their grace "
            "period. If none is ready by then, training continues from step 0, because the job writes no checkpoints.",
            id="all, and nothing is saved",
        ),
        pytest.param(
            [A, make_worker(1, pod=make_pod(1, node="n2", drain_taint="a/b"))], NEWEST, KEEP, False,
            "Worker 1 is asked to leave (its node n2 has taint a/b) and trains on until another pod has the state, until its pod "
            "ends. If none is ready by then, the others wait for one.", id="by a notice",
        ),
        pytest.param(
            [A, make_worker(1, pod=make_pod(1, terminating=True, drain_taint="a/b"))], NEWEST, KEEP, False,
            f"{TRAINS} If none is ready by then, the others wait for one.", id="deleted after the notice",
        ),
    ],
)  # fmt: skip
def test_words(members: list[Worker], current: Current | None, decision: Decision, saves: bool, want: str) -> None:
    assert leaving_words(current, members, decision, saves=saves) == want
