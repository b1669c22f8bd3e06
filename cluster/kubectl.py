"""Runs kubectl against one kubeconfig, and turns its failures into sentences. Frequent reads go to the API server directly."""

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import urllib3
import yaml
from kubernetes import client, config

from cluster import paths
from cluster.errors import ClusterError
from harness.polling import until

T = TypeVar("T")


class NotYetError(ClusterError):
    """The API server refused a call, or did not answer. `wait_until` takes it as "not yet" and asks again."""


_READ_TIMEOUT_S = (5, 30)
"""Seconds to connect, and to wait for the answer, in each attempt."""
_ATTEMPTS = urllib3.Retry(None, connect=0, read=1, redirect=0, status=0, other=0, respect_retry_after_header=False)
"""A read without an answer is repeated once, because the server may have closed the kept connection."""


class Kubectl:
    """kubectl with a kubeconfig, and a context of it. The program is the one built here, else the one on PATH."""

    def __init__(self, kubeconfig: Path | None, *, context: str | None = None) -> None:
        self._kubeconfig, self._context = kubeconfig, context
        built = paths.bin_dir() / "kubectl"
        self._command = [str(built) if built.exists() else "kubectl"]
        if kubeconfig is not None:
            self._command += ["--kubeconfig", str(kubeconfig)]
        if context is not None:
            self._command += ["--context", context]

    def run(self, *arguments: str, text: str | None = None, timeout_s: float = 60) -> str:
        """Return kubectl's output. Raise ClusterError with its message if it fails. `text` is standard input."""
        try:
            done = subprocess.run(
                [*self._command, *arguments], input=text, capture_output=True, text=True, timeout=timeout_s
            )
        except FileNotFoundError:
            raise ClusterError("kubectl is not there: run `python -m cluster build` first.") from None
        except subprocess.TimeoutExpired:
            raise NotYetError(f"kubectl {arguments[0]} gave no answer within {timeout_s:.0f} s.") from None
        if done.returncode != 0:
            raise NotYetError(f"kubectl {' '.join(arguments[:3])}: {done.stderr.strip()[-600:]}")
        return done.stdout

    def stream(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start kubectl and return its process. The caller reads its standard output, and ends it."""
        command = [*self._command, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def get(self, *arguments: str) -> Any:
        """Return the parsed JSON of `kubectl get`."""
        return json.loads(self.run("get", *arguments, "--output=json"))

    def read(self, path: str, **query: str) -> str:
        """Return the API server's answer to GET `path`, over a connection that is kept. Raise ClusterError as `run` does.

        It is for frequent reads: 4 ms of CPU, where a process of kubectl takes 130.
        """
        api = self._api
        request = api.param_serialize("GET", path, query_params=list(query.items()), auth_settings=["BearerToken"])
        try:
            answer = api.call_api(*request, _request_timeout=_READ_TIMEOUT_S).response
            text = answer.data.decode()
        except (client.ApiException, urllib3.exceptions.HTTPError) as error:
            raise NotYetError(f"GET {path}: {error}") from None
        if answer.status != 200:
            raise NotYetError(f"GET {path}: {answer.status} {_message(text)}")
        return str(text)

    @functools.cached_property
    def _api(self) -> client.ApiClient:
        file, settings = None, client.Configuration()
        settings.retries = _ATTEMPTS
        if self._kubeconfig is not None:  # our own cluster, on this machine
            file, settings.proxy = str(self._kubeconfig), None
        try:
            config.load_kube_config(file, self._context, settings, persist_config=False)  # type: ignore[no-untyped-call]
            return client.ApiClient(settings)
        except (config.ConfigException, yaml.YAMLError) as error:
            raise ClusterError(f"The kubeconfig cannot be used: {error}") from None

    def apply(self, *documents: dict[str, Any]) -> None:
        """Apply documents server-side."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.run("apply", "--server-side", "--force-conflicts", "--filename=-", text=json.dumps(items))


def wait_until(condition: Callable[[], T | None], what: str, *, timeout_s: float, every_s: float = 0.1) -> T:
    """Wait as harness.polling.until does; a NotYetError counts as "not yet". Raise ClusterError at the deadline."""
    return until(condition, what, timeout_s=timeout_s, every_s=every_s, passing=NotYetError, error=ClusterError)


def _message(answer: str) -> str:
    """Return the message of a Status object, else the beginning of the text."""
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200]
