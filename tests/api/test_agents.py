"""Agents that call a real operator over real sockets: all at once after the leader was killed, and with stolen tokens."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bench.scale.api import Api as Requests
from bench.scale.fleet import Fleet, Setup
from bench.scale.operator import job_body, parse_metrics
from bench.scale.tokens import ServiceAccount, TokenMint
from harness.polling import until
from harness.replica import Replica
from manifests import render
from regroup.protocol import VERSION, codec, wire
from regroup.protocol.state import Condition, Phase
from regroup_operator.api import GROUP, PLURAL
from regroup_operator.api import VERSION as API_VERSION
from tests.api.conftest import Api
from tests.api.replicas import Replicas, replicas

SERVICE = f"regroup.{render.NAMESPACE}.svc"
JOBS, WORKERS = 5, 40
GRACE_S = 10
QUICK = {
    "TERM_GRACE_SECONDS": str(GRACE_S),
    "PROGRESS_WRITE_SECONDS": "1",
    "LEASE_DURATION_SECONDS": "60",
    "LEASE_RENEW_DEADLINE_SECONDS": "50",
}
"""A term whose grace is over sooner, and statuses that are written again after a second: they say when each job was looked at. A
leader on a busy machine does not lose this lease; the test ends it, in the place of the time that a standby waits."""


class Namespace:
    """A namespace with its service account, whose pods the test runs as a kubelet does."""

    def __init__(self, api: Api, name: str) -> None:
        self.name, self.requests = name, Requests(api.kubeconfig)
        api.done("create", "serviceaccount", "default", f"--namespace={name}")
        account = api.get("serviceaccount", "default", f"--namespace={name}")
        self.account = ServiceAccount(name, "default", account["metadata"]["uid"])
        self._jobs = f"/apis/{GROUP}/{API_VERSION}/namespaces/{name}/{PLURAL}"

    def create(self, *jobs: str, workers: int) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda job: self.requests.post(self._jobs, job_body(job, workers)), jobs))

    def suspend(self, job: str) -> None:
        self.requests.merge(f"{self._jobs}/{job}", {"spec": {"runPolicy": {"suspend": True}}})

    def pods(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.requests.get(f"/api/v1/namespaces/{self.name}/pods")["items"]
        return items

    def statuses(self) -> list[dict[str, Any]]:
        return [job.get("status") or {} for job in self.requests.get(self._jobs)["items"]]

    def states(self) -> list[str]:
        """Return summary.state of each job, empty where a job has none."""
        return [(status.get("summary") or {}).get("state", "") for status in self.statuses()]

    def run_pods(self, number: int) -> list[dict[str, Any]]:
        """Wait for so many pods and say that they run."""
        until(lambda: len(self.pods()) == number, f"{number} pods", every_s=0.2)
        pods = self.pods()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(self._run, pods))
        return pods

    def _run(self, pod: dict[str, Any]) -> None:
        state = {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}
        container = {"name": "trainer", "ready": True, "restartCount": 0, "image": "i", "imageID": "i", "state": state}
        status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
        path = f"/api/v1/namespaces/{self.name}/pods/{pod['metadata']['name']}/status"
        self.requests.merge(path, {"status": {**status, "containerStatuses": [container]}})


@pytest.fixture
def start(api: Api, tmp_path: Path) -> Iterator[Replicas]:
    with replicas(api, tmp_path) as started:
        yield started


def write_ca(api: Api, directory: Path) -> Path:
    secret = api.get("secret", "regroup-ca", f"--namespace={render.NAMESPACE}")
    file = directory / "ca.crt"
    file.write_bytes(base64.b64decode(secret["data"]["ca.crt"]))
    return file


def test_200_agents_reconnect_after_the_leader_is_killed_and_nobody_is_dropped(
    api: Api, namespace: str, start: Replicas, tmp_path: Path
) -> None:
    place = Namespace(api, namespace)
    first = start("storm-1", settings=QUICK)
    until(first.leads, "an operator leads")
    second = start("storm-2", settings=QUICK)
    until(second.ready, "the other one stands by")
    until(lambda: requests_of(second).get("get /openid/v1/jwks") == 1, "it has the issuer's keys")
    ports = {replica.name: replica.agents for replica in (first, second)}
    ca_file, key = write_ca(api, tmp_path), api.kubeconfig.parent / "sa.key"
    fleet = Fleet(
        Setup(str(api.kubeconfig), str(key), str(ca_file), SERVICE, render.NAMESPACE, namespace, ports),
        tmp_path / "agents.log",
    )
    try:
        place.create(*(f"storm-{i}" for i in range(JOBS)), workers=WORKERS)
        place.run_pods(JOBS * WORKERS)

        until(
            lambda: place.states() == ["Running"] * JOBS,
            "all jobs run",
            every_s=0.2,
            details=lambda: str(fleet.ask("counts")),
        )
        before, uids = fleet.ask("counts"), {pod["metadata"]["uid"] for pod in place.pods()}

        assert first.leads(), "it has kept its lease"
        first.stop(signal.SIGKILL)
        patch = json.dumps({"spec": {"holderIdentity": ""}})
        api.done("patch", "lease", "regroup", f"--namespace={render.NAMESPACE}", "--type=merge", f"--patch={patch}")
        until(second.leads, "the other one leads")
        led_at = time.time()
        until(
            lambda: fleet.ask("counts")["ups"] - before["ups"] >= JOBS * WORKERS,
            "all agents are back",
            every_s=0.2,
            details=lambda: str(fleet.ask("counts")),
        )

        def looked_at() -> bool:
            """Each job was looked at when silence was no excuse any more."""
            seen = [datetime.fromisoformat(status["observedAt"]).timestamp() for status in place.statuses()]
            return min(seen) > led_at + GRACE_S + 1

        until(looked_at, "the term's grace is over", every_s=0.2, details=lambda: str(fleet.ask("counts")))
        after = fleet.ask("counts")
        assert (after["up"], after["downs"] - before["downs"]) == (JOBS * WORKERS, JOBS * WORKERS), after
        assert [status["membership"]["generation"] for status in place.statuses()] == [1] * JOBS
        assert not any(status.get("incidents") for status in place.statuses())
        assert place.states() == ["Running"] * JOBS
        assert {pod["metadata"]["uid"] for pod in place.pods()} == uids
        assert reviews_of(second) == 0
    finally:
        second.stop()  # it gives the lease away: the next test does not wait for its end
        fleet.stop()


def requests_of(operator: Replica) -> dict[str, float]:
    """Return how many requests it has sent to the API server, by verb and resource."""
    return parse_metrics(operator.page("/metrics")[1], 0.0).requests


def reviews_of(operator: Replica) -> float:
    """Return how many TokenReviews it has asked for."""
    return requests_of(operator).get("create tokenreviews", 0.0)


class Caller:
    """Says hello to an operator with any token."""

    def __init__(self, operator: Replica, ca_file: Path) -> None:
        self._operator = operator
        self._context = ssl.create_default_context(cafile=str(ca_file))
        self._context.check_hostname = False  # the certificate is for the Service's name, which only a cluster resolves

    def hello(self, token: str, pod: dict[str, Any]) -> tuple[int, str]:
        """Return the status, and the sentence of a refusal."""
        metadata = pod["metadata"]
        condition = Condition(incarnation=0, generation=0, phase=Phase.STARTING, session=True)
        uid, job_uid = metadata["uid"], metadata["ownerReferences"][0]["uid"]
        report = wire.Report(job_uid, uid, "boot", condition, None, 0, wire.Hello(VERSION, 1))
        connection = http.client.HTTPSConnection("127.0.0.1", self._operator.agents, context=self._context, timeout=30)
        path = f"/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/stream"
        connection.request("POST", path, codec.line(report), {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, json.loads(text)["error"] if answer.status != 200 else ""


def test_stolen_token_opens_nothing_and_only_one_of_an_unknown_key_is_reviewed(
    api: Api, namespace: str, start: Replicas, tmp_path: Path
) -> None:
    place = Namespace(api, namespace)
    operator = start("thieves-1")
    until(operator.leads, "an operator leads")
    place.create("robbed", "thief", workers=2)
    pods = {pod["metadata"]["name"]: pod for pod in place.run_pods(4)}
    robbed, neighbour, thief = (pods[f"{name}-0"] for name in ("robbed-worker-0", "robbed-worker-1", "thief-worker-0"))
    deleted = pods["thief-worker-1-0"]
    mint = TokenMint(api.kubeconfig.parent / "sa.key")
    strange = TokenMint(strange_key(tmp_path))
    caller = Caller(operator, write_ca(api, tmp_path))

    def of(pod: dict[str, Any], uid: str = "") -> tuple[ServiceAccount, str, str]:
        return place.account, pod["metadata"]["name"], uid or pod["metadata"]["uid"]

    def token_of(pod: dict[str, Any], uid: str = "", **claims: Any) -> str:
        return mint.token(*of(pod, uid), **claims)

    own = token_of(robbed)
    assert caller.hello(own, robbed) == (200, "")
    assert caller.hello(own, robbed) == (200, "")
    assert reviews_of(operator) == 0, "the operator has the key, by the rights that the chart gives it"

    place.suspend("thief")
    until(
        lambda: len(place.pods()) == 2, "the thief's pods are gone, and nobody makes others of their names", every_s=0.1
    )
    assert caller.hello(token_of(deleted), deleted) == (200, ""), (
        "the agent of a pod that has vanished is heard for 5 s"
    )
    head, claims, signature = token_of(robbed).split(".")
    # A token, whose path it is used for, the answer, and how many reviews all its calls cost together.
    stolen: list[tuple[str, str, dict[str, Any], int, str, int]] = [
        ("of another pod", token_of(neighbour), robbed, 403, "is bound to pod", 0),
        ("of a pod of another job", token_of(thief), robbed, 403, "is bound to pod", 0),
        ("for another audience", token_of(robbed, audiences=("vault",)), robbed, 401, "for vault, not for regroup", 0),
        ("expired", token_of(robbed, issued_s=time.time() - 7200), robbed, 401, "expired", 0),
        ("of an earlier pod of that name", token_of(robbed, uid="gone"), robbed, 403, "an earlier pod", 0),
        ("forged", f"{head}.{claims}.{signature[::-1]}", robbed, 401, "is not that of key", 0),
        ("of a key of the thief's", strange.token(*of(robbed)), robbed, 401, "does not accept the token", 1),
    ]
    for what, token, pod, status, says, cost in stolen:
        reviews = reviews_of(operator)
        for _ in range(3):
            got, said = caller.hello(token, pod)
            assert (got, says in said) == (status, True), (what, got, said)
        assert reviews_of(operator) - reviews == cost, what
    _until_gone(caller, token_of(deleted), deleted)
    reviews = reviews_of(operator)
    assert caller.hello(token_of(deleted, issued_s=time.time() - 1), deleted)[0] == 403
    assert reviews_of(operator) == reviews, "of a pod that is gone nobody is asked"
    assert caller.hello(own, robbed) == (200, ""), "the worker itself is served as before"


def strange_key(directory: Path) -> Path:
    """Return the file of a key that the API server does not know."""
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = directory / "strange.key"
    file.write_bytes(pem)
    return file


def _until_gone(caller: Caller, token: str, pod: dict[str, Any]) -> None:
    """Wait until a pod is not known any more: its agent is heard for a moment (regroup_operator.kube.pods.GONE_S)."""
    known: Callable[[], bool] = lambda: caller.hello(token, pod)[0] == 403  # noqa: E731
    until(known, "the pod is forgotten", every_s=0.5)
