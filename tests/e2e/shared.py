"""Four jobs that tests break one after another, so that each test pays for its fault and not for a start of its own.

A test says which it needs and gets them while all their workers train; the others pause in every step meanwhile. A job whose
last test failed is replaced. One whose last test passed has to train again: if it does not, the next test fails. What a
generation is to a Session job, in its trace, is to the script each forming of its group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from harness import installation, judge, traced_job
from harness.job import RESOURCE, JobView
from harness.trace import Trace
from harness.traced_job import TracedJob, alive
from regroup_operator.api.members import MemberId
from regroup_operator.api.names import parse_worker_pod_name

WORKERS = 3
PACE_S, IDLE_S = 0.05, 1.0
"""How much longer a step takes than its work, in the jobs that a test uses, and in the others: up to 15 processes on two cores."""
STEPS = 100_000

KINDS: Mapping[str, dict[str, Any]] = {
    "elastic": {"elastic": (1, 5), "grace_s": 15},
    "two processes": {
        "elastic": (1, 3),
        "processesPerWorker": 2,
        "checkpoint": {"volumeClaim": "saved", "everySeconds": 2, "keep": 2},
        "memorySnapshot": {"sizeLimit": "16Mi", "everySeconds": 1},
    },
    "fixed size": {"elastic": None},
    "script": {"elastic": (1, 3), "script": "plain.py"},
}


@dataclass(frozen=True)
class SharedJob(TracedJob):
    """One of the four."""

    kind: str

    @property
    def processes(self) -> int:
        """How many each worker has."""
        return int(KINDS[self.kind].get("processesPerWorker", 1))

    def training(self, *, workers: int = WORKERS, timeout_s: float = 240, steps: int = 10, after: int = 0) -> Trace:
        """See TracedJob."""
        if self.kind != "script":
            return super().training(workers=workers, timeout_s=timeout_s, steps=steps, after=after)

        def there(trace: Trace) -> bool:
            newest = trace.commits[-1].generation
            return newest > after and len(trace.pids(newest)) == workers and len(trace.intervals_s(newest)) >= steps

        return self.wait_trace(there, timeout_s, f"a script trains with {workers} workers, after group {after}")

    def lost(
        self,
        before: Trace,
        pods: Collection[str],
        *,
        newest: int,
        generations: tuple[int, int] | None = None,
        restarted: bool = False,
    ) -> Trace:
        """Wait until all train again after pods were lost; return the trace. Fails unless the judge is content.

        An elastic job takes one generation without the pods, and one for each that returns later than the others. One of
        fixed size stands until all are back, and takes one. A script's processes start again in each. `newest` is the number
        of the newest generation before that; `restarted`: the pods stay, and their containers are started again.
        """
        fixed = self.kind == "fixed size"
        least, most = generations or ((1, 1) if fixed else (2, 1 + len(pods)))
        old = before.pids(before.commits[-1].generation)
        script = self.kind == "script"
        trace = self.changed(
            before,
            (lambda p: p in old) if script else (lambda p: p[0] in pods),
            workers=WORKERS,
            survivors=0 if script else self.processes * (WORKERS - len(pods)),
            generations=(least, most),
            restarted=pods if restarted else (),
        )
        # A script counts the groups that have formed: in its trace a generation without a group does not show.
        problems = judge.issued(newest, self.newest(), (least, most))
        assert not problems, f"{self.kind}: {problems}\n" + "\n".join(self.decisions(newest))
        return trace

    @property
    def is_spread(self) -> bool:
        """Whether each worker has a node of its own. Tests that drain or cut nodes may leave several on one."""
        homes = [pod["spec"].get("nodeName") for pod in self.pods() if alive(pod)]
        return len(set(homes)) == len(homes)

    def decisions(self, generation: int) -> list[str]:
        """Return a line for each incident after a generation: for whoever reads a failure."""
        incidents = [i for i in self.status().get("incidents", ()) if i["generation"] > generation]
        return [f"{i['at']} generation {i['generation']}, {i.get('cause')}: {i['decision']}" for i in incidents]

    def settled(self) -> None:
        """Wait until no pod is on its way out: those of a node that was off go when it is back."""
        wait_until(
            lambda: all("deletionTimestamp" not in pod["metadata"] for pod in self.pods()),
            f"no pod of the {self.kind} job is on its way out",
            timeout_s=60,
        )

    def newest(self) -> int:
        """Return the number of the newest generation; a script's trace counts its groups instead."""
        return int(self.status()["membership"]["generation"])

    def counted(self) -> int:
        """Return how many process restarts count against the job's budget."""
        return int((self.status().get("restarts") or {}).get("processes", 0))


class SharedJobs:
    """The jobs that there are, by kind."""

    def __init__(self, kubectl: Kubectl, namespace: str, failed: Set[str]) -> None:
        """`failed` holds the tests that have failed so far; whoever runs the tests adds to it."""
        self._kubectl = kubectl
        self._namespace = namespace
        self._failed = failed
        self._jobs: dict[str, SharedJob] = {}
        self._last_test: dict[str, str] = {}
        self._made = 0
        self.test = ""
        """The test that runs now."""

    def take(self, *kinds: str, pace_s: float = PACE_S, spread: bool = False) -> list[SharedJob]:
        """Return the jobs of these kinds once all their workers train; they start together where they have to.

        `spread`: one that has several workers on a node is replaced, since the scheduler spreads those of a new one.
        """
        for kind in kinds:
            crowded = spread and kind in self._jobs and not self._jobs[kind].is_spread
            if crowded or self._last_test.get(kind) in self._failed:
                self._delete(kind)
        for kind, job in self._jobs.items():
            job.pace(pace_s if kind in kinds else IDLE_S)
        last = {kind: self._last_test.get(kind) for kind in kinds}
        for kind in kinds:
            self._last_test[kind] = self.test
            if kind not in self._jobs:
                self._start(kind, pace_s)
        return [self._whole(kind, last[kind]) for kind in kinds]

    def end(self) -> None:
        """End all of them: the next test needs the machine to itself."""
        for kind in list(self._jobs):
            self._delete(kind)

    def _whole(self, kind: str, last: str | None) -> SharedJob:
        """Return the job once all its workers train. `last`: the test that had it before, None for a new job."""
        job = self._jobs[kind]
        try:
            if KINDS[kind]["elastic"] is not None and job.get()["spec"]["replicas"] != WORKERS:
                job.patch_replicas(WORKERS)
            job.training()
        except ClusterError as error:
            when = f"after {last}, which passed" if last else "after its start"
            raise ClusterError(f"The {kind} job does not train with all its workers {when}: {error}") from error
        return job

    def _start(self, kind: str, pace_s: float) -> SharedJob:
        self._made += 1
        if "checkpoint" in KINDS[kind]:
            installation.volume(self._kubectl, self._namespace, KINDS[kind]["checkpoint"]["volumeClaim"])
        started = traced_job.start(
            self._kubectl,
            self._namespace,
            f"{kind.replace(' ', '-')}-{self._made}",
            replicas=WORKERS,
            environment={"STEPS": STEPS},
            container={"resources": {"requests": {"cpu": "100m", "memory": "200Mi"}}},
            recovery={"maxRestarts": STEPS},
            **KINDS[kind],
        )
        self._jobs[kind] = job = SharedJob(self._kubectl, self._namespace, started.name, started.directory, kind)
        job.pace(pace_s)
        return job

    def _delete(self, kind: str) -> None:
        self._last_test.pop(kind, None)
        job = self._jobs.pop(kind, None)
        if job is None:
            return  # it could not be started
        self._kubectl.run("--namespace", self._namespace, "delete", RESOURCE, job.name, "--wait=false")
        pods = f"--selector=regroup.dev/job-name={job.name}"
        self._kubectl.run(
            "--namespace", self._namespace, "delete", "pods", pods, "--grace-period=0", "--force", "--wait=false"
        )


def worker_of(pod: str) -> str:
    """Return how the status calls the worker of a pod, by the pod's name."""
    parsed = parse_worker_pod_name(pod)
    assert parsed is not None, pod
    _, slot, attempt = parsed
    return str(MemberId(slot, attempt))


def node_of_some(jobs: Mapping[str, JobView], leader: str) -> tuple[str, dict[str, set[str]]]:
    """Return a node, and its pods of each job: it has pods of as many as possible, of none all, and not the leader."""
    homes = {
        name: [(p["spec"]["nodeName"], p["metadata"]["name"]) for p in job.pods() if alive(p)]
        for name, job in jobs.items()
    }
    by_node = {
        node: {name: {pod for home, pod in pods if home == node} for name, pods in homes.items()}
        for node in sorted({home for pods in homes.values() for home, _ in pods} - {leader})
    }
    fitting = {
        node: found for node, found in by_node.items() if all(len(found[n]) < len(pods) for n, pods in homes.items())
    }
    assert fitting, f"no node has some workers and not the leader: {by_node}, leader on {leader}"
    node = max(fitting, key=lambda n: (sum(map(bool, fitting[n].values())), -sum(map(len, fitting[n].values()))))
    return node, fitting[node]
