"""Deadlines, suspension, and what is left of a job: spec.runPolicy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup.protocol.wire import Stop
from regroup_operator.api import JobStatus
from regroup_operator.api.spec import RunPolicy
from regroup_operator.model.plan import Clock, Crash, Failure, IgnoredRow, JobPlan, Verdict
from regroup_operator.plan.lifecycle.run_policy import Start, expiry_s, has_begun, overdue
from tests.builders.plan import JobBuilder, make_pod, make_session, make_status, uid_of
from tests.unit.plan.test_job import TRAINING, job, plan, told, trains

CREATED, STARTED, RESUMED = "2026-01-01T10:00:00Z", "2026-01-01T10:10:00Z", "2026-01-01T12:00:00Z"
TEN_S = 1767261600.0
"""10:00 that day, in seconds since the epoch."""
HOUR_S = 3600.0
AFTER_RESUMPTION = {
    "startTime": STARTED,
    "conditions": [{"type": "Suspended", "status": "False", "reason": "Resumed", "lastTransitionTime": RESUMED}],
}
IS_SUSPENDED = {
    "startTime": STARTED,
    "conditions": [{"type": "Suspended", "status": "True", "reason": "Suspended", "lastTransitionTime": CREATED}],
}


@pytest.mark.parametrize(
    ("policy", "status", "waits", "at", "reason", "in_s"),
    [
        pytest.param({}, {"startTime": STARTED}, True, 1e9, None, None, id="no deadline"),
        pytest.param({"active": 600}, {"startTime": STARTED}, False, 600.0, None, 600.0, id="from the start, not the creation"),
        pytest.param({"active": 600}, {"startTime": STARTED}, False, 1200.0, "DeadlineExceeded", 0.0, id="over"),
        pytest.param({"active": 600}, {}, True, 1200.0, None, None, id="not started: no deadline runs"),
        pytest.param({"active": 600}, AFTER_RESUMPTION, False, 2 * HOUR_S + 1, None, 599.0, id="begins anew with a resumption"),
        pytest.param({"active": 600}, IS_SUSPENDED, False, 5 * HOUR_S, None, 600.0, id="it is resumed now"),
        pytest.param(
            {"active": 600}, {**AFTER_RESUMPTION, "startTime": "2026-01-01T13:00:00Z"}, False, 3 * HOUR_S + 1, None, 599.0,
            id="resumed before the start",
        ),
        pytest.param({"start": 60}, {}, True, 59.0, None, 1.0, id="waits for its pods"),
        pytest.param({"start": 60}, {}, True, 60.0, "StartDeadlineExceeded", 0.0, id="for too long"),
        pytest.param({"start": 60}, {"startTime": STARTED}, False, 1e6, None, None, id="it has begun"),
        pytest.param({"start": 60}, AFTER_RESUMPTION, True, 2 * HOUR_S + 1, None, 59.0, id="it was resumed"),
        pytest.param({"start": 60}, IS_SUSPENDED, True, 5 * HOUR_S, None, 60.0, id="created suspended, resumed now"),
        pytest.param(
            {"start": 9000, "active": 60}, AFTER_RESUMPTION, True, 2 * HOUR_S + 60, "DeadlineExceeded", 0.0, id="the first of two"
        ),
    ],
)  # fmt: skip
def test_deadlines(
    policy: dict[str, int], status: dict[str, Any], waits: bool, at: float, reason: str | None, in_s: float | None
) -> None:
    given = RunPolicy(active_deadline_seconds=policy.get("active"), start_deadline_seconds=policy.get("start"))
    verdict, due_s = overdue(
        given, make_status(status), Clock(0.0, TEN_S + at), start=Start(CREATED, 1, 4) if waits else None
    )
    assert (verdict.reason if verdict else None, due_s) == (reason, in_s)
    if reason == "StartDeadlineExceeded":
        assert verdict is not None
        assert verdict.message.startswith("1 of the 4 workers")


@pytest.mark.parametrize(
    ("ready", "needed", "refusal", "says"),
    [
        (
            1,
            4,
            "",
            "1 of the 4 workers that the job needs were ready within spec.runPolicy.startDeadlineSeconds (60). Its pods",
        ),
        (1, 1, "", "1 worker was ready, and the job has not begun to train within"),
        (4, 4, "", "4 workers were ready, and the job has not begun to train within"),
        (0, 4, "Quota.", "The job could not begin within spec.runPolicy.startDeadlineSeconds (60): Quota."),
    ],
)
def test_words_of_a_missed_start(ready: int, needed: int, refusal: str, says: str) -> None:
    policy = RunPolicy(start_deadline_seconds=60)
    verdict, _ = overdue(policy, JobStatus(), Clock(0.0, TEN_S + 60), start=Start(CREATED, ready, needed, refusal))
    assert verdict is not None
    assert verdict.message.startswith(says)
    assert ("Its pods are given back." in verdict.message) == (not refusal)


GENERATION: dict[str, Any] = {"generation": 3, "adopted": False}
SUSPENDED_IN = GENERATION | {"suspended": True}
LINEAGE: list[Any] = [{"generation": 1, "startStep": 0}]


@pytest.mark.parametrize(
    ("status", "begun"),
    [
        pytest.param({}, False, id="no generation"),
        pytest.param({"membership": GENERATION}, False, id="announced, and nobody has adopted it"),
        pytest.param({"membership": GENERATION | {"adopted": True}}, True, id="adopted"),
        pytest.param({"membership": GENERATION, "lineage": LINEAGE}, True, id="an earlier one was"),
        pytest.param({"membership": SUSPENDED_IN, "lineage": LINEAGE}, False, id="suspended in it"),
        pytest.param(
            {"membership": GENERATION | {"resumedIn": 2}, "lineage": LINEAGE},
            False,
            id="resumed since",
        ),
        pytest.param(
            {
                "membership": GENERATION | {"resumedIn": 2},
                "lineage": [*LINEAGE, {"generation": 2, "startStep": 9}],
            },
            True,
            id="resumed, and it has trained since",
        ),
    ],
)
def test_whether_a_job_has_begun(status: dict[str, Any], begun: bool) -> None:
    assert has_begun(make_status(status)) == begun


@pytest.mark.parametrize(
    ("ttl_s", "completed", "want"), [(None, CREATED, None), (60, None, None), (60, CREATED, 50.0), (0, CREATED, -10.0)]
)
def test_expiry(ttl_s: int | None, completed: str | None, want: float | None) -> None:
    assert expiry_s(RunPolicy(ttl_seconds_after_finished=ttl_s), completed, Clock(0.0, TEN_S + 10.0)) == want


def with_policy(status: dict[str, Any] | None = None, **policy: Any) -> JobBuilder:
    return job(status).with_spec(runPolicy=policy)


def condition(got: JobPlan, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in got.written["conditions"] if c["type"] == kind)
    return found


def test_suspending_job_tells_its_workers_to_stop_and_deletes_what_has_ended() -> None:
    first = plan(with_policy(TRAINING, suspend=True))
    assert (sorted(told(first, Stop)), first.create, first.delete) == ([uid_of(0), uid_of(1)], (), ())
    assert [t.body.outcome for t in first.tell if isinstance(t.body, Stop)] == ["Suspended"] * 2
    assert (first.written["phase"], condition(first, "Suspended")["status"]) == ("Suspending", "False")
    ended = (make_pod(0, phase="Succeeded"), make_pod(1))
    told_already = trains(1, told_outcome="Suspended")
    again = plan(with_policy(first.written, suspend=True), pods=ended, sessions=(told_already,), memory=first.memory)
    assert ([pod.uid for pod in again.delete], told(again, Stop)) == ([uid_of(0)], [])
    done = plan(with_policy(again.written, suspend=True), pods=(), sessions=(), memory=again.memory)
    assert (done.written["phase"], done.create, condition(done, "Suspended")["status"]) == ("Suspended", (), "True")
    assert done.written["membership"]["suspended"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, ", and spec.checkpoint is not set: resumed, the job begins anew."),
        ({"checkpoint": {"volumeClaim": "saved"}}, ". Resumed, the job continues from its newest checkpoint."),
    ],
    ids=["no checkpoints", "checkpoints"],
)
def test_suspended_job_says_where_it_goes_on(spec: dict[str, Any], words: str) -> None:
    first = plan(with_policy(TRAINING, suspend=True).with_spec(**spec))
    done = plan(with_policy(first.written, suspend=True).with_spec(**spec), pods=(), sessions=(), memory=first.memory)
    assert condition(done, "Suspended")["message"] == f"No pod is left{words}"


def test_suspension_that_waits_for_a_node_says_so() -> None:
    pods = (make_pod(0, node_ready=False, terminating=True),)
    got = plan(with_policy(TRAINING, suspend=True), pods=pods, sessions=())
    assert got.written["phase"] == "Suspending"
    assert "node is not ready (digits-worker-0-0)" in condition(got, "Suspended")["message"]


def test_job_that_has_told_its_workers_to_stop_is_suspended_even_if_that_is_taken_back() -> None:
    first = plan(with_policy(TRAINING, suspend=True))
    back = plan(with_policy(first.written), memory=first.memory)
    assert (back.written["phase"], back.create) == ("Suspending", ())
    once = plan(with_policy(back.written), pods=(), sessions=(), memory=back.memory)
    assert (once.written["phase"], once.written["membership"]["suspended"], once.create) == ("Suspended", True, ())
    assert once.due_s is not None
    assert once.due_s < 101.0
    resumed = plan(with_policy(once.written), pods=(), sessions=(), memory=once.memory)
    assert [slot for slot, _, _ in resumed.create] == [0, 1]
    assert resumed.written["phase"] == "Starting"
    assert "restarts" not in resumed.written


def test_rows_of_failures_end_with_a_suspension() -> None:
    """One suspends a job to repair what stops it: the first failure after that is not the third one."""
    first = plan(with_policy(TRAINING, suspend=True))
    crash = Crash("train.py:5", ((0.0, 1), (2.0, 2)), Failure(2.0, "1", 1, "OSError: nfs"), count=2)
    memory = replace(first.memory, crash=crash, ignored=IgnoredRow(2, 1_800_000_000.0, "rule 1"))
    still = plan(with_policy(first.written, suspend=True), memory=memory)
    assert (still.memory.crash, still.memory.ignored) == (crash, memory.ignored)
    done = plan(with_policy(first.written, suspend=True), pods=(), sessions=(), memory=memory)
    resumed = plan(with_policy(done.written), pods=(), sessions=(), memory=done.memory)
    assert (resumed.memory.crash, resumed.memory.ignored) == (None, None)
    again = plan(
        with_policy(resumed.written),
        pods=(make_pod(0, 1), make_pod(1, 1)),
        sessions=(),
        memory=memory,
    )
    assert again.written["membership"]["suspended"], "no generation has begun since"
    assert (again.memory.crash, again.memory.ignored) == (crash, memory.ignored), "a row of its own"


def test_resumed_job_starts_and_nothing_counts_as_a_restart() -> None:
    first = plan(with_policy(TRAINING, suspend=True))
    done = plan(with_policy(first.written, suspend=True), pods=(), sessions=(), memory=first.memory)
    made = plan(with_policy(done.written), pods=(), sessions=(), memory=done.memory)
    assert made.create == ((0, 1, ()), (1, 1, ()))
    assert (made.written["phase"], condition(made, "Suspended")["reason"]) == ("Starting", "Resumed")
    pods = (make_pod(0, 1), make_pod(1, 1))
    ready = tuple(make_session(slot, Phase.READY, 0, attempt=1, adopted_to=0, entered=0) for slot in range(2))
    issued = plan(with_policy(made.written), pods=pods, sessions=ready, memory=made.memory)
    membership = issued.written["membership"]
    assert (membership["generation"], membership["members"], membership.get("suspended")) == (2, "0.1,1.1", None)
    assert membership["resumedIn"] == 2
    assert (issued.written["incidents"][-1]["cause"], issued.written["phase"]) == ("Resumed", "Starting")
    assert issued.written.get("restarts", {}).get("total", 0) == 0
    assert [note.kind for note in issued.notes if note.reason == "Resumed"] == ["Normal"]


@pytest.mark.parametrize("policy", [{"activeDeadlineSeconds": 300}, {"startDeadlineSeconds": 60}])
@pytest.mark.parametrize("status", [{**TRAINING, "startTime": CREATED}, None], ids=["trained", "created suspended"])
def test_deadlines_begin_anew_with_each_resumption(policy: dict[str, int], status: dict[str, Any] | None) -> None:
    memory, at_s = None, 100.0
    for _ in range(2):
        for suspended in (True, True, False):
            builder = with_policy(status, suspend=suspended, **policy).with_created(CREATED)
            clock = Clock(at_s, TEN_S + at_s)
            got = plan(builder, pods=(), sessions=(), memory=memory, clock=clock)
            memory, status, at_s = got.memory, got.written, at_s + 2 * HOUR_S
        assert (got.written["phase"], len(got.create)) == ("Starting" if "startTime" in got.written else "Pending", 2)
        if "startTime" in got.written or "startDeadlineSeconds" in policy:
            assert got.due_s is not None
            assert got.due_s <= clock.now_s + next(iter(policy.values()))
        at_s = clock.now_s + 20.0


def test_job_that_is_refused_misses_its_start() -> None:
    refusal = Verdict("CreateFailed", "exceeded quota: no-services. Raise the quota.")
    builder = with_policy(None, startDeadlineSeconds=60).with_created(CREATED)
    waits = plan(builder, pods=(), sessions=(), refusal=refusal, clock=Clock(10.0, TEN_S + 10.0))
    assert (waits.written["phase"], waits.due_s) == ("Pending", 60.0)
    got = plan(builder, pods=(), sessions=(), refusal=refusal, clock=Clock(60.0, TEN_S + 60.0))
    assert (got.written["phase"], condition(got, "Failed")["reason"]) == ("Failed", "StartDeadlineExceeded")
    assert "exceeded quota" in condition(got, "Failed")["message"]
    assert condition(got, "Accepted")["status"] == "False"


@pytest.mark.parametrize("status", [None, TRAINING], ids=["created suspended", "suspended later"])
def test_suspended_job_that_could_not_run_says_so(status: dict[str, Any] | None) -> None:
    refusal = Verdict("InvalidTemplate", "spec.template is refused.")
    got = plan(with_policy(status, suspend=True), pods=(), sessions=(), refusal=refusal)
    assert (got.written["phase"], condition(got, "Accepted")["reason"]) == ("Suspended", "InvalidTemplate")
    again = plan(with_policy(got.written, suspend=True), pods=(), sessions=())
    assert condition(again, "Accepted")["status"] == "True"


def test_process_that_fails_while_it_is_told_to_stop_fails_nothing() -> None:
    first = plan(with_policy(TRAINING, suspend=True).with_recovery(maxRestarts=0))
    crashed = (make_pod(0, phase="Failed", last_exit_code=1), make_pod(1))
    got = plan(
        with_policy(first.written, suspend=True).with_recovery(maxRestarts=0),
        pods=crashed,
        sessions=(trains(1),),
        memory=first.memory,
    )
    assert got.written["phase"] == "Suspending"


def test_job_may_be_created_suspended() -> None:
    got = plan(with_policy(None, suspend=True), pods=(), sessions=())
    assert (got.written["phase"], got.create, got.written["summary"]["state"]) == ("Suspended", (), "Suspended")
    assert "has not begun" in condition(got, "Suspended")["message"]


ENDED = TRAINING | {
    "conditions": [
        {"type": "Complete", "status": "True", "reason": "Finished", "message": "All.", "lastTransitionTime": CREATED}
    ],
    "completionTime": CREATED,
}


@pytest.mark.parametrize(("policy", "deleted"), [("None", []), ("Running", []), ("All", [uid_of(0)])])
def test_pods_after_the_end(policy: str, deleted: list[str]) -> None:
    pods = (make_pod(0, phase="Succeeded"), make_pod(1))
    got = plan(with_policy(ENDED, cleanPodPolicy=policy), pods=pods)
    assert [pod.uid for pod in got.delete] == deleted


def test_job_that_has_ended_expires() -> None:
    builder = with_policy(ENDED, ttlSecondsAfterFinished=60)
    early = plan(builder, clock=Clock(100.0, TEN_S + 10.0))
    assert not early.expired
    assert early.due_s is not None
    assert early.due_s <= 150.0
    assert plan(builder, clock=Clock(100.0, TEN_S + 60.0)).expired


def test_end_has_a_time() -> None:
    failed = plan(
        with_policy(TRAINING | {"startTime": CREATED}, activeDeadlineSeconds=5), clock=Clock(100.0, TEN_S + 5.0)
    )
    assert (failed.written["phase"], failed.written["completionTime"]) == ("Failed", CREATED.replace("00Z", "05Z"))
    assert condition(failed, "Failed")["reason"] == "DeadlineExceeded"


def test_job_that_a_deadline_fails_says_once_how_another_one_continues() -> None:
    """Before, it advised to submit the job again, which began at step 0 without a word."""
    checkpoint = {
        "generation": 3,
        "step": 1008,
        "directory": "step-1008.g3-ab",
        "at": CREATED,
        "kept": ["step-1008.g3-ab"],
    }
    builder = with_policy(TRAINING | {"startTime": CREATED, "checkpoint": checkpoint}, activeDeadlineSeconds=5)
    clock = Clock(100.0, TEN_S + 5.0)
    failed = plan(builder, clock=clock)
    said = condition(failed, "Failed")["message"]
    assert said.endswith(
        "Raise it and submit the job again. A new job continues after step 1008 with spec.checkpoint.resumeFrom: "
        "step-1008.g3-ab; without it, it begins at step 0."
    )
    again = plan(with_policy(failed.written, activeDeadlineSeconds=5), clock=clock)
    assert condition(again, "Failed")["message"] == said
