"""Operators as processes of their own, under the chart's own rights, against a bare API server."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from cluster import apiserver
from manifests import render
from tests.api.conftest import Api

DEADLINE_S = 40.0


class Replica:
    """One operator process."""

    def __init__(self, name: str, kubeconfig: Path, log: Path) -> None:
        self.name, self.log = name, log
        self.agents, self.ops = apiserver.free_port(), apiserver.free_port()
        settings = {
            "NAMESPACE": render.NAMESPACE,
            "MEMBERSHIP_HOST": "127.0.0.1",
            "MEMBERSHIP_PORT": str(self.agents),
            "OPS_HOST": "127.0.0.1",
            "OPS_PORT": str(self.ops),
            "POD_NAME": name,
            "LEASE_DURATION_SECONDS": "3",
            "LEASE_RENEW_DEADLINE_SECONDS": "2",
            "LEASE_RETRY_SECONDS": "0.3",
        }
        environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        environ |= {f"REGROUP_SETTINGS_{key}": value for key, value in settings.items()}
        self.process = subprocess.Popen([sys.executable, "-m", "regroup_operator"], env=environ, stderr=log.open("w"))

    def page(self, path: str) -> tuple[int, str]:
        """Return status and text of a page of the ops port; (0, "") while nobody listens."""
        return get(f"http://127.0.0.1:{self.ops}{path}")

    def agent_call(self, ca: str | None = None) -> tuple[int, str]:
        """Return what an agent without a token is told; (0, why) where TLS or TCP fail."""
        context = ssl.create_default_context(cadata=ca)
        context.check_hostname = False  # the certificate is for the Service's name, which only a cluster resolves
        return get(f"https://127.0.0.1:{self.agents}/v1/namespaces/n/pods/p/commands", context)

    def ready(self) -> bool:
        """Whether it says so; fails if it ended."""
        assert self.process.poll() is None, self.log.read_text()
        return self.page("/readyz")[0] == 200

    def leads(self) -> bool:
        """Whether it says so; fails if it ended."""
        assert self.process.poll() is None, self.log.read_text()
        return "regroup_leader 1.0" in self.page("/metrics")[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, wait for its end, return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


def get(url: str, context: ssl.SSLContext | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Replicas:
    """Starts replicas by name as the chart's service account; pods of those names stand for theirs. `install`: the chart's
    objects."""

    def __init__(self, api: Api, directory: Path, install: Path = render.INSTALL) -> None:
        self._api, self._directory = api, directory
        self._started: list[Replica] = []
        api.done("apply", "--server-side", "--force-conflicts", f"--filename={install}")

    def __call__(self, name: str, server: str | None = None) -> Replica:
        """Start one; `server`: where it finds the API server, if not where it is."""
        template = self._api.get("deployment", "regroup-operator", f"--namespace={render.NAMESPACE}")["spec"][
            "template"
        ]
        metadata = {"name": name, "namespace": render.NAMESPACE, "labels": template["metadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        if self._api.kubectl("get", "pod", name, f"--namespace={render.NAMESPACE}").code:
            self._api.done("create", "--filename=-", document=pod)
        number = len(self._started)
        replica = Replica(name, self._kubeconfig(number, server), self._directory / f"{name}-{number}.log")
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
