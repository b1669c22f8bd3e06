"""The operator dies, or there are two: training goes on, the status is true again, no number is given twice."""

from __future__ import annotations

import signal
import statistics
import threading
import time

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation, judge
from tests.e2e.columns import SAMPLE_S, sampled
from tests.e2e.shared import SharedJobs

USUAL_S, QUIET_S, WATCHED_S = 8.0, 20.0, 4.0
"""Before the kill, after it, and after the new leader's first status."""
PACE_S = 0.05


def test_killed_operator_disturbs_nobody(shared_jobs: SharedJobs, operator: Kubectl) -> None:
    (job,) = shared_jobs.take("elastic", pace_s=PACE_S)
    before = job.training(steps=20)
    generation, pids = before.commits[-1].generation, before.pids(before.commits[-1].generation)
    with sampled(job) as rows:
        begun = time.time()
        job.wait_trace(lambda t: t.commits[-1].t >= begun + USUAL_S, USUAL_S + 20, "steps before the kill")
        leader = installation.leader(operator)
        assert leader is not None
        killed = faults.kill_main(leader["metadata"]["uid"], "regroup_operator")
        trace = job.wait_trace(
            lambda t: t.commits[-1].t >= killed + QUIET_S, QUIET_S + 20, "training goes on without the operator"
        )
        step = trace.step_at(killed + QUIET_S)
        status = job.wait(60, "the status moves again", step=step)
        back = time.time()
        job.wait_trace(
            lambda t: t.commits[-1].t >= back + WATCHED_S, WATCHED_S + 20, "training goes on after the takeover"
        )
    usual = trace.intervals_s(since=begun, until=killed)
    then = trace.intervals_s(since=killed, until=killed + QUIET_S)
    p99 = statistics.quantiles(usual, n=100)[98]
    print(
        f"steps: p99 {p99 * 1000:.1f} ms before, slowest {max(then) * 1000:.1f} ms in the 20 s after the operator's kill"
    )
    assert max(then) <= 3 * p99, (max(then), p99)
    assert trace.commits[-1].generation == generation, "a generation was issued"
    assert status["membership"]["generation"] == generation
    shown = {(r.cells["STATE"], r.cells["READY"], r.cells["GENERATION"]) for r in rows}
    assert shown == {("Running", "3/3", str(generation))}
    assert len(rows) >= 0.5 * (rows[-1].after - begun) / SAMPLE_S, "kubectl was asked too seldom"
    after = job.trace()
    assert set(after.pids(generation)) == set(pids), "a worker was disturbed"


def test_two_operators_never_give_one_number_to_two_lists(shared_jobs: SharedJobs, operator: Kubectl) -> None:
    """The leader is stopped past its lease, workers die meanwhile, the other operator acts; then the old one goes on."""
    (job,) = shared_jobs.take("elastic")
    first = job.training().commits[-1].generation
    seen: dict[int, set[tuple[str, str]]] = {}
    watching = threading.Event()

    def watch() -> None:
        while not watching.is_set():
            try:
                membership = job.status().get("membership")
            except ClusterError:
                continue
            if membership:
                seen.setdefault(membership["generation"], set()).add((membership["uid"], membership["members"]))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    leader = installation.leader(operator)
    assert leader is not None
    uid, name = leader["metadata"]["uid"], leader["metadata"]["name"]
    faults.signal_main(uid, "regroup_operator", signal.SIGSTOP)
    try:
        job.kill_rank(1)
        generation = job.trace().commits[-1].generation
        wait_until(lambda: _leads_instead(operator, name), timeout_s=60, what="the other operator leads")
        trace = job.wait_trace(lambda t: t.commits[-1].generation > generation, 60, "the other operator acts")
        generation = trace.commits[-1].generation
        job.kill_rank(0)
    finally:
        faults.signal_main(uid, "regroup_operator", signal.SIGCONT)
    job.training(after=generation)
    watching.set()
    watcher.join()
    assert len(seen) >= 3, "generations were watched"
    assert all(len(lists) == 1 for lists in seen.values()), seen
    trace = job.trace()
    assert judge.whole([c for c in trace.judged() if c.generation >= first], first=None, redone=2) == []
    for number in trace.generations():
        ranks = list(trace.pids(number).values())
        assert len(ranks) == len(set(ranks)), f"two processes had one rank in generation {number}"


def _leads_instead(k: Kubectl, name: str) -> bool:
    leader = installation.leader(k)
    return leader is not None and leader["metadata"]["name"] != name
