"""The chart on a real API server: it is taken whole, the plain install is the same, and RBAC gives what is used only."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cluster import binaries
from harness.polling import until
from manifests import dashboards, render
from regroup_operator.api import parse_job
from regroup_operator.api.names import LABEL_JOB_NAME
from regroup_operator.render import RenderSettings, worker_pod
from regroup_operator.settings import load
from tests.api.conftest import ROOT, Api
from tests.builders.jobs import SWAPS, Change, make_job, stored_job

OPERATOR = f"--as=system:serviceaccount:{render.NAMESPACE}:regroup"


@pytest.fixture(scope="module")
def installed(api: Api) -> Api:
    """An API server with the plain install."""
    api.done("apply", "--server-side", "--force-conflicts", "--validate=strict", f"--filename={render.INSTALL}")
    return api


def test_plain_install_is_what_the_chart_renders() -> None:
    assert render.INSTALL.read_text() == render.install_manifest(), "run `python -m manifests.render`"


def test_chart_passes_helms_lint() -> None:
    done = subprocess.run(
        [str(binaries.ensure() / "helm"), "lint", "--strict", "helm/regroup"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_or_impossible_value_is_refused_by_its_name() -> None:
    done = subprocess.run(
        [str(binaries.ensure() / "helm"), "template", "helm/regroup", "--kube-version=1.36.3",
         "--set=replica=3,settings.firstWaitSecond=3"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "replica" in done.stderr
    assert "firstWaitSecond" in done.stderr


NEEDED = {
    "image", "image.repository", "agent", "agent.pullPolicy", "admissionPolicy", "networkPolicy", "networkPolicy.workers",
    "metrics", "metrics.perJob", "metrics.serviceMonitor", "metrics.rules", "metrics.dashboards",
    "logLevel",
}  # fmt: skip
"""Values without which there is no chart, or an operator that does not start."""


def test_value_that_is_null_is_refused_by_its_name_or_not_needed() -> None:
    """helm takes a null out of the values before it looks at their schema."""

    def names(values: dict[str, Any], at: str = "") -> Iterator[str]:
        for name, value in values.items():
            yield at + name
            if isinstance(value, dict):
                yield from names(value, f"{at}{name}.")

    refused = set()
    for name in names(yaml.safe_load((ROOT / "helm/regroup/values.yaml").read_text())):
        done = subprocess.run(
            [str(binaries.ensure() / "helm"), "template", "regroup", "helm/regroup", "--kube-version=1.36.3",
             f"--set={name}=null"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            (operator,) = (d for d in yaml.safe_load_all(done.stdout) if d and d["kind"] == "Deployment")
            (container,) = operator["spec"]["template"]["spec"]["containers"]
            load({one["name"]: one.get("value", "regroup") for one in container["env"]})
            continue
        refused.add(name)
        where, _, last = name.rpartition(".")
        assert f"at '{where and f'/{where}'}': missing property '{last}'" in done.stderr, done.stderr
    assert refused == NEEDED


def rendered(*sets: str) -> str:
    done = subprocess.run(
        [str(binaries.ensure() / "helm"), "template", "regroup", "helm/regroup", "--kube-version=1.36.3",
         *(f"--set-json={value}" for value in sets)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


EFFECTS = {
    "replicas": "3",
    "image.repository": '"elsewhere/operator"',
    "image.tag": '"2"',
    "image.digest": '"sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"',
    "image.pullPolicy": '"Always"',
    "imagePullSecrets": '[{"name": "mine"}]',
    "agent.image": '"elsewhere/agent"',
    "agent.pullPolicy": '"Never"',
    "agent.imagePullSecrets": '["theirs"]',
    "watchNamespaces": '["team"]',
    "drainTaints": '["team/ends"]',
    "admissionPolicy": '{"enabled": false}',
    "networkPolicy": '{"enabled": true}',
    "metrics.perJob": "true",
    "metrics.serviceMonitor": '{"enabled": true}',
    "metrics.rules": '{"enabled": true}',
    "metrics.dashboards": '{"enabled": true}',
    "logLevel": '"debug"',
    "settings": '{"joinQuietSeconds": 2}',
    "resources": '{"limits": {"cpu": "7"}}',
    "podAnnotations": '{"a": "b"}',
    "nodeSelector": '{"a": "b"}',
    "tolerations": '[{"key": "a"}]',
    "priorityClassName": '"high"',
}


def test_every_value_has_an_effect() -> None:
    def leaves(values: dict[str, Any], at: str = "") -> Iterator[str]:
        for name, value in values.items():
            if not at and name in ("image", "agent", "metrics"):
                yield from leaves(value, f"{name}.")
            else:
                yield at + name

    values = yaml.safe_load((ROOT / "helm/regroup/values.yaml").read_text())
    default = rendered()
    assert set(leaves(values)) == set(EFFECTS)
    assert [name for name, value in EFFECTS.items() if rendered(f"{name}={value}") == default] == []


def test_digest_counts_for_operator_and_agent_and_the_policy_covers_the_operator() -> None:
    digest = "sha256:" + "0123456789abcdef" * 4
    text = rendered(f'image={{"digest":"{digest}"}}', 'networkPolicy={"enabled":true}')
    documents = [d for d in yaml.safe_load_all(text) if d]
    (operator,) = (d for d in documents if d["kind"] == "Deployment")
    template = operator["spec"]["template"]
    (container,) = template["spec"]["containers"]
    image = f"localhost/regroup-operator@{digest}"
    agent = next(e["value"] for e in container["env"] if e["name"] == "REGROUP_SETTINGS_AGENT_IMAGE")
    assert (container["image"], agent) == (image, image)
    (policy,) = (d for d in documents if d["kind"] == "NetworkPolicy")  # none for workers unless asked for
    assert template["metadata"]["labels"].items() >= policy["spec"]["podSelector"]["matchLabels"].items()
    ports = {p["name"] for p in container["ports"]}
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == ports


def test_further_peers_reach_the_operators_endpoint() -> None:
    """Workers with the address of their node."""
    nodes = {"ipBlock": {"cidr": "10.1.0.0/16"}}
    text = rendered(f"networkPolicy={json.dumps({'enabled': True, 'from': [nodes]})}")
    (policy,) = (d for d in yaml.safe_load_all(text) if d and d["kind"] == "NetworkPolicy")
    agents, _ = policy["spec"]["ingress"]
    assert agents["from"] == [{"namespaceSelector": {}}, nodes]


def test_workers_of_a_namespace_are_reached_by_pods_of_jobs_only(api: Api, namespace: str) -> None:
    value = {"namespaces": [namespace, "other"], "from": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}
    text = rendered(f"networkPolicy.workers={json.dumps(value)}")
    policies = [d for d in yaml.safe_load_all(text) if d and d["kind"] == "NetworkPolicy"]
    assert [p["metadata"]["namespace"] for p in policies] == value["namespaces"]
    api.done("create", "--validate=strict", "--filename=-", document=policies[0])
    job = parse_job(stored_job())
    labels = worker_pod(job, 0, 0, settings=RenderSettings("https://operator:8443", "agent:1"))["metadata"]["labels"]
    assert labels.items() >= policies[0]["spec"]["podSelector"]["matchLabels"].items()
    jobs, others = policies[0]["spec"]["ingress"]
    (peer,) = jobs["from"]
    assert list(peer) == ["podSelector"], "pods of other namespaces would be let in"
    assert [(e["key"], e["operator"]) for e in peer["podSelector"]["matchExpressions"]] == [(LABEL_JOB_NAME, "Exists")]
    assert LABEL_JOB_NAME in labels
    assert others == {"from": value["from"]}


def test_monitor_finds_its_own_service_and_the_operators_only() -> None:
    text = rendered('metrics={"serviceMonitor":{"enabled":true,"labels":{"release":"prom"}},"rules":{"enabled":true}}')
    documents = [d for d in yaml.safe_load_all(text) if d]
    (monitor,) = (d for d in documents if d["kind"] == "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prom"
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [d for d in documents if d["kind"] == "Service" and d["metadata"]["labels"].items() >= wanted]
    assert [s["metadata"]["name"] for s in services] == ["regroup-metrics"]
    (operator,) = (d for d in documents if d["kind"] == "Deployment")
    pods = operator["spec"]["template"]["metadata"]["labels"]
    assert pods.items() >= services[0]["spec"]["selector"].items()
    (budget,) = (d for d in documents if d["kind"] == "PodDisruptionBudget")
    assert pods.items() >= budget["spec"]["selector"]["matchLabels"].items()
    assert not any(d["kind"] == "PodDisruptionBudget" for d in yaml.safe_load_all(rendered("replicas=1")) if d)


@pytest.mark.parametrize("gpus", [False, True])
def test_dashboards_are_those_of_the_files_and_have_the_sidecars_label(gpus: bool) -> None:
    text = rendered(f"metrics.dashboards={json.dumps({'enabled': True, 'gpus': gpus})}")
    maps = [
        d for d in yaml.safe_load_all(text) if d and d["kind"] == "ConfigMap" and "dashboard" in d["metadata"]["name"]
    ]
    wanted = dashboards.DASHBOARDS if gpus else (dashboards.OPERATOR, dashboards.JOB)
    held = {name: json.loads(held) for one in maps for name, held in one["data"].items()}
    assert held == {f"{one.uid}.json": dashboards.grafana(one) for one in wanted}
    assert {one["metadata"]["labels"]["grafana_dashboard"] for one in maps} == {"1"}


def test_alerts_link_to_the_runbook_where_its_address_is_known() -> None:
    def annotations(**rules: object) -> list[dict[str, str]]:
        documents = yaml.safe_load_all(rendered(f"metrics.rules={json.dumps({'enabled': True, **rules})}"))
        (found,) = (d for d in documents if d and d["kind"] == "PrometheusRule")
        return [rule["annotations"] for group in found["spec"]["groups"] for rule in group["rules"]]

    assert not any("runbook_url" in notes for notes in annotations())
    for notes in annotations(runbookURL="https://docs.example/how-to/runbook.md"):
        assert notes["runbook_url"] == f"https://docs.example/{notes['runbook'].removeprefix('docs/')}"


def test_operator_of_some_namespaces_gets_its_rights_there_only() -> None:
    def kinds(text: str, kind: str) -> dict[str, dict[str, Any]]:
        documents = filter(None, yaml.safe_load_all(text))
        return {
            d["metadata"].get("namespace", "") + "/" + d["metadata"]["name"]: d for d in documents if d["kind"] == kind
        }

    everywhere = kinds(rendered(), "ClusterRole")["/regroup-operator"]["rules"]
    narrow = rendered('watchNamespaces=["a","b"]')
    cluster = kinds(narrow, "ClusterRole")["/regroup-operator"]["rules"]
    roles, bindings = kinds(narrow, "Role"), kinds(narrow, "RoleBinding")
    documents = ["/.well-known/openid-configuration", "/openid/v1/jwks"]
    assert [rule.get("resources") or rule["nonResourceURLs"] for rule in cluster] == [
        ["nodes"],
        documents,
        ["tokenreviews"],
    ]
    for namespace in ("a", "b"):
        assert roles[f"{namespace}/regroup-jobs"]["rules"] == [rule for rule in everywhere if rule not in cluster]
        assert bindings[f"{namespace}/regroup-jobs"]["subjects"][0]["namespace"] == "default"


def test_everything_that_the_chart_makes_is_there(installed: Api) -> None:
    deployment = installed.get("deployment", "regroup-operator", f"--namespace={render.NAMESPACE}")
    assert deployment["spec"]["replicas"] == 2
    service = installed.get("service", "regroup", f"--namespace={render.NAMESPACE}")
    assert service["spec"]["selector"]["regroup.dev/leader"] == "true"
    assert [port["port"] for port in service["spec"]["ports"]] == [8443]


def test_operators_pod_passes_pod_security_restricted(installed: Api) -> None:
    template = installed.get("deployment", "regroup-operator", f"--namespace={render.NAMESPACE}")["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": render.NAMESPACE, "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    }
    installed.done("create", "--dry-run=server", "--validate=strict", "--filename=-", document=pod)


OWN = [
    {
        "apiVersion": "regroup.dev/v1alpha1",
        "kind": "DistributedTrainingJob",
        "name": "x",
        "uid": "1",
        "controller": True,
    }
]
FOREIGN = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": "1", "controller": True}]


@pytest.mark.parametrize(
    ("request_", "owners", "is_allowed"),
    [
        ("delete pod x", None, False),
        ("delete pod x", FOREIGN, False),
        ("delete pod x", OWN, True),
        ("delete --dry-run=server configmap x", OWN, None),
        ('patch configmap x --type=merge --patch={"data":{"a":"b"}}', None, False),
        ('patch configmap x --type=merge --patch={"data":{"a":"b"}}', OWN, True),
        ('patch service x --type=merge --patch={"metadata":{"labels":{"a":"b"}}}', FOREIGN, False),
    ],
)
def test_operator_touches_only_what_a_job_owns(
    installed: Api, namespace: str, request_: str, owners: list[dict[str, Any]] | None, is_allowed: bool | None
) -> None:
    """What RBAC grants for all objects of a kind. None: RBAC grants nothing of it."""
    kind = "service" if " service " in request_ else "configmap" if " configmap " in request_ else "pod"
    specs: dict[str, dict[str, Any]] = {
        "pod": {"spec": {"containers": [{"name": "a", "image": "b"}]}},
        "service": {"spec": {"clusterIP": "None"}},
        "configmap": {"data": {}},
    }
    metadata: dict[str, Any] = {"name": "x", "namespace": namespace}
    if owners is not None:
        metadata["ownerReferences"] = owners
    names = {"pod": "Pod", "service": "Service", "configmap": "ConfigMap"}
    document = {"apiVersion": "v1", "kind": names[kind], "metadata": metadata, **specs[kind]}
    installed.done("create", "--filename=-", document=document)
    policy = "The Regroup operator changes and deletes only what"
    until(lambda: _denies(installed, namespace), "the policy is in force")
    answer = installed.kubectl(*request_.split(), f"--namespace={namespace}", OPERATOR)
    assert (answer.code == 0) == bool(is_allowed), answer.error
    assert (policy in answer.error) == (is_allowed is False)


def _denies(api: Api, namespace: str) -> bool:
    """Return whether the policies are in force: the API server compiles them a moment after they were made."""
    probe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "probe", "namespace": namespace}}
    api.kubectl("create", "--filename=-", document=probe)
    patch = '--patch={"data":{"a":"b"}}'
    return (
        api.kubectl("patch", "configmap", "probe", "--type=merge", patch, f"--namespace={namespace}", OPERATOR).code
        != 0
    )


def test_operator_deletes_only_jobs_that_have_expired(installed: Api, namespace: str) -> None:
    until(lambda: _denies(installed, namespace), "the policy is in force")
    for name, policy in (("stays", {}), ("expires", {"ttlSecondsAfterFinished": 1})):
        job = make_job(name, runPolicy=policy)
        job["metadata"]["namespace"] = namespace
        installed.done("create", "--filename=-", document=job)
    request = ["delete", "dtj", f"--namespace={namespace}", OPERATOR]
    for name in ("stays", "expires"):
        assert "deletes only jobs that have ended" in installed.refused(*request, name)
    patch = '--patch={"status":{"completionTime":"2026-01-01T00:00:00Z"}}'
    for name in ("stays", "expires"):
        installed.done("patch", "dtj", name, f"--namespace={namespace}", "--subresource=status", "--type=merge", patch)
    assert "deletes only jobs that have ended" in installed.refused(*request, "stays")
    installed.done(*request, "expires")


@pytest.mark.parametrize(("before", "change", "sentence"), SWAPS.values(), ids=SWAPS.keys())
def test_started_job_keeps_its_templates(
    installed: Api, namespace: str, before: Change, change: Change, sentence: str
) -> None:
    job = make_job()
    job["metadata"]["namespace"] = namespace
    before(job)
    installed.done("create", "--filename=-", document=job)
    request = ["patch", "dtj", "digits", f"--namespace={namespace}"]
    started = '--patch={"status":{"startTime":"2026-01-01T00:00:00Z"}}'
    installed.done(*request, "--subresource=status", "--type=merge", started)
    stored = json.loads(installed.done("get", "dtj", "digits", f"--namespace={namespace}", "--output=json"))
    change(stored)
    replace = ["replace", "--filename=-", "--dry-run=server"]
    until(lambda: installed.kubectl(*replace, document=stored).code != 0, "the policy is in force")
    assert sentence in installed.refused(*replace, document=stored)
    installed.done(*request, "--type=merge", '--patch={"spec":{"replicas":4}}')


@pytest.mark.parametrize(
    "request_",
    [
        "watch distributedtrainingjobs.regroup.dev --all-namespaces",
        "delete distributedtrainingjobs.regroup.dev --all-namespaces",
        "update distributedtrainingjobs.regroup.dev --subresource=status --all-namespaces",
        "update distributedtrainingjobs.regroup.dev --subresource=finalizers --all-namespaces",
        "create pods --all-namespaces",
        "delete pods --all-namespaces",
        "watch nodes",
        "patch configmaps --all-namespaces",
        "create services --all-namespaces",
        "create events.events.k8s.io --all-namespaces",
        "create tokenreviews.authentication.k8s.io",
        "get /openid/v1/jwks",
        "get /.well-known/openid-configuration",
        "patch pods --namespace=regroup-system",
        "update leases.coordination.k8s.io/regroup --namespace=regroup-system",
        "create secrets --namespace=regroup-system",
        "get secrets/regroup-ca --namespace=regroup-system",
    ],
)
def test_operator_may_do_its_work(installed: Api, request_: str) -> None:
    assert installed.done("auth", "can-i", *request_.split(), OPERATOR).strip() == "yes"


@pytest.mark.parametrize(
    "request_",
    [
        "create distributedtrainingjobs.regroup.dev --all-namespaces",
        "patch distributedtrainingjobs.regroup.dev --all-namespaces",
        "deletecollection distributedtrainingjobs.regroup.dev --all-namespaces",
        "patch pods --namespace=default",
        "create pods --subresource=exec --all-namespaces",
        "delete services --all-namespaces",
        "get secrets --namespace=default",
        "get secrets/other --namespace=regroup-system",
        "list secrets --namespace=regroup-system",
        "update leases.coordination.k8s.io/other --namespace=regroup-system",
        "patch nodes",
        "create clusterroles.rbac.authorization.k8s.io",
    ],
)
def test_operator_may_do_nothing_else(installed: Api, request_: str) -> None:
    assert installed.kubectl("auth", "can-i", *request_.split(), OPERATOR).out.strip() == "no"


@pytest.mark.parametrize(
    ("role", "verb", "want"), [("edit", "create", "yes"), ("view", "list", "yes"), ("view", "create", "no")]
)
def test_users_roles_cover_jobs(installed: Api, role: str, verb: str, want: str) -> None:
    """The bare server has no controller that aggregates, so the part that would be aggregated is bound directly."""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{role}-{verb}", "namespace": "default"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"regroup-{role}"},
        "subjects": [{"kind": "User", "name": f"{role}-{verb}", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    installed.done("create", "--filename=-", document=binding)
    asked = ["auth", "can-i", verb, "distributedtrainingjobs.regroup.dev", "--namespace=default"]
    assert installed.kubectl(*asked, f"--as={role}-{verb}").out.strip() == want
