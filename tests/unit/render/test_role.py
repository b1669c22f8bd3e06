"""The pod of a role."""

from __future__ import annotations

import json
from typing import Any

import pytest

from regroup_operator.api import Job
from regroup_operator.api.job import role_digest
from regroup_operator.kube.pods import slim_pod
from regroup_operator.render.objects import service
from regroup_operator.render.role import role_pod
from tests.builders.jobs import role
from tests.builders.plan import make_job


def job_of(**spec: Any) -> Job:
    one = role("ps", **spec)
    one["template"]["metadata"] = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    return make_job().with_spec(roles=[one | {"replicas": 2}]).build()


def test_pod_is_the_template_with_a_name_an_address_and_three_variables() -> None:
    pod = role_pod(job_of(), "ps", 1, 3)
    meta, spec = pod["metadata"], pod["spec"]
    assert meta["name"] == "digits-ps-1-3"
    assert meta["ownerReferences"][0]["kind"] == "DistributedTrainingJob"
    assert meta["labels"] | {
        "regroup.dev/job-name": "digits", "regroup.dev/role": "ps", "regroup.dev/slot": "1", "regroup.dev/attempt": "3",
        "app.kubernetes.io/component": "ps", "team": "a",
    } == meta["labels"]  # fmt: skip
    assert (meta["annotations"]["note"], spec["hostname"], spec["subdomain"]) == ("b", "digits-ps-1", "digits")
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("OnFailure", False)
    assert spec["containers"][0]["env"] == [
        {"name": "REGROUP_JOB_NAME", "value": "digits"},
        {"name": "REGROUP_ROLE", "value": "ps"},
        {"name": "REGROUP_ROLE_INDEX", "value": "1"},
    ]
    assert "initContainers" not in spec
    assert "volumes" not in spec


def test_pod_of_a_role_has_no_name_in_the_dns_where_the_job_wants_none() -> None:
    job = make_job().with_spec(roles=[role("ps")], network={"podNames": False}).build()
    assert role_pod(job, "ps", 0, 0)["spec"].keys() & {"hostname", "subdomain"} == set()
    named = make_job().with_spec(roles=[role("ps")]).build()
    assert role_digest(job, "ps") != role_digest(named, "ps"), "it is made anew before the start"


@pytest.mark.parametrize(
    ("framework", "name", "want"),
    [
        pytest.param("TensorFlow", "evaluator", {"cluster": {}, "task": {"type": "evaluator", "index": 1}}, id="evaluator"),
        pytest.param("TensorFlow", "board", None, id="another role has no task"),
        pytest.param("PyTorch", "evaluator", None, id="another framework has no tasks"),
    ],
)  # fmt: skip
def test_evaluator_of_tensorflow_has_its_task(framework: str, name: str, want: dict[str, Any] | None) -> None:
    job = make_job().with_spec(framework=framework, roles=[role(name)]).build()
    env = {entry["name"]: entry["value"] for entry in role_pod(job, name, 1, 0)["spec"]["containers"][0]["env"]}
    assert json.loads(env.get("TF_CONFIG", "null")) == want


def test_what_the_user_says_stays() -> None:
    job = job_of(restartPolicy="Never", hostname="mine", automountServiceAccountToken=True)
    spec = role_pod(job, "ps", 0, 0)["spec"]
    assert (spec["restartPolicy"], spec["hostname"], spec["automountServiceAccountToken"]) == ("Never", "mine", True)
    assert role_pod(job, "ps", 0, 0)["spec"]["containers"][0]["env"] == spec["containers"][0]["env"]  # nothing piles up


def test_service_gives_names_to_the_pods_of_roles_where_there_are_some() -> None:
    with_roles, without = service(job_of()), service(make_job().build())
    assert with_roles is not None
    assert without is not None
    assert with_roles["spec"]["selector"] == {"regroup.dev/job-name": "digits"}
    assert without["spec"]["selector"] == {"regroup.dev/job-name": "digits", "regroup.dev/role": "worker"}


def running(**state: Any) -> dict[str, Any]:
    return {"name": "main", "restartCount": 0, "state": state}


@pytest.mark.parametrize(
    ("statuses", "runs", "code"),
    [
        pytest.param([running(running={})], True, None, id="it runs"),
        pytest.param([], False, None, id="not yet"),
        pytest.param([running(terminated={"exitCode": 3})], False, 3, id="it has ended"),
        pytest.param([running(running={}), running(terminated={"exitCode": 3})], False, 3, id="one of two has ended"),
    ],
)
def test_record_of_a_roles_pod(statuses: list[Any], runs: bool, code: int | None) -> None:
    item = role_pod(job_of(), "ps", 1, 3)
    item["metadata"] |= {"namespace": "default", "uid": "u"}
    got = slim_pod(item | {"status": {"phase": "Running", "containerStatuses": statuses}}, None, 5.0)
    assert got is not None
    assert (got.role, got.slot, got.attempt, got.name) == ("ps", 1, 3, "digits-ps-1-3")
    assert (got.running_since_s, got.last_exit_code) == (5.0 if runs else None, code)
