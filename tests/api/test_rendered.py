"""What render/ makes, on a real API server: every field known, and Pod Security "restricted" is kept."""

from __future__ import annotations

import json

import pytest

from harness.polling import until
from regroup_operator.api import parse_job
from regroup_operator.render import RenderSettings, config_map, dry_run_pod, service, worker_pod
from tests.api.conftest import Api
from tests.builders.jobs import Change, Manifest, make_job, trainer, with_pod, with_spec, with_trainer

SETTINGS = RenderSettings(
    operator_url="https://regroup.regroup-system.svc:8443",
    agent_image="example/operator:1",
    agent_image_pull_secrets=("agent-pull",),
)
RESTRICTED_POD = with_pod(securityContext={"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}})
RESTRICTED_CONTAINER = with_trainer(
    securityContext={"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
)
STRICT = ["create", "--validate=strict", "--filename=-"]


def stored(api: Api, namespace: str, *changes: Change) -> Manifest:
    manifest = make_job()
    manifest["metadata"]["namespace"] = namespace
    for change in changes:
        change(manifest)
    api.done("create", "--filename=-", document=manifest)
    return api.get("dtj", "digits", f"--namespace={namespace}")


def restrict(api: Api, namespace: str) -> None:
    api.done("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")


def test_worker_of_a_restricted_template_is_taken_in_a_restricted_namespace(api: Api, namespace: str) -> None:
    restrict(api, namespace)
    everything = with_spec(
        checkpoint={"volumeClaim": "ckpt"}, memorySnapshot={"sizeLimit": "64Mi"}, processesPerWorker=2
    )
    job = parse_job(stored(api, namespace, RESTRICTED_POD, RESTRICTED_CONTAINER, everything))
    api.done(*STRICT, document=worker_pod(job, 2, 1, settings=SETTINGS, avoid_nodes=("n1", "n2")))
    api.done(*STRICT, document=service(job))
    api.done(*STRICT, document=config_map(job, "PEM"))
    owners = api.get("pod", "digits-worker-2-1", f"--namespace={namespace}")["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [job.uid]


def test_worker_of_an_unrestricted_template_is_refused_for_the_users_container_only(api: Api, namespace: str) -> None:
    restrict(api, namespace)
    job = parse_job(stored(api, namespace))
    said = api.refused(*STRICT, "--dry-run=server", document=dry_run_pod(job, settings=SETTINGS))
    assert "trainer" in said
    assert "regroup-agent" not in said


def test_typo_inside_the_template_is_found_by_the_dry_run(api: Api, namespace: str) -> None:
    job = parse_job(stored(api, namespace, lambda job: trainer(job).update(imagePullPolice="Never")))
    said = api.refused(*STRICT, "--dry-run=server", document=dry_run_pod(job, settings=SETTINGS))
    assert 'unknown field "spec.containers[0].imagePullPolice"' in said


@pytest.mark.parametrize(
    ("resources", "more"),
    [
        pytest.param(
            {"requests": {"cpu": "1", "memory": "200Mi"}, "limits": {"cpu": "2", "memory": "400Mi"}},
            {"requests": {"cpu": "1", "memory": "201Mi"}, "limits": {"cpu": "2", "memory": "400Mi"}},
            id="the trainer says what it needs",
        ),
        pytest.param(
            {}, {"requests": {"cpu": "1", "memory": "201Mi"}, "limits": {"cpu": "2", "memory": "400Mi"}}, id="defaults"
        ),
        pytest.param(
            {"limits": {"cpu": "1", "memory": "200Mi"}},
            {"limits": {"cpu": "1100m", "memory": "200Mi"}},
            id="limits alone",
        ),
    ],
)
def test_namespace_with_limits_and_a_quota_admits_a_worker_where_it_admits_the_users_own_pod(
    api: Api, namespace: str, resources: Manifest, more: Manifest
) -> None:
    limits = {
        "type": "Container",
        "min": {"memory": "100Mi"},
        "maxLimitRequestRatio": {"cpu": "2"},
        "defaultRequest": {"cpu": "1", "memory": "200Mi"},
        "default": {"cpu": "2", "memory": "400Mi"},
    }
    hard = {"requests.cpu": "1", "requests.memory": "200Mi", "limits.cpu": "2", "limits.memory": "400Mi"}
    for kind, name, spec in (("LimitRange", "sizes", {"limits": [limits]}), ("ResourceQuota", "all", {"hard": hard})):
        document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}
        api.done("create", "--filename=-", document=document)
    # Nothing here counts what is used.
    counted = json.dumps({"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}})
    api.done(
        "patch", "quota", "all", f"--namespace={namespace}", "--subresource=status", "--type=merge", f"-p={counted}"
    )

    def own(needs: Manifest) -> Manifest:
        """The pod as the user would make it without Regroup."""
        job = make_job()
        with_trainer(resources=needs)(job)
        metadata = {"name": "own", "namespace": namespace}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **job["spec"]["template"]}

    def refusal(needs: Manifest) -> str:
        return api.kubectl("create", "--dry-run=server", "--filename=-", document=own(needs)).error

    few = {"requests": {"cpu": "100m", "memory": "16Mi"}, "limits": {"cpu": "1", "memory": "64Mi"}}
    until(lambda: "minimum memory usage per Container is 100Mi" in refusal(few), "the limits are known")
    until(lambda: "exceeded quota" in refusal(more), "the quota is known")
    api.done(*STRICT, "--dry-run=server", document=own(resources))

    job = parse_job(stored(api, namespace, with_trainer(resources=resources)))
    api.done(*STRICT, "--dry-run=server", document=dry_run_pod(job, settings=SETTINGS))
    api.done(*STRICT, document=worker_pod(job, 0, 0, settings=SETTINGS))


def test_dry_run_leaves_nothing_behind(api: Api, namespace: str) -> None:
    job = parse_job(stored(api, namespace))
    api.done(*STRICT, "--dry-run=server", document=dry_run_pod(job, settings=SETTINGS))
    assert api.get("pods", f"--namespace={namespace}")["items"] == []
