"""A control plane with fake nodes, for one measurement: real API server, scheduler and controllers, kwok as every kubelet.

Everything listens on loopback and ends with the context. The Job controller has a process of its own, so that what it costs can
be told from the controller manager's other controllers. The client limits of scheduler and controllers are raised far above
their defaults of 20 to 50 requests a second: with those, they are what is measured. Priority and fairness stay on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.scale import audit, builds, meter
from bench.scale.api import Api
from bench.trials import BenchError
from cluster import apiserver, binaries, processes
from cluster.errors import ClusterError
from cluster.pki import Authority
from harness.polling import until

PODS_PER_NODE = 110
"""A kubelet's default."""
GPUS_PER_NODE = 8
"""Workers on a node of one large job."""
JOB_CONTROLLER = "job-controller"
JOB_CONTROLLER_USER = "system:serviceaccount:kube-system:job-controller"
_CLIENT_RATE = ("--kube-api-qps=1000", "--kube-api-burst=2000")
_READY_S = 60.0
_FAKE_KUBELET = Path(__file__).parent / "kwok.yaml"
_NODE_GRACE = "24h"
"""Fake nodes send no heartbeats: they would be noise."""
_COLLECTOR = "system:kube-controller-manager"
"""The user by whom the garbage collector watches."""
_COLLECTS_S = 90.0
"""It looks for new kinds of objects every 30 s."""


class Plane:
    """One running control plane, as `running` yields it."""

    def __init__(self, directory: Path, server: apiserver.ApiServer) -> None:
        self.directory = directory
        self.url = server.url
        self.kubeconfig = server.kubeconfig
        """The administrator's. Its requests are not counted."""
        self.authority = Authority(directory / "pki")
        self.api = Api(self.kubeconfig)
        self.job_metrics = ""
        """Where the Job controller's metrics are."""
        self._audit = audit.AuditLog(directory / "audit.log")

    def kubeconfig_of(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Return a kubeconfig with a client certificate for `user`, whose requests are counted under that name."""
        name = user.replace(":", "-")
        self.authority.issue(name, user=user, groups=groups)
        return self.authority.kubeconfig(name, self.url)

    def service_account(self, namespace: str, name: str) -> tuple[str, Path]:
        """Return the user of a service account that exists, and a kubeconfig with a token for it, good for a day."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 86400}}
        token = self.api.post(path, asked)["status"]["token"]
        config = json.loads(self.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        file = self.directory / f"{namespace}-{name}.kubeconfig"
        file.write_text(json.dumps(config))
        return f"system:serviceaccount:{namespace}:{name}", file

    def requests(self) -> Mapping[audit.Key, int]:
        """Return the number of API requests so far by (user, verb, resource); what is not counted says `audit`."""
        return self._audit.requests()

    def refused(self) -> Mapping[tuple[audit.Key, int], int]:
        """Return the number of those that were answered with a status of 400 or more, by that status."""
        return self._audit.refused()

    def collects(self, kinds: Collection[str]) -> None:
        """Return once the garbage collector watches these custom resources, by their plurals. Before, it looks each owner up, which
        costs up to a request a pod, and is over half a minute after an installation."""

        def watches() -> bool:
            asked = self.requests()
            return all(audit.Key(_COLLECTOR, "watch", kind) in asked for kind in kinds)

        what = f"the garbage collector watches {', '.join(kinds)}"
        until(watches, what, timeout_s=_COLLECTS_S, every_s=0.5, error=BenchError)

    def pids(self) -> dict[str, int]:
        """Return the control plane's processes by name."""
        found = {name: processes.recorded(self.directory, name) for name in _NAMES}
        gone = [name for name, process in found.items() if process is None]
        if gone:
            raise BenchError(f"{gone[0]} has ended: {processes.log_tail(self.directory, gone[0])}")
        return {name: process.pid for name, process in found.items() if process is not None}

    def cpu_s(self, pid: int) -> float:
        """Return the CPU seconds of a process so far; `meter.Meter` measures several over a time."""
        return meter.cpu_s(pid)

    def is_established(self, definition: str) -> bool:
        """Return whether the API server serves a custom resource, by the name of its definition."""
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition}"
        conditions = self.api.get(path).get("status", {}).get("conditions") or []
        return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

    def spawn(
        self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None
    ) -> processes.Process:
        """Start a process of a system; its output goes to log/NAME.log. `stop(name)` ends it."""
        return processes.spawn(self.directory, name, command, environment=environment)

    def stop(self, name: str, *, grace_s: float = 5.0) -> None:
        """End a process that was spawned under that name, and wait for it."""
        processes.stop(self.directory, name, grace_s=grace_s)

    def log_tail(self, name: str) -> str:
        """Return the last lines of such a process, for an error sentence."""
        return processes.log_tail(self.directory, name)


_OTHERS = ("kwok", "kube-scheduler", JOB_CONTROLLER, "kube-controller-manager")
_NAMES = ("etcd", "kube-apiserver", *_OTHERS)


@contextmanager
def running(directory: Path, nodes: int, pods_per_node: int = PODS_PER_NODE) -> Iterator[Plane]:
    """Yield a fresh control plane with `nodes` ready nodes of `pods_per_node` pods; its state and logs are in `directory`.

    `directory` must be absolute and empty; the logs stay in it. Builds what is missing first. Raises BenchError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "audit-policy.json").write_text(json.dumps(audit.policy()))
    try:
        server = apiserver.start(
            directory,
            arguments=[
                f"--audit-policy-file={directory / 'audit-policy.json'}",
                f"--audit-log-path={directory / 'audit.log'}",
                "--audit-log-mode=blocking",  # a batch that is full drops events
                "--audit-log-maxsize=100000",  # MB: a file that is rotated could not be read on
            ],
        )
        plane = Plane(directory, server)
        _start_controllers(plane)
        _start_kwok(plane)
        _make_nodes(plane, nodes, pods_per_node)
        yield plane
        plane.api.close()
    except ClusterError as error:
        raise BenchError(str(error)) from error
    finally:
        for name in _OTHERS:
            processes.stop(directory, name, grace_s=0)
        apiserver.kill(directory)
        shutil.rmtree(directory / "etcd", ignore_errors=True)


def _start_controllers(plane: Plane) -> None:
    programs, pki = binaries.ensure(), plane.authority.directory
    manager = plane.kubeconfig_of("system:kube-controller-manager")
    scheduler = plane.kubeconfig_of("system:kube-scheduler")
    own = ("--leader-elect=false", "--bind-address=127.0.0.1", "--profiling=false", *_CLIENT_RATE)
    controllers: list[str | Path] = [
        *own,
        *_identity(manager),
        f"--client-ca-file={pki}/ca.crt",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--node-monitor-grace-period={_NODE_GRACE}",
    ]
    for name, which in (("kube-controller-manager", "*,-job-controller"), (JOB_CONTROLLER, "job-controller")):
        port = apiserver.free_port()
        ours = [f"--controllers={which}", f"--secure-port={port}"]
        plane.spawn(name, [programs / "kube-controller-manager", *controllers, *ours])
        if name == JOB_CONTROLLER:
            plane.job_metrics = f"https://127.0.0.1:{port}/metrics"
    plane.spawn(
        "kube-scheduler",
        [programs / "kube-scheduler", *own, *_identity(scheduler), f"--secure-port={apiserver.free_port()}"],
    )


def _identity(kubeconfig: Path) -> list[str]:
    flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return [f"--{flag}={kubeconfig}" for flag in flags]


def _start_kwok(plane: Plane) -> None:
    program = binaries.build_once(builds.KWOK) / "kwok"
    kubeconfig = plane.kubeconfig_of("kwok", ("system:masters",))
    command: list[str | Path] = [program, f"--kubeconfig={kubeconfig}", f"--config={_FAKE_KUBELET}", "--v=WARN"]
    # Its own default configuration would be read from the home directory, and hold stages that complete jobs.
    home = plane.directory / "kwok"
    home.mkdir(exist_ok=True)
    plane.spawn("kwok", command, environment={**os.environ, "HOME": str(home), "KWOK_WORKDIR": str(home)})


def _make_nodes(plane: Plane, count: int, pods_per_node: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda i: plane.api.post("/api/v1/nodes", _node(i, pods_per_node)), range(count)):
            pass

    def ready() -> bool:
        plane.pids()  # raises if one has ended
        nodes = plane.api.get("/api/v1/nodes")["items"]
        return len(nodes) == count and not any(node["spec"].get("taints") for node in nodes)

    until(ready, f"{count} nodes are ready", timeout_s=_READY_S, every_s=0.2, error=BenchError)
    until(
        lambda: plane.api.get("/api/v1/namespaces/default/serviceaccounts/default"),
        "the default service account exists",
        timeout_s=_READY_S,
        every_s=0.2,
        passing=BenchError,
        error=BenchError,
    )


def _node(i: int, pods: int) -> dict[str, Any]:
    name = f"fake-{i}"
    room = {
        "cpu": "1k",
        "memory": "4Ti",
        "ephemeral-storage": "4Ti",
        "pods": str(pods),
        "nvidia.com/gpu": "1k",
    }
    conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}] + [
        {"type": kind, "status": "False", "reason": "Fake"}
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": conditions,
            "addresses": [{"type": "Hostname", "address": name}],
        },
    }
