"""`kubectl get trainingjobs -o wide`, sampled against the trainers' own trace, tells the truth through all that can happen."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.kubectl import Kubectl, wait_until
from harness import faults
from harness.traced_job import TracedJob, leader_node, node_with_workers
from tests.e2e.columns import SAMPLE_S, sampled
from tests.e2e.truth import Asked, judge


def test_columns_follow_the_trainers(jobs: Callable[..., TracedJob], operator: Kubectl) -> None:
    """A process is killed, a pod deleted, a node switched off, the job is resized and ends."""
    asked = [Asked(time.time(), 3)]
    job = jobs(elastic=(1, 5), environment={"STEPS": 2000, "STEP_SECONDS": 0.05})
    with sampled(job) as rows:
        generation = _trains(job, 3)
        job.kill_rank(1)
        generation = _trains(job, 3, after=generation)
        job.delete_pod(job.pod(2)["metadata"]["name"], grace_s=0)
        generation = _trains(job, 3, after=generation)
        node, _ = node_with_workers(job, leader_node(operator))
        faults.power_off(node)
        try:
            generation = _trains(job, 3, after=generation)
        finally:
            faults.power_on(node)
        for replicas in (2, 4):
            asked.append(Asked(time.time(), replicas))
            job.patch_replicas(replicas)
            generation = _trains(job, replicas, after=generation)
        job.hurry()
        job.wait(240, "the job ends", state="Succeeded")
        ended = len(rows)
        wait_until(lambda: len(rows) >= ended + 4 / SAMPLE_S, timeout_s=20, what="some lines of the ended job")
    trace = job.trace()
    wrong = [problem for row in rows for problem in judge(row, trace, asked)]
    print(f"{len(rows)} samples: " + ", ".join(sorted({f"{r.cells['STATE']} {r.cells['READY']}" for r in rows})))
    assert {r.cells["STATE"] for r in rows} >= {"Starting", "Running", "Recovering", "Succeeded"}
    assert not wrong, "\n".join(wrong[:10])
    assert len({d.parameters for d in trace.done}) == 1, "the processes ended with different parameters"


def _trains(job: TracedJob, workers: int, after: int = 0) -> int:
    return job.training(workers=workers, after=after, steps=20).commits[-1].generation
