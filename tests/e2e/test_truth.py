"""`kubectl get trainingjobs -o wide`, sampled against the trainers' own trace, tells the truth through all that can happen."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from cluster.kubectl import Kubectl, wait_until
from harness import judge as steps
from harness.trace import Trace
from harness.traced_job import TracedJob, leader_node
from tests.e2e.columns import SAMPLE_S, sampled
from tests.e2e.kit import Power
from tests.e2e.shared import node_of_some
from tests.e2e.truth import Asked, Fault, Row, Run, judge

STEPS, PACE_S = 3000, 0.05
WORKERS = 3


@pytest.mark.usefixtures("nothing_shared")
def test_columns_follow_the_trainers_of_both_tiers(
    jobs: Callable[..., TracedJob], operator: Kubectl, power: Power
) -> None:
    """A session and an unmodified script: each loses a process, a pod, and what is on a node, is resized, and ends."""
    power.all_on()
    asked: dict[str, list[Asked]] = {"session": [Asked(time.time(), WORKERS)]}
    broken: dict[str, list[Fault]] = {"session": [], "script": []}
    environment = {"STEPS": STEPS, "STEP_SECONDS": PACE_S}
    small = {"resources": {"requests": {"cpu": "200m", "memory": "200Mi"}}}
    session = jobs("session", elastic=(1, 5), environment=environment, container=small)
    endless = environment | {"STEPS": 100_000}
    asked["script"] = [Asked(time.time(), WORKERS)]
    script = jobs("script", script="plain.py", elastic=(1, 5), environment=endless, container=small)
    both = {"session": session, "script": script}

    def train(workers: int) -> None:
        newest["session"] = _trains(session, workers, newest["session"])
        newest["script"] = _script_trains(script, workers, newest["script"])

    newest = {"session": 0, "script": 0}
    with sampled(session) as rows, sampled(script) as script_rows:
        train(WORKERS)
        before = {name: job.containers() for name, job in both.items()}
        for name, job in both.items():
            broken[name].append(Fault(time.time(), 1))
            job.kill_rank(1)
        train(WORKERS)
        assert before == {name: job.containers() for name, job in both.items()}, "the kill cost a pod or a container"
        for name, job in both.items():
            broken[name].append(Fault(time.time(), 1))
            job.delete_pod(job.pod(2)["metadata"]["name"], grace_s=0)
        train(WORKERS)
        node, lost = node_of_some(both, leader_node(operator))
        kept = {c for name, job in both.items() for c in job.containers().items() if c[0] not in lost[name]}
        for name in both:
            broken[name].append(Fault(time.time(), len(lost[name]), silent=name == "script"))
        with power.off(node):
            train(WORKERS)
        now = {c for job in both.values() for c in job.containers().items()}
        assert now >= kept, "the lost node cost a survivor its pod or container"
        asked["session"].append(Asked(time.time(), 2))
        session.patch_replicas(2)
        newest["session"] = _trains(session, 2, newest["session"])
        for name, job in both.items():
            asked[name].append(Asked(time.time(), 4))
            job.patch_replicas(4)
        train(4)
        session.pace(0)
        (script.directory / "end").touch()
        for job in both.values():
            job.wait(240, "the job ends", state="Succeeded")
        ended = len(rows)
        wait_until(lambda: len(rows) >= ended + 4 / SAMPLE_S, timeout_s=20, what="some lines of the ended jobs")
    trace, script_trace = session.trace(), script.trace()
    _assert_true(rows, trace, Run(asked["session"], broken["session"], total_steps=STEPS, global_batch=80))
    _assert_true(script_rows, script_trace, Run(asked["script"], broken["script"], tier="Script"))
    assert len({d.parameters for d in trace.done}) == 1, "the processes ended with different parameters"
    assert steps.whole(trace.judged(), last=STEPS - 1, redone=3) == []
    assert steps.whole(script_trace.judged(), redone=3) == []


def _assert_true(rows: list[Row], trace: Trace, run: Run) -> None:
    wrong = [problem for row in rows for problem in judge(row, trace, run)]
    print(f"{len(rows)} samples: " + ", ".join(sorted({f"{r.cells['STATE']} {r.cells['READY']}" for r in rows})))
    assert {r.cells["STATE"] for r in rows} >= {"Starting", "Running", "Recovering", "Succeeded"}
    assert not wrong, "\n".join(wrong[:10])


def _script_trains(job: TracedJob, workers: int, after: int = 0) -> int:
    """Wait until a group of so many processes that formed after the `after`-th has made 40 steps; return which it is."""

    def there(trace: Trace) -> bool:
        newest = trace.commits[-1].generation
        return newest > after and len(trace.pids(newest)) == workers and len(trace.intervals_s(newest)) >= 40

    trace = job.wait_trace(there, 180, f"a script trains with {workers} workers, after group {after}")
    return trace.commits[-1].generation


def _trains(job: TracedJob, workers: int, after: int = 0) -> int:
    return job.training(workers=workers, after=after, steps=20).commits[-1].generation
