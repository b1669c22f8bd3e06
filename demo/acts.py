"""The acts of the tour: each breaks or changes something for real, waits until all workers train again, and claims.

Times are judged by the trainers' own log (steps.py), processes by this machine's process table; the job's status only says
when an act is over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from demo.claims import Claims
from demo.live import LiveTable
from harness import faults, installation
from harness.job import JobView
from harness.steps import Step, Steps

QUIET_S = 20.0
"""So long before and after the operator's death the steps are compared."""
SLOWER = 3.0
"""No step after it takes longer than so many times the 99th percentile before."""


@dataclass
class Acts:
    """What the acts share."""

    kubectl: Kubectl
    job: JobView
    steps: Steps
    claims: Claims
    live: LiveTable

    # --- acts ------------------------------------------------------------------------------------------------------

    def start(self, workers: int) -> None:
        """Wait until the job trains."""
        self.live.act(f"{workers} workers start")
        self._wait(
            lambda s: self._trains(s, 0) and s["summary"]["ready"] == f"{workers}/{workers}",
            180,
            "the job trains",
        )

    def kill_process(self) -> None:
        """SIGKILL one trainer process."""
        before, containers, generation = self._trainers(), self._containers(), self._generation()
        pod = self.job.pod(1)["metadata"]
        self.live.act(f"SIGKILL of the trainer process in {pod['name']}")
        killed = faults.kill_trainer(pod["uid"])
        first = self._recovered(generation, 3, killed)
        self._claim_next_step("SIGKILL of a process: next step within 1 s", killed, generation, first, 1.0)
        self.claims.check(
            "... no pod or container restarted", self._containers() == containers, f"{len(containers)} containers"
        )
        self._claim_survivors(before, {pod["name"]})

    def delete_pod(self) -> None:
        """Delete a pod without grace."""
        before, generation = self._trainers(), self._generation()
        name = self.job.pod(2)["metadata"]["name"]
        self.live.act(f"kubectl delete pod {name} --grace-period=0 --force")
        deleted = time.time()
        self.job.delete_pod(name, grace_s=0)
        first = self._recovered(generation, 3, None)
        # The kubelet leaves even such a pod two seconds, in which it may go on training with the others.
        without = self.steps.intervals_s(since_s=deleted, until_s=first.at_s)
        self.claims.check("pod deleted: never 2 s without a step", max(without) <= 2.0, f"at most {_ms(max(without))}")
        self._claim_nothing_lost(generation, first)
        self._claim_survivors(before, {name})

    def power_off(self) -> None:
        """Cut the power of a node that has a worker but not the operator's leader."""
        before, generation = self._trainers(), self._generation()
        leader = self._leader()
        homes = self._homes()
        nodes = sorted(node for node in homes.values() if node != leader["spec"]["nodeName"])
        if not nodes:
            raise ClusterError(
                f"All workers are on {leader['spec']['nodeName']}, with the operator's leader: no node to cut."
            )
        lost = {name for name, home in homes.items() if home == nodes[0]}
        self.live.act(f"power off node {nodes[0]} (with {', '.join(sorted(lost))})")
        cut = faults.power_off(nodes[0])
        first = self._recovered(generation, 3, cut)
        self._claim_next_step("node powered off: survivors step again within 15 s", cut, generation, first, 15.0)
        rebuilt = sorted(set(self._homes().values()))
        self.claims.check("... its worker is rebuilt on another node", nodes[0] not in rebuilt, ", ".join(rebuilt))
        self._claim_survivors(before, lost)
        self.live.note(f"power on node {nodes[0]}")
        faults.power_on(nodes[0])

    def kill_operator(self) -> None:
        """SIGKILL the leading operator in the middle of some quiet training."""
        self.live.act(f"{QUIET_S:.0f} s of training without faults, to compare with")
        begun = time.time()
        self._wait_steps(until_s=begun + QUIET_S)
        before, generation, leader = self._trainers(), self._generation(), self._leader()
        self.live.act(f"SIGKILL of the leading operator {leader['metadata']['name']}; training goes on without one")
        killed = faults.kill_main(leader["metadata"]["uid"], "regroup_operator")
        self._wait_steps(until_s=killed + QUIET_S)
        usual = self.steps.intervals_s(since_s=begun, until_s=killed)
        then = self.steps.intervals_s(since_s=killed, until_s=killed + QUIET_S)
        p99 = statistics.quantiles(usual, n=100)[98]
        newest = self._newest()
        self.claims.check(
            f"operator killed: no step in {QUIET_S:.0f} s over {SLOWER:.0f} x the p99 before",
            max(then) <= SLOWER * p99,
            f"slowest of {len(then)}: {_ms(max(then))}, p99 {_ms(p99)}",
        )
        wait_until(lambda: installation.leader(self.kubectl), "an operator leads again", timeout_s=60, every_s=0.5)
        self._wait(
            lambda s: (s.get("progress") or {}).get("step", 0) > newest.number and s["summary"]["ready"] == "3/3",
            60,
            "the status moves again",
        )
        self.claims.check(
            "... no generation was issued", self._generation() == generation, f"generation {self._generation()}"
        )
        self._claim_survivors(before, set())

    def resize(self) -> None:
        """3 -> 5 -> 2 by kubectl patch."""
        for replicas in (5, 2):
            before, generation = self._trainers(), self._generation()
            self.live.act(f"kubectl patch: replicas {self.job.get()['spec']['replicas']} -> {replicas}")
            self.job.patch_replicas(replicas)
            self._recovered(generation, replicas, None)
            pauses = self.steps.pauses_s(after=generation)
            self.claims.check(
                f"resized to {replicas}: paused for at most 0.5 s more than a step takes",
                max(pauses) <= 0.5,
                ", ".join(_ms(max(p, 0.0)) for p in pauses),
            )
            gone = {name for name in before if name not in self._containers()} if replicas == 2 else set()
            self._claim_survivors(before, gone)

    def finish(self) -> dict[str, Any]:
        """Wait for the end; return the final status."""
        self.live.act("training to the end")
        return self._wait(lambda s: (s.get("summary") or {}).get("state") == "Succeeded", 600, "the job ends")

    # --- seeing ----------------------------------------------------------------------------------------------------

    def _recovered(self, generation: int, workers: int, since_s: float | None) -> Step:
        """Wait until all workers train again; return the first step after `generation`, and say what was decided."""

        def there(status: dict[str, Any]) -> bool:
            ready = status["summary"]["ready"] if self._trains(status, generation) else ""
            return ready == f"{workers}/{workers}" and status["membership"]["worldSize"] == workers

        status = self._wait(there, 120, f"the job trains with {workers} workers")
        around = wait_until(
            lambda: self.steps.around(generation),
            f"the trainers' log has a step after generation {generation}",
            timeout_s=30,
        )
        assert around is not None
        decisions = [i["decision"] for i in status.get("incidents") or () if i["generation"] > generation]
        cost = f"  ({_ms(around[1].at_s - since_s)})" if since_s is not None else ""
        self.live.note(f"{decisions[0]}{cost}" if decisions else f"{workers} workers train on.{cost}")
        return around[1]

    @staticmethod
    def _trains(status: dict[str, Any], generation: int) -> bool:
        membership = status.get("membership") or {}
        running = (status.get("summary") or {}).get("state") == "Running"
        return running and membership.get("generation", 0) > generation and bool(membership.get("adopted"))

    def _wait(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float, what: str) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.clear()
            seen.update(self.job.status())
            if (seen.get("summary") or {}).get("state") == "Failed":
                raise ClusterError(next(c["message"] for c in seen["conditions"] if c["type"] == "Failed"))
            if condition(seen):
                return True
            if (seen.get("summary") or {}).get("state") == "Succeeded":
                raise ClusterError(
                    "The job came to its end before the tour did: this machine is too busy for its pace."
                )
            return False

        wait_until(there, what, timeout_s=timeout_s, every_s=0.3)
        return seen

    def _wait_steps(self, until_s: float) -> None:
        """Wait until the trainers have logged a step after this moment."""
        wait_until(
            lambda: self._newest().at_s >= until_s,
            "the trainers' log has a newer step",
            timeout_s=until_s - time.time() + 60,
        )

    def _newest(self) -> Step:
        newest = self.steps.newest
        if newest is None:
            raise ClusterError("The trainers' log has no step: kubectl logs gives nothing.")
        return newest

    def _generation(self) -> int:
        return int((self.job.status().get("membership") or {}).get("generation", 0))

    def _leader(self) -> dict[str, Any]:
        leader = installation.leader(self.kubectl)
        if leader is None:
            raise ClusterError("No operator leads: kubectl -n regroup-system get pods says why.")
        return leader

    def _homes(self) -> dict[str, str]:
        return {p["metadata"]["name"]: p["spec"].get("nodeName", "") for p in self._pods()}

    def _trainers(self) -> dict[str, list[int]]:
        """Return this machine's process ids of the trainers, by pod."""
        found = {p["metadata"]["name"]: faults.trainers(p["metadata"]["uid"]) for p in self.job.pods()}
        return {name: pids for name, pids in found.items() if pids}

    def _containers(self) -> dict[str, int]:
        return {
            p["metadata"]["name"]: sum(c["restartCount"] for c in p["status"].get("containerStatuses", ()))
            for p in self._pods()
        }

    def _pods(self) -> list[dict[str, Any]]:
        return [p for p in self.job.pods() if "deletionTimestamp" not in p["metadata"]]

    # --- claims ----------------------------------------------------------------------------------------------------

    def _claim_next_step(self, what: str, since_s: float, generation: int, first: Step, bound_s: float) -> None:
        """Claim that the log goes on in time, and where it should."""
        cost_s = first.at_s - since_s
        self.claims.check(what, cost_s <= bound_s, f"{_ms(cost_s)}, by the trainers' log")
        self._claim_nothing_lost(generation, first)

    def _claim_nothing_lost(self, generation: int, first: Step) -> None:
        """Claim that the new generation's first step is the one after the last, or that one again."""
        around = self.steps.around(generation)
        assert around is not None
        last = around[0].number
        # A dying rank 0 may take the line of its last step with it, so that the log may jump by one.
        whole = last <= first.number <= last + 2
        self.claims.check("... nothing is lost, at most one step redone", whole, f"step {last}, then {first.number}")

    def _claim_survivors(self, before: dict[str, list[int]], lost: set[str]) -> None:
        now = self._trainers()
        kept = all(now.get(name) == pids for name, pids in before.items() if name not in lost)
        self.claims.check("... the survivors keep their processes", kept, f"{len(set(before) - lost)} of them")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
