"""A leader that is stopped in the middle of a write, and wakes up when another one leads: its write changes nothing, and it ends.

Two whole operators, a real API server, and real agents, whose trainers only speak the protocol. The test is the kubelet (it says
that pods run, and starts their agents) and the network: it keeps one request of the first operator back, on its way to the API
server, until the second operator has led for a while.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from _regroup_agent.build import build
from harness.polling import until
from regroup.protocol import env
from regroup_operator.endpoint.certificates import Authority, server_context
from tests.api.conftest import Api
from tests.api.edge import Edge, Held, Passed, edge
from tests.api.replicas import Replica, Replicas, replicas
from tests.builders.jobs import make_job

TRAINER = Path(__file__).parents[1] / "trainer" / "raw_trainer.py"
JOB = "stale"


class Kubelet:
    """Runs the agents of a namespace's pods as processes of this machine."""

    def __init__(self, api: Api, namespace: str, service: Edge, ca_file: Path, directory: Path) -> None:
        self._api, self._namespace, self._directory = api, namespace, directory
        self._notes = directory / "notes"
        self._notes.mkdir()
        self._zipapp = directory / "agent.pyz"
        build(self._zipapp)
        self._common = {
            **{k: v for k, v in os.environ.items() if not k.startswith("REGROUP_")},
            env.OPERATOR_URL: service.url,
            env.NAMESPACE: namespace,
            env.POD_IP: "127.0.0.1",
            env.JOB_NAME: JOB,
            env.PROCESSES: "1",
            env.MAX_RESTARTS: "10",
            env.CA_FILE: str(ca_file),
            env.PRELOAD: "json",
            "NOTES": str(self._notes),
        }
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def pods(self) -> dict[str, dict[str, Any]]:
        found = self._api.get("pods", f"--namespace={self._namespace}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def run(self, number: int) -> None:
        """Wait for so many pods and start what is not started."""
        until(lambda: len(self.pods()) == number, f"{number} pods", timeout_s=30, every_s=0.2)
        for name, pod in self.pods().items():
            if name not in self._agents:
                self._start(name, pod)

    def _start(self, name: str, pod: dict[str, Any]) -> None:
        home = self._directory / name
        home.mkdir()
        bound = ("--audience=regroup", "--bound-object-kind=Pod", f"--bound-object-name={name}")
        (home / "token").write_text(
            self._api.done("create", "token", "default", f"--namespace={self._namespace}", *bound)
        )
        container = {"name": "trainer", "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}
        state = {"state": {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}}
        status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
        patch = json.dumps({"status": {**status, "containerStatuses": [container | state]}})
        options = ("--subresource=status", "--type=merge", f"--patch={patch}")
        self._api.done("patch", "pod", name, f"--namespace={self._namespace}", *options)
        environ = {
            **self._common,
            env.POD_NAME: name,
            env.POD_UID: pod["metadata"]["uid"],
            env.JOB_UID: pod["metadata"]["ownerReferences"][0]["uid"],
            env.TOKEN_FILE: str(home / "token"),
            env.STATE_DIR: str(home),
        }
        command = [sys.executable, "-I", str(self._zipapp), "--", sys.executable, str(TRAINER)]
        with (home / "log").open("wb") as log:
            self._agents[name] = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)

    def noted(self, what: str) -> list[dict[str, Any]]:
        """Return what the trainers noted, oldest first."""
        lines = [line for path in self._notes.iterdir() for line in path.read_text().splitlines() if line.endswith("}")]
        notes = sorted(map(json.loads, lines), key=lambda note: float(note["at"]))
        return [note for note in notes if note["what"] == what]

    def kill_a_trainer(self) -> None:
        os.kill(self.noted("started")[-1]["pid"], signal.SIGKILL)

    def stop(self) -> None:
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait(10)


class World:
    """A job that trains, an operator that leads, and one that stands by. Each test stops a leader: the next one starts another."""

    def __init__(self, api: Api, namespace: str, server: Callable[[], Edge], service: Edge, start: Replicas) -> None:
        self._api, self._namespace, self._server, self._start = api, namespace, server, start
        self._service = service
        """Between the agents and the leader."""
        self._wires: list[Edge] = []
        """Between each operator and the API server, the oldest first."""
        self.leader = self._operator()
        until(self.leader.leads, "an operator leads", timeout_s=40)
        self._turn_to_leader()
        self.other: Replica | None = None

    def _operator(self) -> Replica:
        self._wires.append(self._server())
        return self._start(f"operator-{len(self._wires)}", self._wires[-1].url)

    def stand_by(self) -> Edge:
        """Start another operator; return what is between the leader and the API server once the other one could lead."""
        wire = self._wires[-1]
        self.other = self._operator()
        until(self.other.ready, "the other one stands by", timeout_s=40)
        return wire

    def take_over(self) -> Replica:
        """Stop the leader's process; return it once the other one leads, and agents are led to that one."""
        assert self.other is not None
        stopped, self.leader, self.other = self.leader, self.other, None
        stopped.process.send_signal(signal.SIGSTOP)
        until(self.leader.leads, "the other one leads", timeout_s=30)
        self._turn_to_leader()
        return stopped

    def _turn_to_leader(self) -> None:
        self._service.turn_to(f"https://127.0.0.1:{self.leader.agents}")

    def trains(self, workers: int, after: int = 0) -> dict[str, Any]:
        """Wait until a generation above `after` with so many members is adopted and commits; return the membership."""

        def there() -> dict[str, Any]:
            status = self._api.get("dtj", JOB, f"--namespace={self._namespace}").get("status", {})
            membership: dict[str, Any] = status.get("membership") or {}
            trains = membership.get("adopted") and status["summary"]["state"] == "Running"
            return (
                membership if trains and membership["worldSize"] == workers and membership["generation"] > after else {}
            )

        return until(there, f"{workers} workers train", timeout_s=60, every_s=0.2, details=self._described)

    def _described(self) -> str:
        return self._api.done("describe", "dtj", JOB, f"--namespace={self._namespace}")

    def scale(self, workers: int) -> None:
        self._api.done("scale", "dtj", JOB, f"--replicas={workers}", f"--namespace={self._namespace}")

    def memberships(self) -> list[dict[str, Any]]:
        """Return the membership in every status that the API server took from any operator, in its order."""
        taken = [json.loads(p.answer) for w in self._wires for p in w.passed if p.status == 200 and is_status(p)]
        taken.sort(key=lambda job: int(job["metadata"]["resourceVersion"]))
        return [job["status"]["membership"] for job in taken if "membership" in job["status"]]

    def pods_made(self) -> Counter[str]:
        """Return how often the API server has made each worker's pod for any operator."""
        made = [json.loads(p.answer) for w in self._wires for p in w.passed if p.status == 201 and is_pod(p)]
        return Counter(pod["metadata"]["name"] for pod in made)


def is_status(request: Passed) -> bool:
    return request.method == "PUT" and request.path.endswith(f"/{JOB}/status")


def is_pod(request: Passed) -> bool:
    if request.method != "POST" or not request.path.endswith("/pods"):
        return False
    return str(json.loads(request.body)["metadata"].get("name")).startswith(f"{JOB}-worker-")


@pytest.fixture(scope="module")
def running(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Kubelet]]:
    directory, namespace = tmp_path_factory.mktemp("stale"), "stale-writes"
    server = yaml.safe_load(api.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    trusted = ssl.create_default_context(cafile=str(api.kubeconfig.parent / "ca.crt"))
    authority = Authority.create()
    (directory / "ca.crt").write_bytes(authority.ca_pem)
    serving = server_context(*authority.issue(["localhost"], ["127.0.0.1"]))
    leaders = ssl.create_default_context()
    leaders.check_hostname, leaders.verify_mode = False, ssl.CERT_NONE  # whom agents trust is tested elsewhere
    api.done("create", "namespace", namespace)
    api.done("create", "serviceaccount", "default", f"--namespace={namespace}")
    with ExitStack() as life:
        start = life.enter_context(replicas(api, directory))
        service = life.enter_context(edge("", leaders, serving))
        world = World(api, namespace, lambda: life.enter_context(edge(server, trusted)), service, start)
        kubelet = Kubelet(api, namespace, service, directory / "ca.crt", directory)
        life.callback(kubelet.stop)
        job = make_job(JOB, replicas=2, elasticPolicy={"minReplicas": 1, "maxReplicas": 3})
        job["metadata"]["namespace"] = namespace
        api.done("create", "--filename=-", document=job)
        kubelet.run(2)
        yield world, kubelet


@pytest.mark.parametrize(
    "woken_first", [True, False], ids=["it wakes while the write is under way", "the answer waits for it"]
)
def test_generation_that_a_stopped_leader_was_writing_never_exists(
    running: tuple[World, Kubelet], woken_first: bool
) -> None:
    world, kubelet = running
    wire, before = world.stand_by(), world.trains(2)["generation"]
    held = wire.hold(lambda r: is_status(r) and json.loads(r.body)["status"]["membership"]["generation"] > before)
    kubelet.kill_a_trainer()
    assert held.arrived.wait(20), "the leader wrote no generation without the dead worker"
    assert held.request is not None
    stale = json.loads(held.request.body)["status"]["membership"]
    stopped = world.take_over()
    after = world.trains(2, before)["generation"]
    if woken_first:
        _wakes_and_ends(stopped)
    assert _let_go(held) == (409, "Conflict")
    if not woken_first:
        _wakes_and_ends(stopped)
    assert world.trains(2)["generation"] >= after
    numbers = [membership["generation"] for membership in world.memberships()]
    assert stale["generation"] in numbers, "the other leader has given the number to a list of its own"
    assert numbers == sorted(numbers), "the status went back"
    uids = {(membership["generation"], membership["uid"]) for membership in world.memberships()}
    assert len(uids) == len(set(numbers)), f"a number was given twice: {sorted(uids)}"
    assert stale["uid"] not in {uid for _, uid in uids}, "what the stopped leader was writing has been written"
    documents = {(note["generation"], note["digest"]) for note in kubelet.noted("assignment")}
    assert len(documents) == len({number for number, _ in documents}), "workers got two documents of one number"


def test_pod_that_a_stopped_leader_was_making_is_made_once(running: tuple[World, Kubelet]) -> None:
    world, kubelet = running
    wire = world.stand_by()
    world.trains(2)
    held = wire.hold(is_pod)
    world.scale(3)
    assert held.arrived.wait(20), "the leader made no third pod"
    stopped = world.take_over()
    kubelet.run(3)
    world.trains(3)
    _wakes_and_ends(stopped)
    assert _let_go(held) == (409, "AlreadyExists")
    assert len(kubelet.pods()) == 3
    assert world.pods_made() == {f"{JOB}-worker-{slot}-0": 1 for slot in range(3)}


def _wakes_and_ends(stopped: Replica) -> None:
    """Let a stopped leader go on: it has to end by itself at once, with the lease as the reason."""
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.process.wait(5) == 1
    assert "lease" in stopped.log.read_text().splitlines()[-1]


def _let_go(held: Held) -> tuple[int, str]:
    """Let the request through, whether or not its sender still lives; return the API server's status and reason."""
    held.let_go()
    assert held.answered.wait(20)
    assert held.request is not None
    return held.request.status, json.loads(held.request.answer)["reason"]
