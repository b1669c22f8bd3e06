"""A pod is deleted without grace: the survivors step again within two seconds, the replacement joins at a step boundary."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.kubectl import wait_until
from harness import installation, judge
from harness.traced_job import TracedJob
from tests.e2e.kit import trials

SURVIVORS_S = 2.0
TRIALS = trials(1, long=3)


def test_deleted_pod_is_replaced_while_the_others_train(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(elastic=(2, 3), environment={"STEPS": 100000})
    gaps = []
    for trial in range(TRIALS):
        before = job.training(workers=3, steps=10)
        generation = before.commits[-1].generation
        pod, _ = job.victim(job.rank_of(("the store's host", "rank 0", "the last rank")[trial % 3]))
        deleted = time.time()
        job.delete_pod(pod["metadata"]["name"], grace_s=0)
        name = pod["metadata"]["name"]
        trace = job.changed(
            before,
            lambda p, name=name: p[0] == name,  # type: ignore[misc]
            workers=3,
            survivors=2,
            generations=(2, 2),
        )
        gaps.append(trace.first_of(generation + 1).t - max(deleted, trace.last_before(generation + 1).t))
    print(f"pod deleted -> survivors' next committed step, s: {[round(g, 3) for g in gaps]}")
    assert max(gaps) <= SURVIVORS_S, gaps


def test_job_that_lost_every_pod_goes_on_from_its_durable_checkpoint(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(
        elastic=(2, 3), environment={"STEPS": 100000}, checkpoint={"volumeClaim": "saved", "everySeconds": 2, "keep": 2}
    )
    installation.volume(job.kubectl, job.namespace, "saved")
    before = job.training(workers=3, steps=20)
    generation = before.commits[-1].generation
    old = before.pids(generation)
    wait_until(lambda: "checkpoint" in job.status(), timeout_s=60, what="a durable checkpoint in the status")
    saved = job.status()["checkpoint"]
    for pod in job.pods():
        job.delete_pod(pod["metadata"]["name"], grace_s=0)
    trace = job.training(workers=3, steps=5, after=generation)
    # The pods go one after the other: the last of the old ones may train in a generation or two of its own before that.
    resumed = next(g for g in trace.generations() if not set(trace.pids(g)) & set(old))
    first = next(e["startStep"] for e in job.status()["lineage"] if e["generation"] == resumed)
    assert first >= saved["step"] > 0, "it did not go on from the checkpoint"
    commits = trace.judged()
    assert judge.whole([c for c in commits if c.generation < resumed], redone=2) == []
    assert judge.whole([c for c in commits if c.generation >= resumed], first=first) == []
