"""Pods that end again and again although nobody deletes them: which count, and when they fail the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup.protocol.wire import Draining
from regroup_operator.model.plan import Clock, PodEnds
from regroup_operator.model.records import AgentSession, Observation, Pod
from regroup_operator.plan.failures.exits import see_failures
from regroup_operator.plan.failures.pod_ends import ROUNDS, note_pod_ends, pod_ends_failure, without_slots
from tests.builders.plan import after, make_condition, make_pod, make_session, remembered, uid_of

Step = tuple[Sequence[int], int | None]
"""(Slots whose pods end, the step at which the newest generation began; None: it has not begun)."""


def row(
    *steps: Step, slots: int = 2, minimum: int = 2, window_s: float | None = None, per_group: int = 1
) -> PodEnds | None:
    """Return what is known after these ends, one plan each and ten minutes apart."""
    known: PodEnds | None = None
    for i, (ended, start) in enumerate(steps):
        pods = [make_pod(slot, i, **FAILED, status_reason="DeadlineExceeded") for slot in ended]
        reached = None if start is None else (0, start)
        known = note_pod_ends(
            known,
            pods,
            slots=slots,
            minimum=minimum,
            reached=reached,
            now=600.0 * i,
            window_s=window_s,
            per_group=per_group,
        )
    return known


ALL: Step = ((0, 1), 0)


@pytest.mark.parametrize(
    ("steps", "given", "fails"),
    [
        pytest.param([ALL] * ROUNDS, {}, True, id="all pods end, and the job begins at the same step"),
        pytest.param([ALL] * (ROUNDS - 1), {}, False, id="one round less"),
        pytest.param([((0, 1), None)] * ROUNDS, {}, True, id="none ever begins"),
        pytest.param([((0, 1), 10 * i) for i in range(3 * ROUNDS)], {}, False, id="it gets further each time"),
        pytest.param(
            [step for i in range(ROUNDS) for step in (((0,), 60 + i), ((1,), 0))],
            {"minimum": 1},
            True,
            id="steps that a survivor commits before its own pod ends are lost again",
        ),
        pytest.param([((1,), 0)] * ROUNDS, {}, True, id="of a job of fixed size one slot is enough"),
        pytest.param([((1,), 0)] * (3 * ROUNDS), {"minimum": 1}, False, id="an elastic job trains on without it"),
        pytest.param(
            [((slot,), 0) for slot in range(9)] * 2, {"slots": 9, "minimum": 9}, False, id="many pods end at one time"
        ),
        pytest.param(
            [((0, 2), 0)] * ROUNDS,
            {"slots": 4, "minimum": 2, "per_group": 2},
            True,
            id="two groups of two, and no worker of the first position: no group is whole",
        ),
        pytest.param(
            [((0, 1), 0)] * (3 * ROUNDS),
            {"slots": 4, "minimum": 2, "per_group": 2},
            False,
            id="two groups of two, and the job trains on with one",
        ),
        pytest.param([((0,), 0)] * ROUNDS, {"minimum": 4}, True, id="it needs more slots than it has"),
        pytest.param([ALL] * ROUNDS, {"window_s": 3600.0}, False, id="tier Script: over more than the window"),
        pytest.param([ALL] * ROUNDS, {"window_s": 9000.0}, True, id="tier Script: within the window"),
        pytest.param([((0, 1), 500), *[ALL] * (ROUNDS - 1)], {}, True, id="it was further once"),
        pytest.param([*[ALL] * (ROUNDS - 2), *[((0, 1), 9)] * 3], {}, False, id="it got further in the end"),
    ],
)
def test_when_they_fail_the_job(steps: list[Step], given: dict[str, Any], fails: bool) -> None:
    known = row(*steps, **given)
    assert (pod_ends_failure(known, window_s=None) is not None) is fails


def test_sentence_names_the_last_pod_and_what_ended_it() -> None:
    verdict = pod_ends_failure(row(*[ALL] * ROUNDS), window_s=None)
    assert verdict is not None
    assert (verdict.reason, verdict.pod) == ("PodsEndAgain", "digits-worker-1-7")
    assert verdict.message.startswith(
        "The pods of 2 workers have ended 8 times each, and the job got no further in between. "
        "The last one is worker 1.7 (pod digits-worker-1-7), which ended with DeadlineExceeded."
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param(
            {"status_reason": "OutOfnvidia.com/gpu", "status_message": "Pod was rejected: no GPU."},
            "failed before it ran: OutOfnvidia.com/gpu: Pod was rejected: no GPU.",
            id="the kubelet's words",
        ),
        pytest.param({}, "failed before it ran: the kubelet gives no reason.", id="none"),
        pytest.param({"last_exit_code": 137}, "ended with exit code 137.", id="it ran"),
    ],
)
def test_sentence_says_what_became_of_the_last_pod(given: dict[str, Any], says: str) -> None:
    pods = [make_pod(0, i, phase="Failed", **given) for i in range(ROUNDS)]
    known = note_pod_ends(None, pods, slots=1, minimum=1, reached=None, now=0.0, window_s=None)
    verdict = pod_ends_failure(known, window_s=None)
    assert verdict is not None
    assert f"worker 0.7 (pod digits-worker-0-7), which {says}" in verdict.message


def test_slots_that_the_job_could_do_without_fail_nothing_once_it_needs_them() -> None:
    """Worker 1 was refused again and again while worker 0 trained, and then minReplicas was raised: the job failed at once."""
    known = row(*[((1,), 0)] * ROUNDS, minimum=1)
    known = note_pod_ends(known, (), slots=2, minimum=2, reached=(0, 0), now=6000.0, window_s=None)
    assert pod_ends_failure(known, window_s=None) is None
    for i in range(ROUNDS):
        assert pod_ends_failure(known, window_s=None) is None
        pod = make_pod(1, i, **FAILED, status_reason="UnexpectedAdmissionError")
        known = note_pod_ends(known, [pod], slots=2, minimum=2, reached=(0, 0), now=7000.0 + i, window_s=None)
    assert pod_ends_failure(known, window_s=None) is not None


def test_slots_that_begin_anew_have_no_ends() -> None:
    known = row(*[ALL] * (ROUNDS - 1))
    left = without_slots(known, {0})
    assert left is not None
    assert left.by_slot.keys() == {1}
    assert (without_slots(known, ()), without_slots(None, {0})) == (known, None)


FAILED: dict[str, Any] = {"phase": "Failed", "last_exit_code": 137}


@pytest.mark.parametrize(
    ("pod", "session", "counts"),
    [
        pytest.param(make_pod(0, **FAILED, status_reason="DeadlineExceeded"), None, True, id="its deadline"),
        pytest.param(
            make_pod(0, **FAILED, status_reason="Evicted", disruption="TerminationByKubelet"),
            None,
            True,
            id="node's memory",
        ),
        pytest.param(
            make_pod(0, phase="Succeeded", last_exit_code=0), None, True, id="succeeded, and nobody told it to stop"
        ),
        pytest.param(
            make_pod(0, container_restarts=1, last_exit_code=143),
            make_session(0, draining=Draining(30.0)),
            True,
            id="a sidecar ends it",
        ),
        pytest.param(make_pod(0, container_restarts=1, last_exit_code=137), None, False, id="maxRestarts counts it"),
        pytest.param(make_pod(0, phase="Failed", last_exit_code=2), None, False, id="maxRestarts counts it, too"),
        pytest.param(make_pod(0, **FAILED, terminating=True), None, False, id="deleted"),
        pytest.param(make_pod(0, **FAILED, disruption="EvictionByEvictionAPI"), None, False, id="drained"),
        pytest.param(make_pod(0, **FAILED, status_reason="Preempting"), None, False, id="preempted"),
        pytest.param(make_pod(0, **FAILED, status_reason="Terminated"), None, False, id="its node is shut down"),
        pytest.param(make_pod(0, **FAILED, node_ready=False), None, False, id="its node is lost"),
        *(
            pytest.param(make_pod(0, phase="Failed", status_reason=reason), None, counts, id=f"never ran: {reason}")
            for reason, counts in (
                ("UnexpectedAdmissionError", True),
                ("NodeAffinity", True),
                ("OutOfcpu", True),
                ("OutOfmemory", True),
                ("OutOfnvidia.com/gpu", True),
                ("Evicted", True),  # the kubelet's admission: its node is short of memory
                ("DeadlineExceeded", True),  # of a pod that still pulls its image
                ("", True),
                ("Preempting", False),
                ("NodeShutdown", False),
            )
        ),
        pytest.param(
            make_pod(0, phase="Failed", disruption="DeletionByPodGC"), None, False, id="never ran: its node is gone"
        ),
        pytest.param(make_pod(0, container_restarts=1, last_exit_code=255), None, False, id="its node restarts"),
        pytest.param(
            make_pod(0, phase="Succeeded", last_exit_code=0),
            make_session(0, told_outcome="Complete"),
            False,
            id="told to stop",
        ),
        pytest.param(
            make_pod(0, phase="Succeeded", last_exit_code=0),
            make_session(0, condition=make_condition(Phase.DONE)),
            False,
            id="its script has returned",
        ),
    ],
)
def test_which_count(pod: Pod, session: AgentSession | None, counts: bool) -> None:
    sessions = {} if session is None else {uid_of(0): session}
    seen = see_failures(Observation((pod,), sessions), remembered(), Clock(100.0, 1_800_000_000.0))
    assert seen.ended == ((pod,) if counts else ())
    again = see_failures(Observation((pod,), sessions), after(seen), Clock(101.0, 1_800_000_001.0))
    assert again.ended == (), "once"


def test_released_pod_does_not_count() -> None:
    pod = make_pod(0, phase="Succeeded", last_exit_code=0)
    memory = remembered()
    seen = see_failures(Observation((pod,)), memory, Clock(100.0, 1_800_000_000.0), released={pod.uid})
    assert seen.ended == ()
