"""The tour: one job trained to its end while a process, a pod, a node and the operator die and the job is resized.

Every act breaks something for real, waits until the job's own status says that it trains again, and checks a claim.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from cluster import lifecycle, paths, progress
from cluster.kubectl import Kubectl, wait_until
from demo import faults, installation
from demo.claims import Claims, incident_table, recovery_ms
from demo.job import JobView
from demo.live import LiveTable

NAMESPACE = "tour"
SAMPLE = paths.REPOSITORY / "manifests" / "samples" / "digits.yaml"
QUIET_S = 20.0
ACCURACY = 0.97
GLOBAL_BATCH = 80
"""Of the sample."""


@dataclass
class Tour:
    """What the acts share."""

    console: Console
    kubectl: Kubectl
    job: JobView
    claims: Claims
    live: LiveTable

    # --- acts ------------------------------------------------------------------------------------------------------

    def kill_process(self) -> None:
        """SIGKILL one trainer process."""
        before = self._trainers()
        containers = self._containers()
        pod = self.job.pod(1)
        self.live.act(f"SIGKILL of the trainer process in {pod['metadata']['name']}")
        generation = self._generation()
        os.kill(before[pod["metadata"]["name"]][0], signal.SIGKILL)
        incident = self._recovered(generation, 3)
        self._claim_recovery("SIGKILL of a process: next step within 1 s", incident, 1000)
        self.claims.check(
            "no pod or container was restarted", self._containers() == containers, f"{len(containers)} containers"
        )
        self._claim_survivors(before, {pod["metadata"]["name"]})

    def delete_pod(self) -> None:
        """Delete a pod without grace."""
        before = self._trainers()
        name = self.job.pod(2)["metadata"]["name"]
        self.live.act(f"kubectl delete pod {name} --grace-period=0 --force")
        generation = self._generation()
        self.job.delete_pod(name, grace_s=0)
        incident = self._recovered(generation, 3)
        self._claim_recovery("pod deleted: survivors step again within 2 s", incident, 2000)
        self._claim_survivors(before, {name})

    def power_off(self) -> None:
        """Cut the power of a node that has a worker but not the operator's leader."""
        before = self._trainers()
        leader = installation.leader(self.kubectl)
        assert leader is not None
        homes = {
            p["metadata"]["name"]: p["spec"]["nodeName"]
            for p in self.job.pods()
            if "deletionTimestamp" not in p["metadata"]
        }
        node = next(n for n in sorted(homes.values()) if n != leader["spec"]["nodeName"])
        lost = {name for name, home in homes.items() if home == node}
        self.live.act(f"power off node {node} (with {', '.join(sorted(lost))})")
        generation = self._generation()
        cut = faults.power_off(node)
        self._wait(lambda s: self._trains(s, generation), 60, "the survivors do not train")
        waited = time.time() - cut
        self.claims.check(
            "node powered off: survivors train within 15 s", waited <= 15.5, f"{waited:.1f} s, seen through kubectl"
        )
        self._recovered(generation, 3)
        rebuilt = {p["spec"]["nodeName"] for p in self.job.pods() if "deletionTimestamp" not in p["metadata"]}
        self.claims.check("its worker is rebuilt on another node", node not in rebuilt, ", ".join(sorted(rebuilt)))
        self._claim_survivors(before, lost)
        self.live.note(f"power on node {node}")
        faults.power_on(node)

    def kill_operator(self) -> None:
        """SIGKILL the leading operator."""
        before, generation = self._trainers(), self._generation()
        leader = installation.leader(self.kubectl)
        assert leader is not None
        step = self._step()
        self.live.act(f"SIGKILL of the leading operator {leader['metadata']['name']}; training goes on without one")
        killed = faults.kill_main(leader["metadata"]["uid"], "regroup_operator")
        wait_until(lambda: time.time() > killed + 2 and installation.leader(self.kubectl) is not None, timeout_s=60,
                   otherwise="No operator leads again within 60 s.")  # fmt: skip
        self._wait(lambda s: (s.get("progress") or {}).get("step", 0) > step + 50, 60, "the status does not move again")
        now = self._step()
        self.claims.check(
            "operator killed: no generation was issued", self._generation() == generation, f"generation {generation}"
        )
        self.claims.check("... and training went on", now > step, f"step {step} -> {now}")
        self._claim_survivors(before, set())

    def resize(self) -> None:
        """3 -> 5 -> 2 by kubectl patch."""
        for replicas in (5, 2):
            before, generation = self._trainers(), self._generation()
            self.live.act(f"kubectl patch: replicas {self.job.get()['spec']['replicas']} -> {replicas}")
            self.job.patch_replicas(replicas)
            incident = self._recovered(generation, replicas)
            rate = (self.job.status().get("progress") or {}).get("samplesPerSecond")
            step_ms = 1000 * GLOBAL_BATCH / rate if rate else 0.0
            cost = sum(incident.get(k) or 0.0 for k in ("formMs", "transferMs", "firstStepMs")) - step_ms
            self.claims.check(
                f"resized to {replicas} in place within 0.5 s",
                cost <= 500,
                f"{max(cost, 0):.0f} ms more than a step takes",
            )
            gone = {n for n in before if n not in self._containers()} if replicas == 2 else set()
            self._claim_survivors(before, gone)

    # --- seeing ----------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Wait for the end; return the final status."""
        self.live.act("training to the end")
        return self._wait(lambda s: (s.get("summary") or {}).get("state") == "Succeeded", 600, "the job does not end")

    def started(self, workers: int) -> None:
        """Wait until the job trains."""
        self._wait(
            lambda s: self._trains(s, 0) and s["summary"]["ready"] == f"{workers}/{workers}",
            180,
            "the job does not start",
        )

    def _recovered(self, generation: int, workers: int) -> dict[str, Any]:
        """Wait until all workers train again; return the first incident after `generation`, once it is complete."""

        def there(status: dict[str, Any]) -> bool:
            found = self._incident(status, generation)
            whole = found is not None and "firstStepMs" in found
            return (
                self._trains(status, generation)
                and whole
                and status["summary"]["ready"] == f"{workers}/{workers}"
                and (status["membership"]["worldSize"] == workers)
            )

        status = self._wait(there, 120, f"the job does not train with {workers} workers")
        incident = self._incident(status, generation)
        assert incident is not None
        self.live.note(f"{incident['decision']}  ({recovery_ms(incident):.0f} ms)")
        return incident

    @staticmethod
    def _incident(status: dict[str, Any], generation: int) -> dict[str, Any] | None:
        return next((i for i in status.get("incidents") or () if i["generation"] > generation), None)

    @staticmethod
    def _trains(status: dict[str, Any], generation: int) -> bool:
        membership = status.get("membership") or {}
        running = (status.get("summary") or {}).get("state") == "Running"
        return running and membership.get("generation", 0) > generation and bool(membership.get("adopted"))

    def _wait(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float, otherwise: str) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.clear()
            seen.update(self.job.status())
            if (seen.get("summary") or {}).get("state") == "Failed":
                raise RuntimeError(next(c["message"] for c in seen["conditions"] if c["type"] == "Failed"))
            return condition(seen)

        wait_until(there, timeout_s=timeout_s, otherwise=f"After {timeout_s:.0f} s {otherwise}.", every_s=0.2)
        return seen

    def _generation(self) -> int:
        return int(self.job.status()["membership"]["generation"])

    def _step(self) -> int:
        return int((self.job.status().get("progress") or {}).get("step", 0))

    def _trainers(self) -> dict[str, list[int]]:
        """Return this machine's process ids of the trainers, by pod."""
        out = {}
        for pod in self.job.pods():
            every = faults.processes(pod["metadata"]["uid"])
            agents = {p.pid for p in every if p.inner_pid == 1}
            out[pod["metadata"]["name"]] = [p.pid for p in every if p.parent in agents and _is_trainer(p.pid)]
        return {name: pids for name, pids in out.items() if pids}

    def _containers(self) -> dict[str, int]:
        return {
            p["metadata"]["name"]: sum(c["restartCount"] for c in p["status"].get("containerStatuses", ()))
            for p in self.job.pods()
            if "deletionTimestamp" not in p["metadata"]
        }

    def _claim_recovery(self, what: str, incident: dict[str, Any], bound_ms: float) -> None:
        cost = recovery_ms(incident)
        self.claims.check(what, cost <= bound_ms, f"{cost:.0f} ms, {incident.get('stepsRedone', 0)} steps redone")

    def _claim_survivors(self, before: dict[str, list[int]], lost: set[str]) -> None:
        now = self._trainers()
        kept = all(now.get(name) == pids for name, pids in before.items() if name not in lost)
        self.claims.check("... and the survivors keep their processes", kept, f"{len(set(before) - lost)} of them")


def _is_trainer(pid: int) -> bool:
    """The agent names the processes that it forks: trainer-<local rank>, and the zygote that it forks them from."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("trainer-")
    except FileNotFoundError:
        return False


def apply_sample(k: Kubectl, name: str = "digits", change: Callable[[dict[str, Any]], None] | None = None) -> JobView:
    """Apply the sample job under a name, with a volume for its claim."""
    claim, job = yaml.safe_load_all(SAMPLE.read_text())
    claim_name = claim["metadata"]["name"].replace("digits", name)
    installation.volume(k, NAMESPACE, claim_name)
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    job["spec"]["checkpoint"]["volumeClaim"] = claim_name
    if change:
        change(job)
    k.apply(job)
    return JobView(k, NAMESPACE, name)


def outcome(job: JobView) -> tuple[float, str]:
    """Return (held-out accuracy, hash of the parameters) as rank 0 printed them."""
    for pod in job.pods():
        found = re.search(r"held-out accuracy ([\d.]+)\s+parameters sha256 (\w+)", job.logs(pod["metadata"]["name"]))
        if found:
            return float(found[1]), found[2]
    raise RuntimeError("No pod printed the accuracy.")


def run(console: Console, *, keep: bool) -> int:
    """Run the tour; return 0 when every claim held."""
    began = time.monotonic()
    existing = lifecycle.context()
    if existing:
        console.print(f"REGROUP_CONTEXT={existing}: the tour powers nodes off and signals processes on this machine. "
                      "It needs its own cluster: unset REGROUP_CONTEXT.")  # fmt: skip
        return 2
    was_up = lifecycle.is_up()
    try:
        code = _run(console, began)
    finally:
        if keep:
            _how_to_go_on(console)
        elif not was_up:
            lifecycle.down()
    return code


def _run(console: Console, began: float) -> int:
    k = installation.cluster_up()
    installation.install(k, **{"settings.progressWriteSeconds": 1})
    installation.restart_operators(k)
    installation.remove_namespace(k, NAMESPACE)
    wait_until(
        lambda: NAMESPACE not in k.run("get", "namespaces", "--output=name"),
        timeout_s=90,
        otherwise="The last tour's namespace does not go.",
    )
    installation.namespace(k, NAMESPACE)
    console.print(f"\n[bold]$ kubectl apply -f {SAMPLE.relative_to(paths.REPOSITORY)}[/]")
    job, claims = apply_sample(k), Claims()
    with LiveTable(console, job) as live:
        tour = Tour(console, k, job, claims, live)
        live.act("three workers start")
        tour.started(3)
        for act in (tour.kill_process, tour.delete_pod, tour.power_off, tour.kill_operator, tour.resize):
            act()
        status = tour.finish()
    accuracy, parameters = outcome(job)
    claims.check(f"held-out accuracy >= {ACCURACY}", accuracy >= ACCURACY, f"{accuracy:.4f}")
    with progress.step("The same job, one worker, no faults", "start", expected_s=40):
        reference = apply_sample(k, "reference", _without_faults)
        reference.wait(300, "The reference run does not end", state="Succeeded")
    _, expected = outcome(reference)
    claims.check("parameters bitwise equal to the run without faults", parameters == expected, parameters[:12])
    console.print()
    console.print(
        k.run("--namespace", NAMESPACE, "get", "trainingjobs", "-o", "wide").rstrip(), soft_wrap=True, highlight=False
    )
    console.print()
    console.print(incident_table(status.get("incidents") or []))
    console.print()
    claims.show(console)
    _times(console, time.monotonic() - began)
    for claim in claims.failed:
        console.print(f"[bold red]FAILED[/] {claim.what}: {claim.seen}")
    return 1 if claims.failed else 0


def _without_faults(job: dict[str, Any]) -> None:
    """A fixed size of one, no pause in the steps: the same mathematics."""
    spec = job["spec"]
    spec["replicas"] = 1
    del spec["elasticPolicy"]
    args = spec["template"]["spec"]["containers"][0]["args"]
    args[args.index("--pace") + 1] = "0"


def _times(console: Console, total_s: float) -> None:
    times = progress.recorded_since(total_s)
    downloads = sum(t["seconds"] for t in times.values() if t["kind"] == "download")
    console.print(f"\n{total_s:.0f} s in all, {downloads:.0f} s of it downloads.")


def _how_to_go_on(console: Console) -> None:
    config = Path(paths.kubeconfig())
    console.print(
        "\nThe cluster stays up. To go on:\n"
        f"  export KUBECONFIG={config} PATH={paths.bin_dir()}:$PATH\n"
        f"  kubectl -n {NAMESPACE} get trainingjobs -o wide\n"
        f"  kubectl -n {NAMESPACE} describe trainingjob digits\n"
        f"  kubectl -n {NAMESPACE} get pods -o wide\n"
        "  make cluster-down     # when you are done",
        soft_wrap=True,
        highlight=False,
    )
