"""A job in the one-machine cluster: its pods are processes of this machine, its nodes and the API server can be stopped.

A thread of its own asks the API server, which gives no answer while it is stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from chaos.job import JobError, NothingToHitError
from chaos.kinds import SCRIPT
from chaos.plan import MAX_WORKERS, Fault, Scenario
from chaos.signals import Agent, SignalledJob, Trainer
from cluster import addresses, apiserver, controlplane, lifecycle, nodes, paths, settings
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl
from harness import faults, installation, traced_job
from harness.processes import name_of, start_of
from harness.traced_job import TracedJob

SCRIPTS = Path(__file__).parent / "scripts"
NAME, CLAIM = "chaos", "saved"
ASK_S = 0.2
LOOK_S = 0.3


@contextmanager
def installed() -> Iterator[Kubectl]:
    """Yield kubectl for a cluster with the operator of this tree. At the end take down a cluster that was not up before."""
    if lifecycle.context():
        raise JobError("REGROUP_CONTEXT names a cluster that is not ours to break: unset it.")
    was_up = lifecycle.is_up()
    kubectl = installation.cluster_up()
    try:
        installation.install(kubectl)
        yield kubectl
    finally:
        if not was_up:
            lifecycle.down()


class ClusterJob(SignalledJob):
    """A DistributedTrainingJob in a namespace of its own."""

    def __init__(self, kubectl: Kubectl, scenario: Scenario, directory: Path, steps: int) -> None:
        self._namespace = f"chaos-{uuid.uuid4().hex[:6]}"
        volumes = paths.cache() / "volumes" / self._namespace
        super().__init__(scenario, directory, volumes / f"{NAME}-trace", steps)
        self.checkpoints = volumes / CLAIM
        self._kubectl = kubectl
        self._job: TracedJob | None = None
        self._status: dict[str, Any] = {}
        self._pods: list[dict[str, Any]] = []
        self._workers_of: dict[str, str] = {}
        self._released: set[str] = set()
        self._agents: list[Agent] = []
        self._looked_s = 0.0
        self._over = threading.Event()
        self._asking = threading.Thread(target=self._ask, daemon=True)

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        job = self.scenario
        spec: dict[str, Any] = {}
        installation.namespace(self._kubectl, self._namespace)
        if job.tier != SCRIPT:
            installation.volume(self._kubectl, self._namespace, CLAIM)
            spec["checkpoint"] = {"volumeClaim": CLAIM, "everySeconds": 1, "keep": 3}
        pace = (self.traces / "pace").read_text()
        self._job = traced_job.start(
            self._kubectl,
            self._namespace,
            NAME,
            replicas=job.workers,
            elastic=(job.min_workers, MAX_WORKERS) if job.min_workers is not None else None,
            script="plain.py" if job.tier == SCRIPT else "session.py",
            scripts=SCRIPTS,
            environment={"CHAOS_TRACE": "/trace", "CHAOS_STEPS": self.steps},
            container={"resources": {"requests": {"cpu": "200m", "memory": "200Mi"}}},
            processesPerWorker=job.processes,
            recovery={"maxRestarts": 1_000_000},
            **spec,
        )
        (self.traces / "pace").write_text(pace)  # making the volume has emptied the directory
        self._asking.start()

    def ended(self) -> str | None:
        state = (self._status.get("summary") or {}).get("state")
        return str(state) if state in ("Succeeded", "Failed") else None

    def close(self) -> None:
        self.undo.close()
        self._over.set()
        if self._asking.is_alive():
            self._asking.join()
        for node in nodes.known():
            if not nodes.is_on(node):
                faults.power_on(node.name)
        if self._job is not None:
            shutil.copytree(self.traces, self.directory / "trace", dirs_exist_ok=True)
            installation.remove_namespace(self._kubectl, self._namespace)
            with suppress(ClusterError):
                self._kubectl.run("wait", "--for=delete", f"namespace/{self._namespace}", "--timeout=60s", timeout_s=70)
            shutil.rmtree(self.traces.parent, ignore_errors=True)

    # --- looking -----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        assert self._job is not None
        while not self._over.wait(ASK_S):
            with suppress(ClusterError, OSError, ValueError):
                self._status = self._job.status()
                self._pods = self._job.pods()
                self._workers_of |= {p["metadata"]["uid"]: p["metadata"]["name"] for p in self._pods}

    def status(self) -> dict[str, Any]:
        """Return the status from the API server's last answer."""
        return self._status

    def agents(self) -> list[Agent]:
        """Return the agents, found in this machine's list of processes."""
        found = []
        for pod in self._pods:
            every = faults.processes(pod["metadata"]["uid"])
            mains = [p for p in every if p.inner_pid == 1 and "agent.pyz" in p.command]
            for main in mains:
                children = [(p, name_of(p.pid)) for p in every if p.parent == main.pid]
                trainers = tuple(
                    Trainer(p.pid, p.inner_pid, start_of(p.pid))
                    for p, name in sorted(children, key=lambda c: c[1])
                    if name != "zygote"
                )
                zygote = next((p.pid for p, name in children if name == "zygote"), None)
                meta = pod["metadata"]
                found.append(Agent(main.pid, meta["name"], int(meta["labels"]["regroup.dev/slot"]), trainers, zygote))
        return sorted(found, key=lambda a: (a.slot, a.worker))

    def look(self) -> None:
        now_s = time.time()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        self._released |= {self._workers_of.get(uid, "") for uid in self._status.get("released") or ()}
        self._agents = self.agents()
        for agent in self._agents:
            if agent.worker not in self._released:
                self.alive_until_s |= {(agent.worker, t.inner_pid, t.start): now_s for t in agent.trainers}

    def changing(self) -> str:
        """Return how far the newest change of members is, from the agents' files on the nodes' disks."""
        files = []
        for pod in self._pods:
            kubelet = paths.state() / "nodes" / pod["spec"].get("nodeName", "none") / "kubelet"
            volumes = kubelet / "pods" / pod["metadata"]["uid"] / "volumes" / "kubernetes.io~empty-dir"
            for path in volumes.glob("*/agent.json"):
                with suppress(OSError, ValueError):
                    files.append(json.loads(path.read_text()))
        newest = max((f.get("entered", 0) for f in files), default=0)
        entered = [f for f in files if f.get("entered", 0) == newest]
        adopted = [f for f in entered if f.get("adopted", 0) == newest]
        if not newest or len(adopted) == len(entered):
            return ""
        return "adopting" if adopted else "forming"

    def diagnosis(self) -> str:
        out = [json.dumps({k: v for k, v in self._status.items() if k != "incidents"}, indent=1)]
        for command in (("get", "pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
            with suppress(ClusterError):
                out.append(self._kubectl.run("--namespace", self._namespace, *command))
        for pod in self._pods:
            with suppress(ClusterError):
                log = self._kubectl.run(
                    "--namespace", self._namespace, "logs", pod["metadata"]["name"], "--container=trainer", "--tail=60"
                )
                said = [line for line in log.splitlines() if not line.startswith("step ")]
                out.append(f"--- {pod['metadata']['name']}\n" + "\n".join(said[-25:]))
        with suppress(ClusterError):
            leader = installation.leader(self._kubectl)
            if leader is not None:
                name = leader["metadata"]["name"]
                out.append(self._kubectl.run("--namespace", installation.SYSTEM, "logs", name, "--tail=100"))
        return "\n".join(out)

    # --- breaking ----------------------------------------------------------------------------------------------------

    def scale(self, workers: int) -> None:
        assert self._job is not None
        try:
            self._job.scale(workers)
        except ClusterError as error:
            raise NothingToHitError(f"the API server does not answer ({error})") from None

    def _running(self) -> list[dict[str, Any]]:
        found = [p for p in self._pods if traced_job.alive(p)]
        if not found:
            raise NothingToHitError("no pod runs")
        return found

    def _delete_pod(self, fault: Fault) -> str:
        assert self._job is not None
        pods = self._running()
        name = pods[fault.pick(len(pods))]["metadata"]["name"]
        grace_s = 0 if fault.number % 2 else None
        try:
            self._job.delete_pod(name, grace_s=grace_s)
        except ClusterError as error:
            raise NothingToHitError(f"the API server does not answer ({error})") from None
        return f"{name} {'without grace' if grace_s == 0 else 'with grace'}"

    def _node(self, fault: Fault) -> str:
        """Return the node of the target. It must be on, and no other node off, because the other nodes have to take its pods."""
        if not all(nodes.is_on(n) for n in nodes.known()):
            raise NothingToHitError("another node is off")
        homes = sorted({str(p["spec"]["nodeName"]) for p in self._running()})
        return homes[fault.pick(len(homes))]

    def _power_off(self, fault: Fault) -> str:
        node = self._node(fault)
        faults.power_off(node)
        self.undo.after(fault.lasts_s, lambda: faults.power_on(node))
        return node

    def _flap_node(self, fault: Fault) -> str:
        node = self._node(fault)

        def flap() -> None:
            faults.power_on(node)
            faults.power_off(node)
            faults.power_on(node)

        faults.power_off(node)
        self.undo.after(0.0, flap)
        return node

    def _kill_operator(self, fault: Fault) -> str:  # noqa: ARG002
        try:
            leader = installation.leader(self._kubectl)
            if leader is None:
                raise NothingToHitError("no operator leads")
            faults.kill_main(leader["metadata"]["uid"], "regroup_operator")
        except ClusterError as error:
            raise NothingToHitError(str(error)) from None
        return str(leader["metadata"]["name"])

    def _stop_api(self, fault: Fault) -> str:
        chosen = settings.load()
        if chosen is None or not lifecycle.is_up():
            raise NothingToHitError("the API server does not run")
        apiserver.stop(paths.state())
        self.undo.after(fault.lasts_s, lambda: _start_api(chosen))
        return "kube-apiserver and etcd"

    def _cut_link(self, fault: Fault) -> str:
        """Have the node of one pod drop the packets for another pod, by a blackhole route in one direction."""
        pods = [p for p in self._running() if p["status"].get("podIP")]
        pairs = [(a, b) for a in pods for b in pods if a["spec"]["nodeName"] != b["spec"]["nodeName"]]
        if not pairs:
            raise NothingToHitError("no two workers are on different nodes")
        source, target = pairs[fault.pick(len(pairs))]
        namespace = addresses.parse_node(source["spec"]["nodeName"]).network_namespace
        route = ["blackhole", f"{target['status']['podIP']}/32"]

        def route_it(action: str) -> Callable[[], None]:
            command = ["ip", "-n", namespace, "route", action, *route]
            return lambda: _run(command)

        route_it("replace")()
        self.undo.after(fault.lasts_s, route_it("del"))
        return f"{source['spec']['nodeName']} -> {target['metadata']['name']}"


def _start_api(chosen: settings.Settings) -> None:
    controlplane.start(chosen)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
