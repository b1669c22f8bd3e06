"""The resource on a real API server: good jobs pass, each mistake gets its one sentence and changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import Api
from tests.builders.jobs import (
    BAD_CHANGES,
    BAD_FROM_THE_BEGINNING,
    BAD_SPECS,
    GOOD_CHANGES,
    Change,
    Manifest,
    make_job,
    trainer,
    with_spec,
    with_trainer,
    without_policy,
)

STARTED = {"startTime": "2026-01-01T00:00:00Z", "replicas": 3, "selector": "regroup.dev/job-name=digits"}


def job_in(namespace: str, *changes: Change, name: str = "digits") -> Manifest:
    job = make_job(name)
    job["metadata"]["namespace"] = namespace
    for change in changes:
        change(job)
    return job


def create(api: Api, job: Manifest) -> None:
    api.done("create", "--filename=-", document=job)


def write_status(api: Api, namespace: str, status: dict[str, Any]) -> None:
    api.done(
        "patch", "trainingjob", "digits", f"--namespace={namespace}", "--subresource=status", "--type=merge",
        f"--patch={_json({'status': status})}",
    )  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value)


def test_good_job_gets_the_defaults_of_the_design(api: Api, namespace: str) -> None:
    create(api, job_in(namespace, with_spec(checkpoint={"volumeClaim": "ckpt"})))
    spec = api.get("dtj", "digits", f"--namespace={namespace}")["spec"]
    assert spec["recovery"] == {
        "maxRestarts": 10,
        "windowSeconds": 3600,
        "disconnectSeconds": 5,
        "rejoinSeconds": 0,
        "spares": 0,
    }
    assert spec["checkpoint"] == {"volumeClaim": "ckpt", "everySeconds": 300, "keep": 3}
    assert "processesPerWorker" not in spec


@pytest.mark.parametrize("checkpoint", ["step-7.g1-ab", "/regroup/checkpoint/step-1008.g3-5f0c1a2b"])
def test_job_that_begins_with_a_checkpoint_keeps_its_name_as_it_was_written(
    api: Api, namespace: str, checkpoint: str
) -> None:
    create(api, job_in(namespace, with_spec(checkpoint={"volumeClaim": "ckpt", "resumeFrom": checkpoint})))
    assert api.get("dtj", "digits", f"--namespace={namespace}")["spec"]["checkpoint"]["resumeFrom"] == checkpoint
    write_status(api, namespace, {"resumedFrom": {"path": checkpoint, "step": 7, "digest": "5f0c" * 16}})
    said = api.get("dtj", "digits", f"--namespace={namespace}")["status"]["resumedFrom"]
    assert said == {"path": checkpoint, "step": 7, "digest": "5f0c" * 16}


def test_pod_fields_that_we_do_not_know_are_kept(api: Api, namespace: str) -> None:
    resources = {"limits": {"nvidia.com/gpu": 8}}
    create(api, job_in(namespace, with_trainer(resources=resources, env=[{"name": "REGROUP_PRELOAD", "value": ""}])))
    stored = api.get("trainingjobs", "digits", f"--namespace={namespace}")
    assert trainer(stored)["resources"] == resources
    assert trainer(stored)["env"] == [{"name": "REGROUP_PRELOAD", "value": ""}]


@pytest.mark.parametrize(("change", "sentence"), BAD_SPECS.values(), ids=BAD_SPECS.keys())
def test_bad_spec_is_refused_with_its_sentence(api: Api, namespace: str, change: Change, sentence: str) -> None:
    assert sentence in api.refused("create", "--filename=-", document=job_in(namespace, change))
    assert api.get("dtj", f"--namespace={namespace}")["items"] == []


@pytest.mark.parametrize("verb", [["create"], ["apply"], ["apply", "--server-side"]], ids=" ".join)
@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param(with_spec(replicaz=3), "spec.replicaz", id="in spec"),
        pytest.param(
            lambda job: job["spec"]["elasticPolicy"].update(minReplica=1), "minReplica", id="in elasticPolicy"
        ),
        pytest.param(lambda job: job["spec"]["template"].update(specs={}), "specs", id="in template"),
    ],
)
def test_unknown_field_is_refused(api: Api, namespace: str, verb: list[str], change: Change, field: str) -> None:
    said = api.refused(*verb, "--filename=-", document=job_in(namespace, change))
    assert field in said
    assert "unknown field" in said or "field not declared in schema" in said
    assert api.get("dtj", f"--namespace={namespace}")["items"] == []


def test_no_workers_and_wrong_types_are_refused_by_field(api: Api, namespace: str) -> None:
    none = api.refused("create", "--filename=-", document=job_in(namespace, with_spec(replicas=0)))
    assert "spec.replicas" in none
    assert "greater than or equal to 1" in none
    text = api.refused("create", "--filename=-", document=job_in(namespace, with_trainer(command="python train.py")))
    assert 'command: Invalid value: "string"' in text


def test_scale_outside_the_bounds_is_refused_and_inside_taken(api: Api, namespace: str) -> None:
    create(api, job_in(namespace))
    write_status(api, namespace, STARTED)
    scale = ["scale", "dtj", "digits", f"--namespace={namespace}"]
    assert "spec.replicas (6) is outside spec.elasticPolicy (2 to 5)." in api.refused(*scale, "--replicas=6")
    assert "spec.replicas (1) is outside spec.elasticPolicy (2 to 5)." in api.refused(*scale, "--replicas=1")
    api.done(*scale, "--replicas=5")
    found = api.get("dtj", "digits", f"--namespace={namespace}", "--subresource=scale")
    assert found["spec"]["replicas"] == 5
    assert found["status"] == {"replicas": 3, "selector": "regroup.dev/job-name=digits"}


def replace(api: Api, namespace: str, change: Change) -> tuple[list[str], Manifest]:
    """Return the request that changes the stored job."""
    job = api.get("dtj", "digits", f"--namespace={namespace}")
    change(job)
    return ["replace", "--filename=-"], job


@pytest.mark.parametrize(("before", "change", "sentence"), BAD_CHANGES.values(), ids=BAD_CHANGES.keys())
def test_started_job_keeps_what_is_immutable(
    api: Api, namespace: str, before: Change, change: Change, sentence: str
) -> None:
    create(api, job_in(namespace, before))
    write_status(api, namespace, STARTED)
    request, job = replace(api, namespace, change)
    assert sentence in api.refused(*request, document=job)


@pytest.mark.parametrize(("before", "change"), [rule[:2] for rule in BAD_CHANGES.values()], ids=BAD_CHANGES.keys())
def test_job_may_be_changed_freely_before_it_starts(api: Api, namespace: str, before: Change, change: Change) -> None:
    create(api, job_in(namespace, before))
    request, job = replace(api, namespace, change)
    api.done(*request, document=job)


@pytest.mark.parametrize(
    ("before", "change", "sentence"), BAD_FROM_THE_BEGINNING.values(), ids=BAD_FROM_THE_BEGINNING.keys()
)
def test_job_keeps_what_never_changes(api: Api, namespace: str, before: Change, change: Change, sentence: str) -> None:
    create(api, job_in(namespace, before))
    request, job = replace(api, namespace, change)
    assert sentence in api.refused(*request, document=job)


@pytest.mark.parametrize("change", GOOD_CHANGES.values(), ids=GOOD_CHANGES.keys())
def test_started_job_may_change_in_these(api: Api, namespace: str, change: Change) -> None:
    create(api, job_in(namespace))
    write_status(api, namespace, STARTED)
    request, job = replace(api, namespace, change)
    api.done(*request, document=job)


def test_started_job_of_fixed_size_cannot_be_scaled(api: Api, namespace: str) -> None:
    create(api, job_in(namespace, without_policy))
    write_status(api, namespace, STARTED)
    said = api.refused("scale", "dtj", "digits", f"--namespace={namespace}", "--replicas=4")
    assert BAD_CHANGES["replicas of a job of fixed size"][2] in said


def test_kubectl_explains_every_level(api: Api) -> None:
    said = api.done("explain", "dtj.spec.recovery.rejoinSeconds")
    assert "restart in place" in " ".join(said.split())
    assert "digits" not in said
    container = api.done("explain", "dtj.spec.template.spec.containers")
    assert {"image", "resources", "command", "env"} <= {line.split("\t")[0].strip() for line in container.splitlines()}


def test_category_lists_jobs(api: Api, namespace: str) -> None:
    create(api, job_in(namespace))
    assert "digits" in api.done("get", "training", f"--namespace={namespace}")
