"""Jobs for the end-to-end tests: the sample, and jobs that trace their commits.

A traced job can be made, waited for, read and judged, and the tests find in it what they break.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from cluster import paths
from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation, judge
from harness.job import JobView
from harness.trace import Trace, load

SAMPLES = paths.REPOSITORY / "manifests" / "samples"
SAMPLE = SAMPLES / "digits.yaml"
SCRIPTS = Path(__file__).parent / "scripts"
Process = tuple[str, int]
"""(pod, process id in its container)"""
IMAGE = "localhost/regroup-trainer:dev"


@dataclass(frozen=True)
class TracedJob(JobView):
    """A job whose processes trace their commits into `directory`."""

    directory: Path

    def pace(self, seconds: float) -> None:
        """Add this time to each step, from the next one on."""
        aside = self.directory / "pace.new"
        aside.write_text(str(seconds))
        aside.replace(self.directory / "pace")

    def trace(self) -> Trace:
        """Return the trace so far."""
        return load(self.directory)

    def wait_trace(self, condition: Callable[[Trace], bool], timeout_s: float, what: str) -> Trace:
        """Wait until the trace fulfils a condition, and return it."""

        def there() -> Trace | None:
            trace = self.trace()
            return trace if trace.commits and condition(trace) else None

        found = wait_until(there, what, timeout_s=timeout_s)
        assert found is not None
        return found

    def training(self, *, workers: int, timeout_s: float = 120, steps: int = 20, after: int = 0) -> Trace:
        """Wait until an adopted generation of `workers` workers, above `after`, has committed `steps` steps. Return the trace.

        A generation that a later one replaces meanwhile does not count: the status may lag behind the fault that ended
        it.
        """
        ready, ranks = f"{workers}/{workers}", workers * self.get()["spec"].get("processesPerWorker", 1)
        what = f"{self.name} trains with {workers} workers"
        least = after + 1
        while True:
            status = self.wait(
                timeout_s, what, state="Running", adopted=True, ready=ready, world_size=ranks, generation=least
            )
            generation = status["membership"]["generation"]
            trace = self.wait_trace(
                partial(_has_come, generation=generation, steps=steps),
                60,
                f"{self.name} commits {steps} steps in generation {generation}",
            )
            if trace.commits[-1].generation == generation:
                return trace
            least = generation + 1

    def rank_of(self, who: str) -> int:
        """Return the rank of "rank 0", "the store's host" (its first process) or "the last rank" of the newest generation."""
        membership = self.status()["membership"]
        ranks: int = membership["worldSize"]
        processes: int = self.get()["spec"].get("processesPerWorker", 1)
        slots = sorted(int(pod["metadata"]["labels"]["regroup.dev/slot"]) for pod in self.pods() if alive(pod))
        host: int = slots.index(membership["store"]["slot"]) * processes
        return {"rank 0": 0, "the store's host": host, "the last rank": ranks - 1}[who]

    def changed(
        self,
        before: Trace,
        lost: Callable[[Process], bool],
        *,
        workers: int,
        survivors: int,
        generations: tuple[int, int] = (1, 1),
        redone: int = 1,
        pausing: Callable[[Process], bool] = lambda _: False,
        restarted: Collection[str] = (),
        skips: bool = False,
    ) -> Trace:
        """Wait until `workers` train again after a fault or a resize that came at the end of `before`; return the trace.

        The judge has to accept the change: at most `redone` steps again, nothing lost or rolled back, and this number
        of `generations`. `survivors` is the number of processes that trained before and that `lost` does not name.
        `restarted` are pods whose containers were started again, so that their processes may have the ids of lost ones.
        `skips`: the first of several generations may form no group.
        """
        generation = before.commits[-1].generation
        trace = self.training(workers=workers, steps=5, after=generation)
        trained = before.pids(generation)
        living = {process for process in trained if not lost(process)}
        pausing_too = {process for process in living if pausing(process)}
        after = trace.commits[-1].generation
        change = judge.Change(generation, after, living, survivors, pausing_too, generations, redone, skips)
        problems = judge.changed(trace.judged(restarted=restarted, after=generation), change)
        assert not problems, "\n".join(problems)
        again = [process for process in trace.pids(after) if lost(process) and process[0] not in restarted]
        assert not again, f"what was lost trains again: {again}"
        return trace

    def victim(self, rank: int) -> tuple[dict[str, Any], int]:
        """Return the pod of a rank of the newest generation, and the rank's process id in its container."""
        newest = self.trace().commits[-1].generation
        (pod, pid) = next(key for key, r in self.trace().pids(newest).items() if r == rank)
        return next(p for p in self.pods() if p["metadata"]["name"] == pod), pid

    def kill_rank(self, rank: int) -> float:
        """SIGKILL the process of a rank. Return the time, in seconds since the epoch."""
        pod, pid = self.victim(rank)
        return faults.kill_inner(pod["metadata"]["uid"], pid)

    def containers(self) -> dict[str, tuple[str, int]]:
        """Return {pod: (uid, restarts of the trainer container)}."""
        return {
            p["metadata"]["name"]: (
                p["metadata"]["uid"],
                next(
                    (c["restartCount"] for c in p["status"].get("containerStatuses", ()) if c["name"] == "trainer"), 0
                ),
            )
            for p in self.pods()
        }

    def exit_code(self, pod: str) -> int | None:
        """Return the exit code of a pod's trainer container before it was started again, or None if it never was."""
        found = next(p for p in self.pods() if p["metadata"]["name"] == pod)
        trainer = next(c for c in found["status"]["containerStatuses"] if c["name"] == "trainer")
        code: int | None = trainer["lastState"].get("terminated", {}).get("exitCode")
        return code


def leader_node(k: Kubectl) -> str:
    """Return the node of the leading operator, once there is one."""
    pod = wait_until(lambda: installation.leader(k), "an operator leads", timeout_s=60)
    assert pod is not None
    return str(pod["spec"]["nodeName"])


def alive(pod: dict[str, Any]) -> bool:
    """Return whether a pod runs and is not being deleted."""
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"


def sample(k: Kubectl, namespace: str, path: Path = SAMPLE) -> tuple[JobView, Path]:
    """Apply a sample that runs digits.py, with a volume for its claim. Return it, and the file that ends its pauses."""
    claim, job = yaml.safe_load_all(path.read_text())
    directory = installation.volume(k, namespace, claim["metadata"]["name"])
    job["metadata"]["namespace"] = namespace
    job["spec"]["template"]["spec"]["containers"][0]["args"] += ["--hurry", "/regroup/checkpoint/hurry"]
    k.apply(job)
    return JobView(k, namespace, job["metadata"]["name"]), directory / "hurry"


def _has_come(trace: Trace, *, generation: int, steps: int) -> bool:
    """Return whether a generation has committed `steps` steps, or another has taken its place."""
    committed = {c.step for c in trace.commits if c.generation == generation}
    return len(committed) >= steps or trace.commits[-1].generation > generation


def start(
    k: Kubectl,
    namespace: str,
    name: str,
    *,
    replicas: int = 3,
    elastic: tuple[int, int] | None = (2, 5),
    script: str = "traced.py",
    scripts: Path = SCRIPTS,
    command: list[str] | None = None,
    image: str = IMAGE,
    environment: dict[str, Any] | None = None,
    container: dict[str, Any] | None = None,
    pod: dict[str, Any] | None = None,
    grace_s: int = 5,
    **spec: Any,
) -> TracedJob:
    """Apply a job that runs one of the files in `scripts` from a ConfigMap, with the trace's volume at /trace.

    `container` and `pod` add to the trainer container and to the pod's spec.
    """
    directory = installation.volume(k, namespace, f"{name}-trace")
    files = {path.name: path.read_text() for path in scripts.glob("*.py")}
    k.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "scripts", "namespace": namespace},
            "data": files,
        }
    )
    variables = {"TRACE": "/trace", "OMP_NUM_THREADS": "1", **(environment or {})}
    trainer: dict[str, Any] = {
        "name": "trainer",
        "image": image,
        "command": command or ["python", "-u", f"/scripts/{script}"],
        "env": [{"name": n, "value": str(v)} for n, v in variables.items()],
        "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}, {"name": "trace", "mountPath": "/trace"}],
        "resources": {"requests": {"cpu": "400m", "memory": "200Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **(container or {}),
    }
    template = {
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": grace_s,
            "containers": [trainer],
            "volumes": [
                {"name": "scripts", "configMap": {"name": "scripts"}},
                {"name": "trace", "persistentVolumeClaim": {"claimName": f"{name}-trace"}},
            ],
            **(pod or {}),
        }
    }
    job = {"replicas": replicas, "template": template, **spec}
    if elastic:
        job["elasticPolicy"] = {"minReplicas": elastic[0], "maxReplicas": elastic[1]}
    k.apply(
        {
            "apiVersion": "regroup.dev/v1alpha1",
            "kind": "DistributedTrainingJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": job,
        }
    )
    return TracedJob(k, namespace, name, directory)
