"""A job that trains, for tests of what goes wrong between an operator and the API server.

Whole operators, a real API server, and real agents, whose trainers only speak the protocol. The test is the kubelet (it says that
pods run, and starts their agents) and the network: what passes between each operator and the API server goes through an `Edge`.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _regroup_agent.build import build
from harness import processes
from harness.polling import until
from harness.replica import Replica
from manifests import render
from regroup.protocol import env
from regroup_operator.endpoint.certificates import Authority, server_context
from tests.api.conftest import Api
from tests.api.edge import Edge, Passed, edge, edge_to
from tests.api.replicas import Replicas, replicas
from tests.builders.jobs import make_job

TRAINER = Path(__file__).parents[1] / "trainer" / "raw_trainer.py"
JOB = "trained"
"""No other test's job has this name: operators serve the jobs of all of them."""


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
            env.MAX_RESTARTS: "1000",
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
        until(lambda: len(self.pods()) == number, f"{number} pods", timeout_s=60, every_s=0.2)
        for name, pod in self.pods().items():
            if name not in self._agents:
                self._start(name, pod)

    def _start(self, name: str, pod: dict[str, Any]) -> None:
        home = self._directory / f"{name}-{pod['metadata']['uid'][:8]}"  # a name may come again
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
        """Kill the one that was started last of those that run."""
        running = [note["pid"] for note in self.noted("started") if processes.alive(note["pid"])]
        os.kill(running[-1], signal.SIGKILL)

    def forget(self) -> None:
        """End the agents whose pods are gone, as a kubelet would. Without one the API server deletes a pod at once: a new leader
        may ask for that before the agent has called, and then cannot tell it to stop."""
        for name in self._agents.keys() - self.pods().keys():
            self._agents[name].terminate()
            self._agents[name].wait(30)
            del self._agents[name]

    def stop(self) -> None:
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait(10)


class World:
    """A job that trains, an operator that leads, and perhaps one that stands by. A test may stop a leader: another one starts."""

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

    @property
    def wire(self) -> Edge:
        """What is between the newest operator and the API server."""
        return self._wires[-1]

    def start_again(self, *, settings: Mapping[str, str] | None = None, clock_off_s: float = 0.0) -> None:
        """Start an operator in the place of the leader, which has ended, as a kubelet does with its container. `settings`,
        `clock_off_s`: see Replica."""
        self.leader.process.wait(10)
        self.leader = self._start(f"operator-{len(self._wires)}", self.wire.url, settings, clock_off_s)

    def be_led(self) -> None:
        """Wait until an operator leads; one that has ended is started again."""

        def led() -> bool:
            if self.leader.process.poll() is not None:
                self.start_again()
            return "regroup_leader 1.0" in self.leader.page("/metrics")[1]

        until(led, "an operator leads", timeout_s=60, every_s=0.1)
        self._turn_to_leader()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._api.get("dtj", JOB, f"--namespace={self._namespace}").get("status", {})
        return found

    def lease_off_s(self) -> float:
        """Return by how much the time of the lease's last renewal is ahead of this machine's clock."""
        spec = self._api.get("lease", "regroup", f"--namespace={render.NAMESPACE}")["spec"]
        return (datetime.fromisoformat(spec["renewTime"]) - datetime.now(UTC)).total_seconds()

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
        target = f"https://127.0.0.1:{self.leader.agents}"
        if self._service.target != target:
            self._service.turn_to(target)

    def trains(self, workers: int, after: int = 0, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until a generation above `after` with so many members is adopted and commits; return the membership."""

        def there() -> dict[str, Any]:
            status = self._api.get("dtj", JOB, f"--namespace={self._namespace}").get("status", {})
            membership: dict[str, Any] = status.get("membership") or {}
            trains = membership.get("adopted") and status["summary"]["state"] == "Running"
            return (
                membership if trains and membership["worldSize"] == workers and membership["generation"] > after else {}
            )

        return until(there, f"{workers} workers train", timeout_s=timeout_s, every_s=0.2, details=self._described)

    def _described(self) -> str:
        return self._api.done("describe", "dtj", JOB, f"--namespace={self._namespace}")

    def scale(self, workers: int) -> None:
        self._api.done("scale", "dtj", JOB, f"--replicas={workers}", f"--namespace={self._namespace}")

    def memberships(self) -> list[dict[str, Any]]:
        """Return the membership in every status that the API server took from any operator, in its order."""
        taken = [json.loads(p.answer) for w in self._wires for p in w.passed if p.status == 200 and is_status(p)]
        taken.sort(key=lambda job: int(job["metadata"]["resourceVersion"]))
        return [job["status"]["membership"] for job in taken if "membership" in job["status"]]

    def pods_made(self, job: str = JOB) -> Counter[str]:
        """Return how often the API server has made each worker's pod for any operator."""
        made = [json.loads(p.answer) for w in self._wires for p in w.passed if p.status == 201 and is_pod(p, job)]
        return Counter(pod["metadata"]["name"] for pod in made)


def is_status(request: Passed) -> bool:
    return request.method == "PUT" and request.path.endswith(f"/{JOB}/status")


def is_pod(request: Passed, job: str = JOB) -> bool:
    if request.method != "POST" or not request.path.endswith("/pods"):
        return False
    return str(json.loads(request.body)["metadata"].get("name")).startswith(f"{job}-worker-")


@contextmanager
def trained(api: Api, directory: Path, namespace: str, workers: int = 2) -> Iterator[tuple[World, Kubelet]]:
    """A job of so many workers, between one and one more, for as long as the block lasts."""
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
        world = World(api, namespace, lambda: life.enter_context(edge_to(api.kubeconfig)), service, start)
        kubelet = Kubelet(api, namespace, service, directory / "ca.crt", directory)
        life.callback(kubelet.stop)
        job = make_job(
            JOB,
            replicas=workers,
            elasticPolicy={"minReplicas": 1, "maxReplicas": workers + 1},
            recovery={"maxRestarts": 1000},
        )
        job["metadata"]["namespace"] = namespace
        api.done("create", "--filename=-", document=job)
        # Nothing of it is left to the operators of the next one; there is no garbage collector.
        life.callback(api.done, "delete", "pods", "--all", "--force", "--grace-period=0", f"--namespace={namespace}")
        life.callback(api.done, "delete", "dtj", JOB, f"--namespace={namespace}")
        kubelet.run(workers)
        yield world, kubelet
