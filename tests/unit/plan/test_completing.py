"""Between the workers' end and the job's: State Completing, while roles that are required for completion have not succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup.protocol.wire import Stop
from regroup_operator.api import parse_job
from regroup_operator.api.job import role_digest
from regroup_operator.model.plan import Clock, JobPlan, Urgency
from regroup_operator.model.records import AgentSession, Observation, Pod, Settings
from regroup_operator.plan.facts.facts import Inputs
from regroup_operator.plan.failures.restarts import KUBECTL_LOGS
from regroup_operator.plan.job import plan_job
from tests.builders.jobs import role
from tests.builders.plan import JobBuilder, make_job, make_pod, make_session, remembered
from tests.unit.plan.test_job import TRAINING, told

STARTED = 1_800_000_000.0
CLOCK = Clock(100.0, STARTED)
EVAL = role("eval") | {"requiredForCompletion": True}
WORKERS = (make_pod(0), make_pod(1))
ENDED = (make_pod(0, phase="Succeeded"), make_pod(1, phase="Succeeded"))
OF_TWO = {"generation": 1, "workers": 2, "step": 10, "members": "0-1", "done": "0-1", "at": "2027-01-15T08:00:00Z"}
AFTER: dict[str, Any] = TRAINING | {"finished": OF_TWO}


def job(*roles: dict[str, Any], status: dict[str, Any] = TRAINING, **policy: Any) -> JobBuilder:
    builder = make_job().with_replicas(2).elastic(1, 4).with_status(status)
    return builder.with_spec(roles=list(roles or (EVAL,)), runPolicy=policy)


def done(slot: int, phase: str = Phase.DONE, **changes: Any) -> AgentSession:
    """Return the session of a worker whose script has returned 0."""
    given: dict[str, Any] = {"told_tier": "Session", "told_generation": 1, "condition_at_s": 0.0, "step": 10}
    return make_session(slot, phase, 1, **given | changes)


def evaluator(builder: JobBuilder, **changes: Any) -> Pod:
    given: dict[str, Any] = {"role": "eval", "name": "digits-eval-0-0", "uid": "eval", "running_since_s": 90.0}
    return make_pod(0, **given | {"spec_digest": role_digest(builder.build(), "eval")} | changes)


def plan(
    builder: JobBuilder,
    *roles: Pod,
    workers: Sequence[Pod] = WORKERS,
    sessions: Sequence[AgentSession] | None = None,
    clock: Clock = CLOCK,
) -> JobPlan:
    given = (done(0), done(1)) if sessions is None else sessions
    there = {pod.uid for pod in workers}
    obs = Observation(tuple(workers), {s.pod_uid: s for s in given if s.pod_uid in there}, 0.0, roles=roles)
    memory = remembered()
    return plan_job(
        Inputs(
            builder.build(), obs, memory, clock, Settings(), fresh_uid="fresh", endpoint="e", agent_image="a:1", logs=KUBECTL_LOGS
        )
    )  # fmt: skip


def condition(got: JobPlan, kind: str) -> dict[str, Any]:
    return next((c for c in got.written["conditions"] if c["type"] == kind), {})


def test_job_waits_for_a_role_and_gives_its_workers_back() -> None:
    builder = job()
    got = plan(builder, evaluator(builder))
    assert got.written["phase"] == "Completing"
    assert (got.written["summary"]["state"], got.written["summary"]["ready"]) == ("Completing", "")
    assert got.written["finished"] == OF_TWO | {"at": CLOCK.timestamp()}
    assert got.urgency == Urgency.NOW, "it is written before the agents are told to stop"
    assert [t.body.outcome for t in got.tell if isinstance(t.body, Stop)] == ["Complete", "Complete"]
    assert (got.create, got.create_roles, got.delete) == ((), (), ())
    said = condition(got, "Complete")
    assert (said["status"], said["reason"], said["message"]) == (
        "False",
        "WaitingForRoles",
        "The script has returned in all 2 workers of generation 1. The job waits for role eval (0 of 1 pods have succeeded).",
    )
    assert [(n.kind, n.reason) for n in got.notes] == [("Normal", "Completing")]
    assert "completionTime" not in got.written
    later = plan(job(status=got.written), evaluator(builder), workers=ENDED, sessions=())
    assert (later.notes, later.create, later.written["finished"]) == ((), (), got.written["finished"])
    assert (later.written["phase"], later.written["replicas"], later.written["readyReplicas"]) == ("Completing", 0, 0)


def test_role_that_has_succeeded_before_the_workers_is_not_waited_for() -> None:
    builder = job()
    got = plan(builder, evaluator(builder, phase="Succeeded"))
    assert (got.written["phase"], got.written["finished"]["done"]) == ("Succeeded", "0-1")
    assert condition(got, "Complete")["message"] == (
        "The script has returned in all 2 workers of generation 1, and all pods of role eval have succeeded."
    )


def test_workers_that_have_not_finished_are_waited_for_whatever_the_role_did() -> None:
    builder = job()
    trains = make_session(1, Phase.TRAINING, 1, told_tier="Session", told_generation=1)
    got = plan(builder, evaluator(builder, phase="Succeeded"), sessions=(done(0, Phase.FINISHED), trains))
    assert (got.written["phase"], told(got, Stop)) == ("Running", [])


@pytest.mark.parametrize("workers", [ENDED, (), WORKERS], ids=["ended", "gone", "still there"])
def test_job_is_complete_once_the_role_has_succeeded(workers: tuple[Pod, ...]) -> None:
    """Another operator, which never saw the workers finish."""
    builder = job(status=AFTER)
    got = plan(builder, evaluator(builder, phase="Succeeded"), workers=workers, sessions=())
    assert (got.written["phase"], got.written["completionTime"]) == ("Succeeded", CLOCK.timestamp())
    assert condition(got, "Complete")["message"].startswith(
        "The script has returned in all 2 workers of generation 1, and"
    )
    assert [n.reason for n in got.notes] == ["Succeeded"]


@pytest.mark.parametrize("workers", [ENDED, ()], ids=["ended", "gone"])
def test_no_worker_starts_again(workers: tuple[Pod, ...]) -> None:
    """Nor does a change of size matter."""
    builder = job(status=AFTER).with_replicas(4)
    got = plan(builder, evaluator(builder), workers=workers, sessions=())
    assert (got.written["phase"], got.create, got.written["membership"]["generation"]) == ("Completing", (), 1)


def test_worker_that_does_not_end_is_deleted() -> None:
    builder = job(status=AFTER)
    gone = done(0, connected=False, closed_at_s=80.0)
    early = plan(builder, evaluator(builder), workers=WORKERS[:1], sessions=(gone,), clock=Clock(99.0, STARTED))
    assert (early.delete, early.due_s) == ((), 100.0)
    late = plan(builder, evaluator(builder), workers=WORKERS[:1], sessions=(gone,))
    assert [pod.uid for pod in late.delete] == [WORKERS[0].uid]


@pytest.mark.parametrize(
    ("policy", "changes", "phase", "created"),
    [
        pytest.param("OnFailure", {"last_exit_code": 1}, "Completing", [("eval", 0, 1)], id="it is replaced"),
        pytest.param("Never", {"last_exit_code": 1}, "Failed", [], id="it fails the job"),
        pytest.param("Never", {"last_exit_code": None, "status_reason": "Evicted"}, "Completing", [("eval", 0, 1)], id="evicted"),
    ],
)  # fmt: skip
def test_role_that_fails_then(policy: str, changes: dict[str, Any], phase: str, created: list[Any]) -> None:
    builder = job(role("eval", restartPolicy=policy) | {"requiredForCompletion": True}, status=AFTER)
    got = plan(builder, evaluator(builder, phase="Failed", running_since_s=None, **changes), workers=ENDED, sessions=())
    assert (got.written["phase"], list(got.create_roles)) == (phase, created)
    if phase == "Failed":
        assert condition(got, "Failed")["reason"] == "RoleFailed"


def test_failed_job_does_not_say_that_it_waits() -> None:
    waiting = plan(job(), evaluator(job()))
    never = role("eval", restartPolicy="Never") | {"requiredForCompletion": True}
    builder = job(never, status=waiting.written)
    got = plan(builder, evaluator(builder, phase="Failed", last_exit_code=3), workers=ENDED, sessions=())
    assert (condition(got, "Complete")["status"], condition(got, "Complete")["reason"]) == ("False", "Failed")
    again = plan(job(never, status=got.written), workers=ENDED, sessions=())
    assert (again.written["conditions"], again.notes) == (got.written["conditions"], ())


def test_container_that_fails_once_all_scripts_have_returned_fails_nothing() -> None:
    builder = job(status=AFTER).with_recovery(maxRestarts=0)
    crashed = (make_pod(0, phase="Failed", last_exit_code=1, container_restarts=1), ENDED[1])
    assert plan(builder, evaluator(builder), workers=crashed, sessions=()).written["phase"] == "Completing"


@pytest.mark.parametrize(
    ("policy", "at_s", "phase", "due_s"),
    [
        pytest.param({"activeDeadlineSeconds": 600}, 599.0, "Completing", 101.0, id="not over yet"),
        pytest.param({"activeDeadlineSeconds": 600}, 600.0, "Failed", None, id="over"),
        pytest.param({"startDeadlineSeconds": 1}, 9000.0, "Completing", None, id="the one for its start is met"),
    ],
)
def test_deadline_passes_while_it_waits(policy: dict[str, Any], at_s: float, phase: str, due_s: float | None) -> None:
    suspended = AFTER | {"membership": TRAINING["membership"] | {"suspended": True}}
    builder = job(status=suspended, **policy)
    got = plan(builder, evaluator(builder), workers=(), sessions=(), clock=Clock(100.0, STARTED + at_s))
    assert got.written["phase"] == phase
    if due_s is not None:
        assert got.due_s == due_s
    if phase == "Failed":
        assert condition(got, "Failed")["reason"] == "DeadlineExceeded"


def test_suspension_takes_the_roles_and_resumption_starts_no_worker() -> None:
    first = plan(job(status=AFTER, suspend=True), evaluator(job()), workers=ENDED, sessions=())
    assert first.written["phase"] == "Suspending"
    assert {pod.uid for pod in first.delete} == {"eval", *(p.uid for p in ENDED)}
    done = plan(job(status=first.written, suspend=True), workers=(), sessions=())
    assert (done.written["phase"], done.written["membership"].get("suspended")) == ("Suspended", None)
    assert "resumed, the job waits for its roles" in condition(done, "Suspended")["message"]
    resumed = plan(job(status=done.written), workers=(), sessions=())
    assert (resumed.written["phase"], resumed.create, resumed.create_roles) == ("Completing", (), (("eval", 0, 0),))
    assert condition(resumed, "Suspended")["reason"] == "Resumed"


def test_suspension_that_comes_with_the_last_script_s_end_remembers_that_all_have_returned() -> None:
    got = plan(job(suspend=True), evaluator(job()))
    assert (got.written["phase"], got.written["finished"]["done"]) == ("Suspending", "0-1")
    assert told(got, Stop) == [], "it is not in the status yet"
    kept = plan(job(status=got.written, suspend=True), evaluator(job()))
    assert {t.body.outcome for t in kept.tell if isinstance(t.body, Stop)} == {"Complete"}
    once = plan(job(status=got.written), workers=(), sessions=())
    assert once.written["phase"] == "Suspended", "who was told to stop is suspended, and resumed from there"
    assert plan(job(status=once.written), workers=(), sessions=()).written["phase"] == "Completing"


@pytest.mark.parametrize(("policy", "gone"), [("None", set()), ("All", {"eval", *(p.uid for p in ENDED)})])
def test_pods_after_the_end_and_not_before(policy: str, gone: set[str]) -> None:
    builder = job(status=AFTER, cleanPodPolicy=policy)
    waits = plan(builder, evaluator(builder), workers=ENDED, sessions=())
    assert waits.delete == ()
    ended = plan(builder, evaluator(builder, phase="Succeeded"), workers=ENDED, sessions=())
    assert {pod.uid for pod in ended.delete} == gone


def test_condition_says_why_the_awaited_pod_cannot_start() -> None:
    builder = job(status=AFTER)
    stuck = evaluator(
        builder, phase="Pending", running_since_s=None, waiting_reason="ErrImagePull", waiting_message="none such"
    )
    got = plan(builder, stuck, workers=(), sessions=())
    assert condition(got, "Complete")["message"].endswith("; digits-eval-0-0: ErrImagePull none such.")


def test_job_of_an_older_operator_has_no_such_role() -> None:
    raw = make_job().with_spec(roles=[role("eval")]).manifest()
    assert [r.required_for_completion for r in parse_job(raw).spec.roles] == [False]


def test_job_that_waits_or_has_ended_is_not_looked_at_every_second() -> None:
    """Its agents' last reports are old; nobody asks whether they are there."""
    builder = job(status=AFTER)
    stopped = (done(0, told_outcome="Complete"), done(1, told_outcome="Complete"))
    got = plan(builder, evaluator(builder, running_since_s=0.0), sessions=stopped, clock=Clock(5000.0, STARTED))
    assert got.due_s is not None
    assert got.due_s >= 5010.0


def test_pod_of_a_role_that_is_not_set_up_is_named_in_time() -> None:
    """The kubelet says nothing more of it: no event would have the job looked at again."""
    builder = job(status=AFTER)
    now_s = CLOCK.now_s
    pod = evaluator(builder, phase="Pending", running_since_s=None, unset_since_s=now_s - 59.5)
    waits = plan(builder, pod)
    assert waits.due_s == now_s + 0.5
    late = plan(builder, pod, clock=replace(CLOCK, now_s=now_s + 0.5))
    assert "its kubelet has not set the pod up for 60 s" in condition(late, "Complete")["message"]
