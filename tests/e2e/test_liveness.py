"""The first trace that left a job waiting for ever, with real processes in a cluster, and the bound that it meets now.

In memory: tests/unit/controller/test_liveness.py; under `regroup run`: tests/trainer/test_liveness.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cluster.kubectl import wait_until
from harness import faults, installation, judge
from harness.traced_job import TracedJob
from tests.long import only_long

BOUND_S = 10.0
"""In memory 2 s. Here the new process builds its model and reads the checkpoint, on two cores that do other things, too."""


@only_long("tests/trainer/test_liveness.py has the same trace under `regroup run`")
def test_word_that_a_generation_was_never_entered_ends_the_wait_for_it(jobs: Callable[..., TracedJob]) -> None:
    """Worker 1 trains alone and dies; the next generation names worker 0, whose process dies before it enters. Worker 1 comes
    back and asks for a witness of that generation: worker 0's agent is it, although no process of it is there."""
    job = jobs(
        replicas=2,
        elastic=(1, 5),
        environment={"STEPS": 100_000},
        checkpoint={"volumeClaim": "saved", "everySeconds": 1, "keep": 2},
        recovery={"maxRestarts": 1000},
    )
    installation.volume(job.kubectl, job.namespace, "saved")

    def held(what: str, slot: int) -> Path:
        return job.directory / f"{what}-{slot}"

    def kill(slot: int) -> None:
        """Kill a worker's process, and hold the next one before it begins."""
        held("start", slot).touch()
        faults.kill_trainer(job.pod(slot)["metadata"]["uid"])

    together = job.training(workers=2).commits[-1].generation
    kill(0)
    alone = job.wait_trace(lambda t: t.commits[-1].generation > together, 30, "worker 1 trains alone")
    alone_in = alone.commits[-1].generation
    job.scale(1)
    checkpoint = wait_until(
        lambda: next((c for c in [job.status().get("checkpoint") or {}] if c.get("generation") == alone_in), None),
        "a checkpoint of worker 1 alone",
        timeout_s=30,
    )
    assert checkpoint
    kill(1)
    job.wait(60, "nobody is left", state="Waiting")
    held("enter", 0).touch()
    held("start", 0).unlink()
    named = job.wait(60, "a generation names worker 0", generation=alone_in + 1)["membership"]
    assert (named["members"], named["adopted"]) == ("0", False)
    kill(0)
    held("enter", 0).unlink()
    held("start", 1).unlink()
    released = time.time()
    trace = job.wait_trace(
        lambda t: t.commits[-1].generation > named["generation"], BOUND_S + 30, "worker 1 trains again"
    )
    resumed = trace.first_of(named["generation"] + 1)
    print(f"worker 1's process begins -> next committed step: {resumed.t - released:.1f} s")
    assert resumed.t - released <= BOUND_S
    assert named["generation"] not in trace.generations(), "it was entered: this is another trace"
    assert resumed.pod == job.pod(1)["metadata"]["name"]
    assert resumed.step >= checkpoint["step"] > 0, "it did not go on from the newest checkpoint"
    assert judge.whole([c for c in trace.judged() if c.generation <= alone_in], redone=1) == []
    held("start", 0).unlink()
    job.scale(2)
    again = [c for c in job.training(workers=2).judged() if c.generation >= resumed.generation]
    assert judge.whole(again, first=resumed.step, redone=1) == []
