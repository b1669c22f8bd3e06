"""A pod is deleted without grace: the survivors step again within two seconds, the replacement joins at a step boundary.

A job of fixed size stands until the replacement is there and goes on from the survivors' state; an unmodified script starts again
from its own newest checkpoint, once without the pod and once with it.
"""

from __future__ import annotations

import time

import pytest

from cluster.kubectl import wait_until
from harness import faults, judge
from tests.e2e.shared import KINDS, SharedJobs
from tests.long import trials

SURVIVORS_S = 2.0
TRIALS = trials(1, long=3)


@pytest.mark.parametrize("kind", KINDS)
def test_deleted_pod_is_replaced_and_costs_no_restart(shared_jobs: SharedJobs, kind: str) -> None:
    (job,) = shared_jobs.take(kind)
    counted, gaps = job.counted(), []
    for trial in range(TRIALS):
        before, newest = job.training(), job.newest()
        generation = before.commits[-1].generation
        who = ("the store's host", "rank 0", "the last rank")[trial % 3]
        pod, _ = job.victim(trial % 3 if kind == "script" else job.rank_of(who))
        name = pod["metadata"]["name"]
        deleted = time.time()
        job.delete_pod(name, grace_s=0)
        trace = job.lost(before, {name}, newest=newest)
        gaps.append(trace.first_of(generation + 1).t - max(deleted, trace.last_before(generation + 1).t))
    print(f"pod deleted ({kind}) -> next committed step, s: {[round(g, 3) for g in gaps]}")
    assert job.counted() == counted, "a deleted pod counts against the job's budget"
    if kind in ("elastic", "two processes"):
        assert max(gaps) <= SURVIVORS_S, gaps


def test_job_that_lost_every_pod_goes_on_from_its_durable_checkpoint(shared_jobs: SharedJobs) -> None:
    (job,) = shared_jobs.take("two processes")
    before = job.training(steps=20)
    generation = before.commits[-1].generation
    old = before.pids(generation)
    begun = before.first_of(generation).step
    wait_until(
        lambda: (job.status().get("checkpoint") or {}).get("step", 0) > begun,
        timeout_s=60,
        what="a durable checkpoint of this generation in the status",
    )
    saved = job.status()["checkpoint"]
    for pod in job.pods():
        job.delete_pod(pod["metadata"]["name"], grace_s=0)
    trace = job.training(after=generation)
    # The pods go one after the other: the last of the old ones may train in a generation or two of its own before that.
    resumed = next(g for g in trace.generations() if g > generation and not set(trace.pids(g)) & set(old))
    first = next(e["startStep"] for e in job.status()["lineage"] if e["generation"] == resumed)
    assert first >= saved["step"] > begun, "it did not go on from the checkpoint"
    commits = [c for c in trace.judged() if c.generation >= generation]
    assert judge.whole([c for c in commits if c.generation < resumed], first=None, redone=2) == []
    assert judge.whole([c for c in commits if c.generation >= resumed], first=first) == []


def test_suspended_job_goes_on_after_the_step_at_which_it_stopped(shared_jobs: SharedJobs) -> None:
    """Its pods are gone meanwhile. No step is done again, and nothing counts as a restart."""
    (job,) = shared_jobs.take("two processes")
    before, counted = job.training(steps=20), job.counted()
    generation = before.commits[-1].generation
    job.patch(runPolicy={"suspend": True})
    status = job.wait(120, f"{job.name} is suspended", state="Suspended")
    assert job.pods() == []
    assert "newest checkpoint" in next(c["message"] for c in status["conditions"] if c["type"] == "Suspended")
    job.patch(runPolicy={"suspend": False})
    trace = job.training(after=generation)
    resumed = trace.commits[-1].generation
    commits = [c for c in trace.judged() if c.generation >= generation]
    assert judge.whole(commits, first=None, redone=0) == []
    assert job.status()["incidents"][-1]["cause"] == "Resumed"
    assert (resumed, job.counted()) == (job.newest(), counted)


def test_job_that_lost_every_process_at_once_goes_on_from_memory(shared_jobs: SharedJobs) -> None:
    """The processes of two workers are killed, and the whole container of the third: its volume in memory outlives it."""
    (job,) = shared_jobs.take("two processes")
    before = job.training(steps=20)
    generation = before.commits[-1].generation
    old = before.pids(generation)
    begun = before.first_of(generation).step
    wait_until(
        lambda: (job.status().get("memorySnapshot") or {}).get("step", 0) > begun,
        timeout_s=60,
        what="a memory snapshot of this generation in the status",
    )
    covered = job.status()["memorySnapshot"]["step"]
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in job.pods()}
    killed = min(uids)
    for name, pid in [(killed, 1), *((name, pid) for name, pid in old if name != killed)]:
        faults.kill_inner(uids[name], pid)
    trace = job.training(after=generation)
    first = next(e["startStep"] for e in job.status()["lineage"] if e["generation"] > generation)
    last = trace.last_before(generation + 1).step
    print(f"step {last} committed, step {covered} in every worker's memory; goes on from {first}")
    assert begun < covered <= first <= last + 1, "it did not go on from the snapshot"
    commits = [c for c in trace.judged(restarted={killed}, after=generation) if c.generation >= generation]
    assert judge.whole([c for c in commits if c.generation == generation], first=None, redone=2) == []
    assert judge.whole([c for c in commits if c.generation > generation], first=first) == []
