"""Regroup as the system that is measured: the operator as its image runs it, and the agents of the pods (fleet.py).

The operator is `python -m regroup_operator` under the chart's own rights and with the chart's settings. Its Deployment is not
installed: a pod of the benchmark's stands for each operator process, so that the leader can label it.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.scale import meter
from bench.scale.agents import STEP_S
from bench.scale.fleet import Fleet, Setup
from bench.scale.histogram import quantile
from bench.scale.system import NAMESPACE, Submission
from bench.scale.tokens import ServiceAccount, TokenMint
from cluster import binaries
from harness.polling import until
from harness.replica import Replica
from manifests import render
from regroup_operator.api import GROUP, KIND, PLURAL, VERSION

START_S = 60.0
ACCOUNT = "regroup"
IMAGE = "example.com/trainer:1"
DAY_S = 86_400
CHANGED = "The trainers behind the agents are numbers; each agent has real connections, tokens and messages."


RESTS_S = 3600.0
"""Seconds between two steps of a job that is to cost nothing once it trains. Its status is not written again any sooner."""


def job_body(name: str, workers: int, min_workers: int | None = None, *, pod_names: bool = True) -> dict[str, Any]:
    """Return a job of so many workers; with `min_workers` an elastic one."""
    spec: dict[str, Any] = {
        "replicas": workers,
        "template": {
            "spec": {"containers": [{"name": "trainer", "image": IMAGE, "command": ["python", "train.py"]}]},
        },
    }
    if not pod_names:
        spec["network"] = {"podNames": False}
    if min_workers is not None:
        spec["elasticPolicy"] = {"minReplicas": min_workers, "maxReplicas": workers}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": name}, "spec": spec}


@dataclass(frozen=True)
class Reading:
    """What one operator's /metrics said at one time."""

    at_s: float
    requests: dict[str, float]
    """By "verb resource"."""
    buckets: dict[float, float]
    """Reconciliations by upper bound of their seconds, cumulative."""
    values: dict[str, float] = field(default_factory=dict)

    def since(self, before: Reading) -> dict[str, Any]:
        """Return plain numbers of the time between two readings."""
        requests = {k: int(v - before.requests.get(k, 0.0)) for k, v in self.requests.items()}
        buckets = {bound: count - before.buckets.get(bound, 0.0) for bound, count in self.buckets.items()}
        return {
            "seconds": self.at_s - before.at_s,
            "requests": {k: v for k, v in sorted(requests.items()) if v},
            "num_requests": sum(requests.values()),
            "num_reconciles": int(max(buckets.values(), default=0.0)),
            "reconcile_p50_s": quantile(buckets, 0.5),
            "reconcile_p99_s": quantile(buckets, 0.99),
        }


def parse_metrics(text: str, at_s: float) -> Reading:
    """Return what is needed of a page. Pure."""
    requests: dict[str, float] = {}
    buckets: dict[float, float] = {}
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "regroup_api_requests_total":
                key = f"{sample.labels['verb']} {sample.labels['resource']}"
                requests[key] = requests.get(key, 0.0) + sample.value
            elif sample.name == "regroup_reconcile_seconds_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif not sample.labels:
                values[sample.name] = sample.value
    return Reading(at_s, requests, buckets, values)


class Regroup:
    """Implements system.System. `replicas`: operator processes; the first one leads."""

    def __init__(self, directory: Path, *, replicas: int = 1, pod_names: bool = True, rests: bool = False) -> None:
        """`directory`: for logs and kubeconfigs. `rests`: a job that trains costs nothing any more, as a running pod of the other
        systems does. Its steps are long, and its status is not written again for its time alone."""
        self._directory, self._num_replicas, self._pod_names = directory, replicas, pod_names
        self._settings = {"PROGRESS_WRITE_SECONDS": str(RESTS_S)} if rests else None
        self._step_s = RESTS_S if rests else STEP_S
        self.name, self.title = ("regroup", "Regroup") if pod_names else ("regroup_by_ip", "Regroup, podNames: false")
        at_rest = " A step takes an hour, and progressWriteSeconds is 3600: jobs that train already are not measured."
        self.changed = CHANGED + (at_rest if rests else "")
        self.kubeconfig = Path()
        """The administrator's, after `start`."""
        self.replicas: list[Replica] = []
        self.fleet: Fleet | None = None

    kinds = (PLURAL,)

    def start(self, plane: Any) -> None:
        """Start the operator and its fleet of agents. The directory of `plane.kubeconfig` also holds the cluster's PKI."""
        self.kubeconfig = plane.kubeconfig
        pki = self.kubeconfig.parent
        self._directory.mkdir(parents=True, exist_ok=True)
        self._install()
        mint = TokenMint(pki / "sa.key")
        account = self._json("get", "serviceaccount", ACCOUNT, f"--namespace={render.NAMESPACE}")
        owner = ServiceAccount(render.NAMESPACE, ACCOUNT, account["metadata"]["uid"])
        for number in range(self._num_replicas):
            name = f"operator-{number}"
            pod = self._json("get", "pod", name, f"--namespace={render.NAMESPACE}")
            token = mint.token(
                owner, name, pod["metadata"]["uid"], audiences=("https://kubernetes.default.svc.cluster.local",),
                valid_s=DAY_S,
            )  # fmt: skip
            replica = Replica(
                name,
                self._operator_kubeconfig(name, token),
                self._directory / f"{name}.log",
                namespace=render.NAMESPACE,
                settings=self._settings,
            )
            self.replicas.append(replica)
            until(replica.leads if number == 0 else replica.ready, f"{name} serves", timeout_s=START_S, every_s=0.1)
        self.fleet = self._start_fleet(pki)

    def submit(self, i: int, num_pods: int) -> Submission:
        body = job_body(f"job-{i}", num_pods, pod_names=self._pod_names)
        return Submission(f"/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{PLURAL}", body)

    def is_running(self, resource: Mapping[str, Any]) -> bool:
        """Return whether all workers of the job are ready and train in the first generation."""
        status, wanted = resource.get("status") or {}, resource["spec"]["replicas"]
        summary = status.get("summary") or {}
        membership = status.get("membership") or {}
        return (
            summary.get("state") == "Running"
            and summary.get("ready") == f"{wanted}/{wanted}"
            and membership.get("generation") == 1
            and membership.get("worldSize") == wanted
        )

    def pids(self) -> Mapping[str, int]:
        return {replica.name: replica.process.pid for replica in self.replicas if replica.process.poll() is None}

    def users(self) -> Collection[str]:
        return (f"system:serviceaccount:{render.NAMESPACE}:{ACCOUNT}",)

    def details(self) -> Mapping[str, Any]:
        buckets = self.read().buckets
        p50, p99 = quantile(buckets, 0.5), quantile(buckets, 0.99)
        return {} if p50 is None or p99 is None else {"reconcile_ms": {"p50": p50 * 1e3, "p99": p99 * 1e3}}

    def stop(self) -> None:
        if self.fleet is not None:
            self.fleet.stop()
        for replica in self.replicas:
            replica.stop(signal.SIGKILL)

    # --- more than other systems have ------------------------------------------------------------------------------

    @property
    def leader(self) -> Replica:
        """The operator that leads; raises where none says so for a while: one that is busy answers late."""

        def leads() -> Replica | None:
            return next((r for r in self.replicas if r.process.poll() is None and r.leads()), None)

        leader: Replica = until(leads, "an operator leads", timeout_s=START_S, every_s=0.1)
        return leader

    def read(self, replica: Replica | None = None) -> Reading:
        """Return what an operator's /metrics says, absent: the leader's."""
        chosen = replica or self.leader

        def page() -> str:
            status, text = chosen.page("/metrics")
            return text if status == 200 else ""

        text = until(
            page, f"{chosen.name} shows its metrics", timeout_s=START_S, every_s=0.1, details=chosen.log.read_text
        )
        return parse_metrics(text, time.monotonic())

    def agents(self) -> Fleet:
        """Return the agents' process."""
        assert self.fleet is not None
        return self.fleet

    def agents_cpu_s(self) -> float:
        """Return the CPU time of the agents' process, which is not the operator's."""
        return meter.cpu_s(self.agents().process.pid)

    def _start_fleet(self, pki: Path) -> Fleet:
        ca_file = self._directory / "ca.crt"
        until(lambda: self._ca(ca_file), "the operator's CA", timeout_s=START_S)
        setup = Setup(
            kubeconfig=str(self.kubeconfig),
            sa_key=str(pki / "sa.key"),
            ca_file=str(ca_file),
            server_name=f"regroup.{render.NAMESPACE}.svc",
            operator_namespace=render.NAMESPACE,
            namespace=NAMESPACE,
            ports={replica.name: replica.agents for replica in self.replicas},
            step_s=self._step_s,
        )
        return Fleet(setup, self._directory / "agents.log")

    def _ca(self, file: Path) -> bool:
        secret = self._json("get", "secret", "regroup-ca", f"--namespace={render.NAMESPACE}")
        file.write_bytes(base64.b64decode(secret["data"]["ca.crt"]))
        return True

    def _install(self) -> None:
        """Install the chart's objects but the Deployment, and the pods that stand for its own."""
        documents = [d for d in yaml.safe_load_all(render.INSTALL.read_text()) if d]
        template = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]
        kept = [d for d in documents if d["kind"] != "Deployment"]
        first = [d for d in kept if d["kind"] in ("Namespace", "CustomResourceDefinition")]
        self._apply(first)
        crd = next(d for d in first if d["kind"] == "CustomResourceDefinition")["metadata"]["name"]
        self._kubectl("wait", "--for=condition=Established", f"crd/{crd}", "--timeout=30s")
        self._apply([d for d in kept if d not in first])
        for number in range(self._num_replicas):
            metadata = {"name": f"operator-{number}", "namespace": render.NAMESPACE, **template["metadata"]}
            self._apply([{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}])
        accounts = self._json("get", "serviceaccounts", f"--namespace={NAMESPACE}")["items"]
        if not any(a["metadata"]["name"] == "default" for a in accounts):  # no controller manager makes it
            self._kubectl("create", "serviceaccount", "default", f"--namespace={NAMESPACE}")

    def _apply(self, documents: list[dict[str, Any]]) -> None:
        text = yaml.safe_dump_all(documents)
        self._kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=text)

    def _operator_kubeconfig(self, name: str, token: str) -> Path:
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        file = self._directory / f"{name}.kubeconfig"
        file.write_text(yaml.safe_dump(config))
        return file

    def _json(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._kubectl(*arguments, "--output=json"))
        return found

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        command = [str(binaries.ensure() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout
