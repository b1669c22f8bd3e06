"""Install other people's controllers on a plane: their own manifests, rendered from their modules, and their process beside it.

What differs from an installation in a cluster: the process runs on this machine and not in a pod, so its webhooks are called at
127.0.0.1, with a certificate of the plane's authority, and not through a Service with one that the controller made itself. It
acts as its own service account. Its configuration is as delivered but for addresses.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.scale.plane import Plane
from bench.trials import BenchError
from cluster import apiserver, binaries
from cluster.binaries import Build
from cluster.kubectl import Kubectl
from harness.polling import until

READY_S = 60.0
_LEFT_OUT = {"Deployment", "Service", "Secret", "ConfigMap"}
"""What belongs to running in a pod."""
_WEBHOOKS = {"MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"}


@dataclass(frozen=True)
class Controller:
    """One controller that is installed from its Go module."""

    name: str
    """Of the process."""
    build: Build
    program: str
    module: str
    manifests: str
    """The folder in the module that its kustomizations need."""
    resources: Sequence[str]
    """Kustomizations in that folder."""
    config: str
    """Its delivered configuration file, in that folder."""
    certificates: str
    """The key of its configuration that says whether it makes the webhooks' certificates itself."""
    namespace: str
    account: str


@dataclass(frozen=True)
class Installed:
    """A controller that runs."""

    user: str
    pid: int
    metrics: str
    """The address of its metrics."""


def install(plane: Plane, controller: Controller) -> Installed:
    """Install and start a controller; return once it is ready and its webhooks are called. Raises BenchError."""
    program = binaries.build_once(controller.build) / controller.program
    kubectl = Kubectl(plane.kubeconfig)
    home = plane.directory / controller.name
    documents = _render(kubectl, controller, home)
    kubectl.apply(*(one for one in documents if one["kind"] not in _LEFT_OUT | _WEBHOOKS))
    kinds = [one["metadata"]["name"] for one in documents if one["kind"] == "CustomResourceDefinition"]
    until(
        lambda: all(map(plane.is_established, kinds)),
        f"the API server serves {', '.join(kinds)}",
        timeout_s=READY_S,
        every_s=0.1,
        error=BenchError,
    )

    user, kubeconfig = plane.service_account(controller.namespace, controller.account)
    webhook, health, metrics = (apiserver.free_port() for _ in range(3))
    plane.authority.issue(controller.name, user=controller.name, hosts=["127.0.0.1"])
    serving = home / "tmp" / "k8s-webhook-server" / "serving-certs"  # where such controllers look, below TMPDIR
    serving.mkdir(parents=True)
    shutil.copy(plane.authority.certificate_file(controller.name), serving / "tls.crt")
    shutil.copy(plane.authority.key_file(controller.name), serving / "tls.key")
    config = configure(
        yaml.safe_load((home / "manifests" / controller.config).read_text()),
        certificates=controller.certificates,
        namespace=controller.namespace,
        webhook=webhook,
        health=health,
        metrics=metrics,
    )
    if controller.name == "jobset":
        config["metrics"]["certDir"] = str(serving)
    (home / "config.json").write_text(json.dumps(config))
    process = plane.spawn(
        controller.name,
        [program, f"--config={home / 'config.json'}", "--zap-log-level=2"],
        environment={**os.environ, "KUBECONFIG": str(kubeconfig), "TMPDIR": str(home / "tmp")},
    )

    def ready() -> bool:
        if not process.alive():
            raise BenchError(f"{controller.name} ended at once: {plane.log_tail(controller.name)}")
        return fetch(f"http://127.0.0.1:{health}/readyz") is not None

    until(ready, f"{controller.name} is ready", timeout_s=READY_S, every_s=0.1, error=BenchError)
    authority = base64.b64encode(plane.authority.certificate_file("ca").read_bytes()).decode()
    hooks = [call_at(one, f"https://127.0.0.1:{webhook}", authority) for one in documents if one["kind"] in _WEBHOOKS]
    kubectl.apply(*hooks)
    return Installed(user, process.pid, f"https://127.0.0.1:{metrics}/metrics")


def _render(kubectl: Kubectl, controller: Controller, home: Path) -> list[dict[str, Any]]:
    source = binaries.module_directory(controller.build, controller.module) / controller.manifests
    home.mkdir(parents=True)
    # A kustomization may only name what is below it, and the module's folder is read-only.
    shutil.copytree(source, home / "manifests", copy_function=shutil.copyfile)
    for folder in (home / "manifests").rglob("*"):
        if folder.is_dir():
            folder.chmod(0o755)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": controller.namespace,
        "resources": [f"manifests/{name}" for name in controller.resources],
    }
    (home / "kustomization.yaml").write_text(json.dumps(kustomization))
    rendered = kubectl.run("kustomize", str(home), "--load-restrictor=LoadRestrictionsNone")
    return [one for one in yaml.safe_load_all(rendered) if one]


def configure(
    delivered: Mapping[str, Any], *, certificates: str, namespace: str, webhook: int, health: int, metrics: int
) -> dict[str, Any]:
    """Return a delivered configuration with the addresses of this machine. Pure."""
    return {
        **delivered,
        certificates: {"enable": False},
        "leaderElection": {**delivered.get("leaderElection", {}), "resourceNamespace": namespace},
        "webhook": {"port": webhook, "host": "127.0.0.1"},
        "health": {**delivered.get("health", {}), "healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {**delivered.get("metrics", {}), "bindAddress": f"127.0.0.1:{metrics}"},
    }


def call_at(configuration: Mapping[str, Any], url: str, authority: str) -> dict[str, Any]:
    """Return a webhook configuration whose webhooks are called at `url` and not through a Service. Pure."""
    webhooks = []
    for hook in configuration["webhooks"]:
        path = hook["clientConfig"]["service"]["path"]
        webhooks.append({**hook, "clientConfig": {"url": url + path, "caBundle": authority}})
    return {**configuration, "webhooks": webhooks}


def fetch(url: str, context: ssl.SSLContext | None = None, token: str | None = None) -> str | None:
    """Return a page of a process on this machine, None while it does not answer with 200."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
    )
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def metrics_page(plane: Plane, url: str) -> str | None:
    """Return a page of metrics of a controller, as an administrator of the plane. The address is loopback: not verified."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(plane.authority.certificate_file("admin"), plane.authority.key_file("admin"))
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "bench-metrics"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": "kube-system"}],
    }
    plane.api.apply("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/bench-metrics", binding)
    _, kubeconfig = plane.service_account("kube-system", "default")
    token = json.loads(kubeconfig.read_text())["users"][0]["user"]["token"]
    return fetch(url, context, token)
