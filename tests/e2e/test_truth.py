"""`kubectl get trainingjobs -o wide`, sampled against the trainers' own trace, tells the truth through all that can happen."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

import pytest

from cluster.kubectl import Kubectl, wait_until
from harness.trace import Trace
from harness.traced_job import TracedJob, leader_node
from tests.e2e.columns import SAMPLE_S, sampled, watched
from tests.e2e.kit import Power
from tests.e2e.shared import node_of_some
from tests.e2e.truth import Asked, Fault, Row, Run, judge, story

LEAST_SAMPLES = 0.25
"""Of the lines that kubectl should print, on two cores that start pods meanwhile."""


STEPS = 1200
"""On two cores about 300 are done at the last resize: 1200 are enough even if it takes four times as long."""


@pytest.mark.usefixtures("nothing_shared")
def test_columns_follow_the_trainers(jobs: Callable[..., TracedJob], operator: Kubectl, power: Power) -> None:
    """A process is killed, a pod deleted, a node switched off, the job is resized and ends."""
    power.all_on()
    job = jobs(elastic=(1, 5), environment={"STEPS": STEPS, "STEP_SECONDS": 0.1})
    asked, broken = [Asked(_created(job), 3)], []
    with watched(job) as states, sampled(job) as rows:
        generation = _trains(job, 3)
        broken.append(Fault(time.time(), 1))
        job.kill_rank(1)
        generation = _trains(job, 3, after=generation)
        deleted = job.pod(2)["metadata"]["name"]
        broken.append(Fault(time.time(), 1, deleted=deleted))
        job.delete_pod(deleted, grace_s=0)
        generation = _trains(job, 3, after=generation)
        node, lost = node_of_some({"it": job}, leader_node(operator))
        broken.append(Fault(time.time(), len(lost["it"])))
        with power.off(node):
            generation = _trains(job, 3, after=generation)
        for replicas in (2, 4):
            asked.append(Asked(time.time(), replicas))
            job.patch_replicas(replicas)
            generation = _trains(job, replicas, after=generation)
        job.pace(0)
        _ends(job, rows)
    trace = job.trace()
    _assert_true(rows, trace, Run(asked, broken, total_steps=STEPS, global_batch=80))
    assert "Recovering" in states, states
    assert len({d.parameters for d in trace.done}) == 1, "the processes ended with different parameters"


@pytest.mark.usefixtures("nothing_shared")
@pytest.mark.slow
def test_columns_follow_a_script(jobs: Callable[..., TracedJob], operator: Kubectl, power: Power) -> None:
    """An unmodified script: a process is killed, a pod deleted, a node switched off, it grows and ends."""
    power.all_on()
    job = jobs(
        "plain", replicas=2, elastic=(1, 3), script="plain.py", environment={"STEPS": 100_000, "STEP_SECONDS": 0.05}
    )
    asked, broken = [Asked(_created(job), 2)], []
    with sampled(job) as rows:
        formed = _script_trains(job, 2)
        before = job.containers()
        broken.append(Fault(time.time(), 1))
        job.kill_rank(1)
        formed = _script_trains(job, 2, after=formed)
        assert job.containers() == before, "the kill cost a pod or a container"
        deleted = job.pod(1)["metadata"]["name"]
        broken.append(Fault(time.time(), 1, deleted=deleted))
        job.delete_pod(deleted, grace_s=0)
        formed = _script_trains(job, 2, after=formed)
        node, lost = node_of_some({"it": job}, leader_node(operator))
        broken.append(Fault(time.time(), len(lost["it"]), silent=True))
        kept = {name: container for name, container in job.containers().items() if name not in lost["it"]}
        with power.off(node):
            formed = _script_trains(job, 2, after=formed)
        assert job.containers().items() >= kept.items(), "the lost node cost a survivor its pod or container"
        asked.append(Asked(time.time(), 3))
        job.patch_replicas(3)
        _script_trains(job, 3, after=formed)
        (job.directory / "end").touch()
        _ends(job, rows)
    trace = job.trace()
    _assert_true(rows, trace, Run(asked, broken, tier="Script"))
    steps = {c.step for c in trace.commits}  # the script goes back to its own checkpoint, and leaves no step out
    assert steps == set(range(max(steps) + 1))


def _created(job: TracedJob) -> float:
    """Return when the API server created the job: age counts from there, however long the answer took."""
    return datetime.fromisoformat(job.get()["metadata"]["creationTimestamp"]).timestamp()


def _ends(job: TracedJob, rows: list[Row]) -> None:
    """Wait until the job has succeeded, and some lines have said so."""
    job.wait(240, "the job ends", state="Succeeded")
    ended = len(rows)
    wait_until(lambda: len(rows) >= ended + 4 / SAMPLE_S, timeout_s=20, what="some lines of the ended job")


def _assert_true(rows: list[Row], trace: Trace, run: Run) -> None:
    wrong = [problem for row in rows for problem in judge(row, trace, run)]
    print(f"{len(rows)} samples: " + ", ".join(sorted({f"{r.cells['STATE']} {r.cells['READY']}" for r in rows})))
    assert {r.cells["STATE"] for r in rows} >= {"Starting", "Running", "Succeeded"}
    assert not wrong, "\n".join([*wrong[:10], story(trace, run)])
    assert len(rows) >= LEAST_SAMPLES * (rows[-1].after - rows[0].before) / SAMPLE_S, "kubectl was asked too seldom"


def _script_trains(job: TracedJob, workers: int, after: int = 0) -> int:
    """Wait until a group of so many processes that formed after the `after`-th has made 40 steps; return which it is."""

    def there(trace: Trace) -> bool:
        newest = trace.commits[-1].generation
        return newest > after and len(trace.pids(newest)) == workers and len(trace.intervals_s(newest)) >= 40

    trace = job.wait_trace(there, 180, f"a script trains with {workers} workers, after group {after}")
    return trace.commits[-1].generation


def _trains(job: TracedJob, workers: int, after: int = 0) -> int:
    return job.training(workers=workers, after=after, steps=10).commits[-1].generation
