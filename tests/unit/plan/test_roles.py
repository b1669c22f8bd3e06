"""The pods of roles: one for each place, replaced when they fail, gone with the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from regroup_operator.api import Job
from regroup_operator.api.job import role_digest
from regroup_operator.api.status import RoleStatus
from regroup_operator.model.plan import Clock
from regroup_operator.model.pod_row import PodRow
from regroup_operator.model.records import Pod
from regroup_operator.plan.facts.roles import awaited, awaited_words, succeeded
from regroup_operator.plan.failures.roles import role_verdict
from regroup_operator.plan.pods.roles import RoleChanges, plan_roles
from tests.builders.jobs import role
from tests.builders.plan import make_job, make_pod

NOW_S = 1000.0
CLOCK = Clock(NOW_S, 1_800_000_000.0)


def job_of(*roles: dict[str, Any], started: bool = True) -> Job:
    job = make_job().with_replicas(2).with_spec(roles=list(roles) or [role("ps") | {"replicas": 2}])
    return (job.with_status({"startTime": "2026-01-01T00:00:00Z"}) if started else job).build()


JOB = job_of()


def pod(index: int = 0, attempt: int = 0, name: str = "ps", job: Job = JOB, **changes: Any) -> Pod:
    given: dict[str, Any] = {"role": name, "uid": f"{name}-{index}-{attempt}", "running_since_s": 990.0}
    given["spec_digest"] = role_digest(job, name) if any(r.name == name for r in job.spec.roles) else "other"
    return make_pod(index, attempt, **given | changes)


def failed(index: int = 0, attempt: int = 0, **changes: Any) -> Pod:
    return pod(index, attempt, phase="Failed", **{"running_since_s": None, "last_exit_code": 1} | changes)


def plan(*pods: Pod, known: Sequence[RoleStatus] | None = None, **given: Any) -> RoleChanges:
    """Plan a job whose status has these roles."""
    values: dict[str, Any] = {"job": JOB, "rows": {}, "active": True, "cleans": False, "clock": CLOCK}
    values |= given
    values["job"] = knowing(values["job"], known)
    return plan_roles(pods=pods, **values)


def message(changes: RoleChanges) -> str:
    """Return why a pod of the first role cannot start."""
    return (changes.status[0].message if changes.status else None) or ""


def knowing(job: Job, roles: Sequence[RoleStatus] | None) -> Job:
    return replace(job, status=job.status.with_fields(roles=roles))


def test_place_whose_template_was_corrected_before_the_start_begins_anew() -> None:
    job, rows = job_of(role("ps"), started=False), {"ps-0": PodRow(7, 6, 999.0)}
    former = failed(0, 6, job=job, spec_digest="of before")
    first = plan(former, job=job, rows=rows)
    assert ([p.uid for p in first.delete], first.create, first.rows) == ([former.uid], (), {})
    assert plan(job=job, rows=first.rows).create == (("ps", 0, 0),), "at once"
    also = plan(former, failed(0, 7, job=job), job=job, rows={})
    assert also.rows == {"ps-0": PodRow(1, 7, NOW_S)}, "the failures of before are not counted"


@pytest.mark.parametrize(
    ("pods", "create", "delete"),
    [
        pytest.param((), [("ps", 0, 0), ("ps", 1, 0)], [], id="at the start"),
        pytest.param((pod(0), pod(1)), [], [], id="all there"),
        pytest.param((pod(0), failed(1, 4)), [("ps", 1, 5)], [], id="the first failure is made good at once"),
        pytest.param((pod(0), pod(1, terminating=True)), [], [], id="never two of one place"),
        pytest.param((pod(0), pod(1, phase="Succeeded")), [], [], id="one that has succeeded"),
        pytest.param((pod(0), failed(1, 0), pod(1, 1)), [], ["ps-1-0"], id="the failed one before goes"),
        pytest.param((pod(0), pod(1), pod(2)), [], ["ps-2-0"], id="a place that is not wanted"),
        pytest.param((pod(0), pod(1), pod(0, name="old")), [], ["old-0-0"], id="a role that is not wanted"),
        pytest.param((pod(0, spec_digest="other"), pod(1)), [], [], id="a started job keeps its pods"),
    ],
)  # fmt: skip
def test_pods(pods: tuple[Pod, ...], create: list[Any], delete: list[str]) -> None:
    got = plan(*pods)
    assert list(got.create) == create
    assert [p.uid for p in got.delete] == delete


def test_before_the_start_a_pod_of_an_earlier_template_is_made_anew() -> None:
    job = job_of(started=False)
    got = plan(pod(0, spec_digest="other"), job=job)
    assert [p.uid for p in got.delete] == ["ps-0-0"]
    assert got.create == (("ps", 1, 0),)


def test_failed_pod_that_somebody_has_deleted_stays_in_the_row() -> None:
    """The next one has a new number: one of before would neither count nor end the row."""
    rows = {"ps-0": PodRow(3, 2, NOW_S - 60.0)}
    got = plan(job=job_of(role("ps")), rows=rows)
    assert got.create == (("ps", 0, 3),)
    got = plan(failed(0, 3), job=job_of(role("ps")), rows=got.rows)
    assert got.rows["ps-0"].count == 4


def test_pods_that_fail_in_a_row_come_later_and_later() -> None:
    rows: Any = {}
    for attempt, pause_s in enumerate([0, 10, 20, 40, 80, 160, 300, 300]):
        got = plan(failed(0, attempt), job=job_of(role("ps")), rows=rows)
        assert [note.note for note in got.notes] == [
            "The pod of role ps-0 has failed; it is replaced " + ("at once." if pause_s == 0 else f"after {pause_s} s.")
        ]
        assert got.due_s == (None if pause_s == 0 else NOW_S + pause_s)
        assert got.create == ((("ps", 0, attempt + 1),) if pause_s == 0 else ())
        rows = got.rows
        assert plan(failed(0, attempt), job=job_of(role("ps")), rows=rows).notes == ()


def test_pod_that_has_lasted_ends_the_row() -> None:
    row = {"ps-0": PodRow(3, 2, 900.0)}
    assert plan(pod(0, 3, running_since_s=941.0), pod(1), rows=row).due_s == 1001.0
    assert plan(pod(0, 3, running_since_s=940.0), pod(1), rows=row).rows == {}
    assert plan(pod(0, 2, running_since_s=10.0), pod(1), rows=row).rows == row  # an older one


def test_memory_keeps_only_places_that_are_wanted() -> None:
    assert plan(pod(0), pod(1), rows={"ps-7": PodRow(1, 0, 0.0)}).rows == {}


@pytest.mark.parametrize(("cleans", "delete"), [(False, ["ps-0-0"]), (True, ["ps-0-0", "ps-1-0"])])
def test_they_end_with_the_job(cleans: bool, delete: list[str]) -> None:
    got = plan(pod(0), failed(1), active=False, cleans=cleans)
    assert ([p.uid for p in got.delete], got.create) == (delete, ())


def test_what_has_succeeded_is_remembered_when_its_pod_is_gone() -> None:
    got = plan(pod(0), pod(1, phase="Succeeded"))
    assert got.status == [RoleStatus(name="ps", replicas=2, ready=1, succeeded=[1])]
    again = plan(pod(0), known=got.status)
    assert (again.create, again.status) == ((), got.status)


@pytest.mark.parametrize("phase", ["Succeeded", "Running"])
def test_pod_that_is_deleted_has_not_succeeded_whatever_it_ends_with(phase: str) -> None:
    """A server that ends well on SIGTERM, because somebody drains its node, runs again elsewhere."""
    ends = pod(0, phase=phase, terminating=True)
    got = plan(ends, pod(1))
    assert (got.create, got.status) == ((), [RoleStatus(name="ps", replicas=2, ready=1)])
    assert plan(pod(1), known=got.status).create == (("ps", 0, 0),)


def test_success_before_the_start_counts_only_while_its_pod_is_there() -> None:
    """Until then the template can be another one."""
    job = job_of(started=False)
    got = plan(pod(0, phase="Succeeded", job=job), pod(1, job=job), job=job)
    assert got.status is not None
    assert got.status[0].succeeded == [0]
    assert plan(pod(1, job=job), job=job, known=got.status).create == (("ps", 0, 0),)


@pytest.mark.parametrize(
    ("pods", "known", "left"),
    [
        pytest.param((), (), {"eval": 2}, id="none has succeeded"),
        pytest.param((pod(0, name="eval", phase="Succeeded"),), (), {"eval": 1}, id="one of two"),
        pytest.param((pod(0, name="eval", phase="Succeeded"),), [1], {"eval": 0}, id="the other one before"),
        pytest.param((pod(0, name="eval", phase="Succeeded", terminating=True),), (), {"eval": 2}, id="deleted"),
        pytest.param((pod(7, name="eval", phase="Succeeded"),), [9], {"eval": 2}, id="places that are not wanted"),
        pytest.param((pod(0, phase="Succeeded"),), (), {"eval": 2}, id="another role"),
    ],
)
def test_pods_that_the_job_waits_for(pods: tuple[Pod, ...], known: Any, left: dict[str, int]) -> None:
    job = job_of(role("eval") | {"replicas": 2, "requiredForCompletion": True}, role("ps"))
    said = [RoleStatus(name="eval", replicas=2, ready=0, succeeded=list(known))]
    assert awaited(job, succeeded(knowing(job, said), pods)) == left
    got = plan(*pods, job=job, known=said)
    assert [one.awaited for one in got.status or ()] == [left["eval"], None]


def test_words_for_the_roles_that_the_job_waits_for() -> None:
    required = {"requiredForCompletion": True}
    job = job_of(role("eval") | {"replicas": 2} | required, role("report") | required, role("ps"))
    assert awaited_words(job, {"eval": 1, "report": 0}) == "role eval (1 of 2 pods have succeeded)"
    assert awaited_words(job, {"eval": 2, "report": 1}).endswith(", role report (0 of 1 pods have succeeded)")


def test_status_says_why_a_pod_cannot_start() -> None:
    got = plan(
        pod(0, phase="Pending", running_since_s=None, waiting_reason="ErrImagePull", waiting_message="no such image")
    )
    assert got.status == [
        RoleStatus(name="ps", replicas=2, ready=0, message="digits-worker-0-0: ErrImagePull no such image")
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"unset_since_s": NOW_S - 60.0}, True, id="a Secret that is missing"),
        pytest.param({"unset_since_s": NOW_S - 59.0}, False, id="a volume that is being attached"),
        pytest.param({}, False, id="set up"),
        pytest.param({"unset_since_s": NOW_S - 60.0, "terminating": True}, False, id="it is being deleted"),
    ],
)
def test_status_says_that_a_pod_is_not_set_up(changes: dict[str, Any], says: bool) -> None:
    got = plan(pod(0), pod(1, phase="Pending", running_since_s=None, **changes))
    words = (
        "digits-worker-1-0: its kubelet has not set the pod up for 60 s (volumes, network, host name). See its events: "
        "kubectl describe pod --namespace=default digits-worker-1-0"
    )
    assert message(got) == (words if says else "")


def test_command_in_a_message_is_whole_whatever_the_names() -> None:
    stuck = pod(1, name="ps", phase="Pending", running_since_s=None, unset_since_s=0.0)
    got = plan(replace(stuck, name="p" * 63, namespace="n" * 63))
    assert message(got).endswith("p" * 63)


def test_status_says_that_a_place_waits_for_a_node_or_for_its_next_pod() -> None:
    job = job_of(role("ps"))
    for terminating in (True, False):
        got = plan(pod(0, job=job, node_ready=False, node="a", terminating=terminating), job=job)
        assert message(got) == (
            "digits-worker-0-0: its node a is not ready; bring the node back, or delete the pod by force if it is off"
        )
    got = plan(failed(0, 1), job=job, rows={"ps-0": PodRow(1, 0, 990.0)})
    assert (got.create, message(got)) == (
        (),
        "ps-0: its pod failed with exit code 1, 2 in a row; the next one is made at 2027-01-15T08:00:10Z",
    )
    gone = plan(job=job, rows={"ps-0": PodRow(2, 1, 995.0)})
    assert message(gone).startswith("ps-0: its pod failed, 2 in a row; the next one")
    refused = failed(0, 1, last_exit_code=None, status_reason="UnexpectedAdmissionError")
    got = plan(refused, job=job, rows={"ps-0": PodRow(1, 0, 990.0)})
    assert "failed (UnexpectedAdmissionError), 2 in a row" in message(got)


def test_job_without_roles_has_no_status_of_them() -> None:
    assert plan(job=make_job().with_replicas(2).build()) == RoleChanges({})


@pytest.mark.parametrize(
    ("policy", "changes", "fails"),
    [
        pytest.param("Never", {}, True, id="by itself"),
        pytest.param("OnFailure", {}, False, id="it is restarted"),
        pytest.param("Never", {"status_reason": "Evicted"}, False, id="evicted"),
        pytest.param("Never", {"terminating": True}, False, id="deleted"),
        pytest.param("Never", {"last_exit_code": None}, False, id="before it ran"),
        pytest.param(
            "Never",
            {"last_exit_code": 143, "status_reason": "Terminated", "disruption": "TerminationByKubelet"},
            False,
            id="its node was shut down",
        ),
        pytest.param("Never", {"last_exit_code": 255, "last_exit_reason": "Unknown"}, False, id="with its node"),
    ],
)
def test_role_that_fails_the_job(policy: str, changes: dict[str, Any], fails: bool) -> None:
    job = job_of(role("ps", restartPolicy=policy))
    verdict = role_verdict(job, [failed(0, **changes)])
    assert (verdict is not None) == fails
    if verdict is not None:
        assert (verdict.reason, "exit code 1" in verdict.message) == ("RoleFailed", True)
        assert verdict.pod == "digits-worker-0-0"
