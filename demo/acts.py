"""The acts of the tour: each breaks or changes something for real, waits until all workers train again, and claims.

The trainers' own log gives the times (steps.py), and this machine's process table the processes. The job's status only
shows when an act is over.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from demo.claims import Claims
from demo.live import LiveTable
from demo.times import allowance, bounded
from harness import faults, installation, judge
from harness.job import JobView
from harness.judge import Change
from harness.steps import Step, Steps

QUIET_S = 20.0
"""Seconds before and after the operator's death whose steps are compared."""
SLOWER = 3.0
"""Largest allowed ratio of a step after the operator's death to the 99th percentile before."""
TRAINS_S, LOG_S, END_S = 600.0, 120.0, 1800.0
"""Deadlines for three waits that take seconds on an idle machine: all workers train, the log has a line, the job has ended."""
NUM_FAULTS = 3
"""A process, a pod and a node are lost. Each loss may cost one step that is made again."""


@dataclass(frozen=True)
class Before:
    """A job that trains, just before an act."""

    generation: int
    trainers: dict[str, list[int]]
    """Pod -> process ids of its trainers on this machine."""

    def kept(self, now: dict[str, list[int]], lost: set[str], number: int) -> list[str]:
        """Return one sentence for each survivor whose processes changed."""
        return judge.kept(self.trainers, now, lost=lost, number=number)


@dataclass
class Acts:
    """The acts, and the job, log, claims and table that they work with."""

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
            TRAINS_S,
            "the job trains",
        )

    def kill_process(self) -> None:
        """SIGKILL one trainer process."""
        before, containers = self._before(), self._containers()
        pod = self.job.pod(1)["metadata"]
        self.live.act(f"SIGKILL of the trainer process in {pod['name']}")
        killed = faults.kill_trainer(pod["uid"])
        first = self._recovered(before, 3, killed)
        self._claim_next_step("SIGKILL of a process: next step within", killed, first, 1.0)
        self.claims.check(
            "... no pod or container restarted", self._containers() == containers, f"{len(containers)} containers"
        )
        self._claim_kept(before, {pod["name"]}, number=2, generations=(2, 2))

    def delete_pod(self) -> None:
        """Delete a pod without grace."""
        before = self._before()
        name = self.job.pod(2)["metadata"]["name"]
        self.live.act(f"kubectl delete pod {name} --grace-period=0 --force")
        deleted = time.time()
        self.job.delete_pod(name, grace_s=0)
        first = self._recovered(before, 3, None)
        # The kubelet leaves even such a pod two seconds, in which it may go on training with the others.
        without = self.steps.intervals_s(since_s=deleted, until_s=first.at_s)
        factor = _allowance()
        what = f"pod deleted: never {bounded(2.0, factor)} without a step"
        self.claims.check(what, max(without) <= 2.0 * factor, f"at most {_ms(max(without))}")
        self._claim_kept(before, {name}, number=2, generations=(2, 2))

    def power_off(self) -> None:
        """Cut the power of a node that has a worker but not the operator's leader."""
        before, leader = self._before(), self._leader()
        homes = self._homes()
        nodes = sorted(node for node in homes.values() if node != leader["spec"]["nodeName"])
        lost = {name for name, home in homes.items() if nodes and home == nodes[0]}
        if not lost or len(lost) == len(homes):
            raise ClusterError(f"No node has some of the workers and not the operator's leader: {homes}.")
        self.live.act(f"power off node {nodes[0]} (with {', '.join(sorted(lost))})")
        cut = faults.power_off(nodes[0])
        first = self._recovered(before, 3, cut)
        self._claim_next_step("node powered off: survivors step again within", cut, first, 15.0)
        rebuilt = sorted(set(self._homes().values()))
        self.claims.check("... its worker is rebuilt on another node", nodes[0] not in rebuilt, ", ".join(rebuilt))
        self._claim_kept(before, lost, number=3 - len(lost), generations=(2, 1 + len(lost)))
        self.live.note(f"power on node {nodes[0]}")
        faults.power_on(nodes[0])

    def kill_operator(self) -> None:
        """SIGKILL the leading operator in the middle of some quiet training."""
        self.live.act(f"{QUIET_S:.0f} s of training without faults, to compare with")
        begun = time.time()
        self._wait_steps(until_s=begun + QUIET_S)
        before, leader = self._before(), self._leader()
        self.live.act(f"SIGKILL of the leading operator {leader['metadata']['name']}; training goes on without one")
        killed = faults.kill_main(leader["metadata"]["uid"], "regroup_operator")
        self._wait_steps(until_s=killed + QUIET_S)
        usual = self.steps.intervals_s(since_s=begun, until_s=killed)
        then = self.steps.intervals_s(since_s=killed, until_s=killed + QUIET_S)
        p99 = statistics.quantiles(usual, n=100)[98]
        newest, slower = self._newest(), SLOWER * _allowance()
        self.claims.check(
            f"operator killed: no step in {QUIET_S:.0f} s over {slower:.3g} x the p99 before",
            max(then) <= slower * p99,
            f"slowest of {len(then)}: {_ms(max(then))}, p99 {_ms(p99)}",
        )
        wait_until(
            lambda: installation.leader(self.kubectl), "an operator leads again", timeout_s=TRAINS_S, every_s=0.5
        )
        self._wait(
            lambda s: (s.get("progress") or {}).get("step", 0) > newest.number and s["summary"]["ready"] == "3/3",
            TRAINS_S,
            "the status moves again",
        )
        self.claims.check(
            "... no generation was issued",
            self._generation() == before.generation,
            f"generation {self._generation()}",
        )
        self._claim("... the survivors keep their processes", before.kept(self._trainers(), set(), 3), "3 of them")

    def resize(self) -> None:
        """Resize the job with kubectl patch, from 3 to 5 workers, then to 2."""
        for replicas, generations in ((5, (1, 2)), (2, (1, 1))):
            before = self._before()
            self.live.act(f"kubectl patch: replicas {self.job.get()['spec']['replicas']} -> {replicas}")
            self.job.patch_replicas(replicas)
            self._recovered(before, replicas, None)
            pauses, factor = self.steps.pauses_s(after=before.generation), _allowance()
            self.claims.check(
                f"resized to {replicas}: paused for at most {bounded(0.5, factor)} more than a step takes",
                max(pauses) <= 0.5 * factor,
                ", ".join(_ms(max(p, 0.0)) for p in pauses),
            )
            self._wait_pods(replicas)  # a leaving pod is deleted once the others train without it
            gone = set(before.trainers) - set(self._containers())
            self._claim_kept(before, gone, number=min(replicas, 3), generations=generations, redone=0)

    def finish(self, steps: int) -> dict[str, Any]:
        """Wait for the job's end after `steps` steps, make the last claims and return the final status."""
        self.live.act("training to the end")
        status = self._wait(lambda s: (s.get("summary") or {}).get("state") == "Succeeded", END_S, "the job ends")
        with suppress(ClusterError):  # the judge says what the log lacks
            wait_until(lambda: self._newest().number == steps, "the trainers' log has the last step", timeout_s=LOG_S)
        self._claim(
            "the whole run: every step once, none rolled back",
            judge.whole(self.steps.commits(), first=1, last=steps, redone=NUM_FAULTS),
            f"steps 1 to {steps}",
        )
        return status

    # --- seeing ----------------------------------------------------------------------------------------------------

    def _before(self) -> Before:
        """Return what is compared with after a fault or a resize, once the newest generation has committed a step."""
        generation = self._generation()
        what = f"the trainers' log has a step of generation {generation}"
        wait_until(lambda: self.steps.first_after(generation - 1), what, timeout_s=LOG_S)
        return Before(generation, self._trainers())

    def _recovered(self, before: Before, workers: int, since_s: float | None) -> Step:
        """Wait until all workers train again; return the first step of a newer generation, and say what was decided."""

        def there(status: dict[str, Any]) -> bool:
            ready = status["summary"]["ready"] if self._trains(status, before.generation) else ""
            return ready == f"{workers}/{workers}" and status["membership"]["worldSize"] == workers

        status = self._wait(there, TRAINS_S, f"the job trains with {workers} workers")
        what = f"the trainers' log has a step after generation {before.generation}"
        first = wait_until(lambda: self.steps.first_after(before.generation), what, timeout_s=LOG_S)
        assert first is not None
        decisions = [i["decision"] for i in status.get("incidents") or () if i["generation"] > before.generation]
        cost = f"  ({_ms(first.at_s - since_s)})" if since_s is not None else ""
        self.live.note(f"{decisions[0]}{cost}" if decisions else f"{workers} workers train.{cost}")
        return first

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

    def _wait_pods(self, number: int) -> None:
        wait_until(lambda: len(self._pods()) == number, f"the job has {number} pods", timeout_s=TRAINS_S)

    def _wait_steps(self, until_s: float) -> None:
        """Wait until the trainers have logged a step after this time."""
        wait_until(
            lambda: self._newest().at_s >= until_s,
            "the trainers' log has a newer step",
            timeout_s=until_s - time.time() + TRAINS_S,
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
        """Return pod -> process ids of its trainers on this machine."""
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

    def _claim_next_step(self, what: str, since_s: float, first: Step, bound_s: float) -> None:
        """Claim that the log has a step in time. `what` ends with "within"."""
        cost_s, factor = first.at_s - since_s, _allowance()
        held = cost_s <= bound_s * factor
        self.claims.check(f"{what} {bounded(bound_s, factor)}", held, f"{_ms(cost_s)}, by the trainers' log")

    def _claim_kept(
        self, before: Before, lost: set[str], *, number: int, generations: tuple[int, int], redone: int = 1
    ) -> None:
        """Claim that `number` survivors kept their processes and lost no step, within the allowed `generations`."""
        after, survivors = self._generation(), set(before.trainers) - lost
        with suppress(ClusterError):  # the judge says which survivor's log lacks it
            wait_until(
                lambda: survivors <= self.steps.pods(after), f"every survivor's step in {after}", timeout_s=LOG_S
            )
        change = Change(before.generation, after, survivors, number, generations=generations, redone=redone)
        self._claim(
            "... nothing is lost, at most one step redone" if redone else "... nothing is lost, no step redone",
            judge.changed(self.steps.commits(), change),
            f"generation {before.generation}, then {before.generation + 1} to {after}",
        )
        problems = before.kept(self._trainers(), lost, number)
        self._claim("... the survivors keep their processes", problems, f"{number} of them")

    def _claim(self, what: str, problems: list[str], seen: str) -> None:
        self.claims.check(what, not problems, " ".join(problems) or seen)


def _allowance() -> float:
    return allowance(os.getloadavg()[0], len(os.sched_getaffinity(0)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
