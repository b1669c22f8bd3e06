"""Operators as processes of their own, under the chart's own rights, against a bare API server."""

from __future__ import annotations

import base64
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from harness.replica import Replica
from manifests import render
from tests.api.conftest import Api

FAST_LEASE = {
    "LEASE_DURATION_SECONDS": "5",
    "LEASE_RENEW_DEADLINE_SECONDS": "4",
    "LEASE_RETRY_SECONDS": "0.3",
}


class Replicas:
    """Starts replicas by name as the chart's service account; pods of those names stand for theirs. `install`: the chart's
    objects."""

    def __init__(self, api: Api, directory: Path, install: Path = render.INSTALL) -> None:
        self._api, self._directory = api, directory
        self._started: list[Replica] = []
        api.done("apply", "--server-side", "--force-conflicts", f"--filename={install}")

    def __call__(
        self,
        name: str,
        server: str | None = None,
        settings: Mapping[str, str] | None = None,
        clock_off_s: float = 0.0,
    ) -> Replica:
        """Start one; `server`: where it finds the API server, if not where it is. `settings`: beside a lease that is short.
        `clock_off_s`: see Replica."""
        template = self._api.get("deployment", "regroup-operator", f"--namespace={render.NAMESPACE}")["spec"][
            "template"
        ]
        metadata = {"name": name, "namespace": render.NAMESPACE, "labels": template["metadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        if self._api.kubectl("get", "pod", name, f"--namespace={render.NAMESPACE}").code:
            self._api.done("create", "--filename=-", document=pod)
        number = len(self._started)
        replica = Replica(
            name,
            self._kubeconfig(number, server),
            self._directory / f"{name}-{number}.log",
            namespace=render.NAMESPACE,
            settings={**FAST_LEASE, **(settings or {})},
            clock_off_s=clock_off_s,
        )
        self._started.append(replica)
        return replica

    def _kubeconfig(self, number: int, server: str | None) -> Path:
        token = self._api.done("create", "token", "regroup", f"--namespace={render.NAMESPACE}").strip()
        config = yaml.safe_load(self._api.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        if server is not None:
            config["clusters"][0]["cluster"] = {"server": server}
        kubeconfig = self._directory / f"kubeconfig-{number}"
        kubeconfig.write_text(yaml.safe_dump(config))
        return kubeconfig

    def stop(self) -> None:
        for replica in self._started:
            replica.stop(signal.SIGKILL)


@contextmanager
def replicas(api: Api, directory: Path) -> Iterator[Replicas]:
    """Replicas for as long as the block lasts."""
    started = Replicas(api, directory)
    try:
        yield started
    finally:
        started.stop()


def ca_of(api: Api) -> str:
    """Return the CA that the operators have made."""
    secret = api.get("secret", "regroup-ca", f"--namespace={render.NAMESPACE}")
    return base64.b64decode(secret["data"]["ca.crt"]).decode()
