"""A pod is deleted without grace: the survivors step again within two seconds, the replacement joins at a step boundary."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.kubectl import wait_until
from harness import installation
from harness.traced_job import TracedJob

SURVIVORS_S = 2.0
TRIALS = 3


def test_deleted_pod_is_replaced_while_the_others_train(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(elastic=(2, 3), environment={"STEPS": 100000})
    gaps = []
    for trial in range(TRIALS):
        before = job.training(workers=3, steps=10)
        generation = before.commits[-1].generation
        pod, _ = job.victim(trial % 3)
        deleted = time.time()
        job.delete_pod(pod["metadata"]["name"], grace_s=0)
        trace = job.wait_trace(
            lambda t, g=generation: t.commits[-1].generation > g,  # type: ignore[misc]
            30,
            "the survivors train after the pod was deleted",
        )
        gaps.append(trace.first_of(generation + 1).t - max(deleted, trace.last_before(generation + 1).t))
        survivors = {key for key in before.pids(generation) if key[0] != pod["metadata"]["name"]}
        after = job.training(workers=3, steps=5)
        assert set(after.pids(after.first_of(generation + 1).generation)) == survivors
        assert survivors <= set(after.pids(after.commits[-1].generation)), "a survivor lost its process"
        assert after.missing() == []
    print(f"pod deleted -> survivors' next committed step, s: {[round(g, 3) for g in gaps]}")
    assert max(gaps) <= SURVIVORS_S, gaps


def test_job_that_lost_every_pod_goes_on_from_its_durable_checkpoint(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(
        elastic=(2, 3), environment={"STEPS": 100000}, checkpoint={"volumeClaim": "saved", "everySeconds": 2, "keep": 2}
    )
    installation.volume(job.kubectl, job.namespace, "saved")
    before = job.training(workers=3, steps=20)
    generation = before.commits[-1].generation
    wait_until(lambda: "checkpoint" in job.status(), timeout_s=60, what="a durable checkpoint in the status")
    saved = job.status()["checkpoint"]
    for pod in job.pods():
        job.delete_pod(pod["metadata"]["name"], grace_s=0)
    job.wait(120, "the job trains again", state="Running", generation=generation + 1, ready="3/3", adopted=True)
    first = next(e["startStep"] for e in job.status()["lineage"] if e["generation"] > generation)
    assert first >= saved["step"] > 0, "it did not go on from the checkpoint"
    assert job.trace().missing() == []
