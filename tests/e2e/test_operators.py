"""The operator dies, or there are two: training goes on, the status is true again, no number is given twice."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation
from harness.processes import alive
from harness.trace import Trace
from harness.traced_job import Process
from tests.e2e.columns import SAMPLE_S, sampled
from tests.e2e.shared import WORKERS, SharedJob, SharedJobs
from tests.e2e.truth import SEEN_S, UNLED_S, seconds, unwritten
from tests.long import only_long

USUAL_S, QUIET_S, WATCHED_S = 8.0, 20.0, 4.0
"""Before the kill, after it, and after the new leader's first status."""
PACE_S = 0.05
PAUSE_S = 0.5
"""As for a resize (test_resize.py): four operators start during an upgrade, on the cores that the trainers have."""
DECISIONS = "/tmp/decisions.jsonl"
"""As in docs/how-to/runbook.md."""


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
    # A second: with two cores, an operator that starts is seen in the steps.
    assert max(then) <= max(3 * p99, 1.0), (max(then), p99)
    assert trace.commits[-1].generation == generation, "a generation was issued"
    assert status["membership"]["generation"] == generation
    shown = {(r.cells["STATE"], r.cells["READY"], r.cells["GENERATION"]) for r in rows}
    assert shown == {("Running", "3/3", str(generation))}
    assert len(rows) >= 0.5 * (rows[-1].after - begun) / SAMPLE_S, "kubectl was asked too seldom"
    assert unwritten(rows, since=killed, until=killed + UNLED_S) == []
    assert seconds(rows[-1].cells["SEEN"]) <= SEEN_S, "the new leader's status is old"
    after = job.trace()
    assert set(after.pids(generation)) == set(pids), "a worker was disturbed"


@only_long("tests/api/test_stale_writes.py has both writes of a leader that was stopped")
def test_two_operators_never_give_one_number_to_two_lists(shared_jobs: SharedJobs, operator: Kubectl) -> None:
    """The leader is stopped past its lease, workers die meanwhile, the other operator acts; then the old one goes on."""
    (job,) = shared_jobs.take("elastic")
    before = job.training()
    leader = installation.leader(operator)
    assert leader is not None
    uid, name = leader["metadata"]["uid"], leader["metadata"]["name"]
    with _watched(job) as seen:
        stopped = faults.signal_main(uid, "regroup_operator", signal.SIGSTOP)
        try:
            killed = _kill(job, before, rank=1)
            wait_until(lambda: _leads_instead(operator, name), timeout_s=60, what="the other operator leads")
            # The process may have started again before the other operator decides: then one generation is enough. An agent
            # that finds the other operator late misses the first, which then may form no group.
            between = job.changed(
                before,
                lambda p: p == killed,
                workers=WORKERS,
                survivors=2,
                generations=(1, 3),
                pausing=lambda _: True,
                skips=True,
            )
            killed_then = _kill(job, between, rank=0)
        finally:
            faults.signal_main(uid, "regroup_operator", signal.SIGCONT)
        wait_until(
            lambda: not alive(stopped), timeout_s=20, what="the operator that has lost its lease ends its process"
        )
        # One is enough where the process has started again before the leader decides: two operators share the cores with it.
        job.changed(between, lambda p: p == killed_then, workers=WORKERS, survivors=2, generations=(1, 2))
    assert len(seen) >= 3, "generations were watched"
    assert all(len(lists) == 1 for lists in seen.values()), seen
    trace = job.trace()
    for number in trace.generations():
        ranks = list(trace.pids(number).values())
        assert len(ranks) == len(set(ranks)), f"two processes had one rank in generation {number}"


@only_long("the operator is killed above, and tests/unit/controller/test_decision_log.py makes decisions again")
def test_upgrade_of_the_chart_disturbs_nobody_and_its_decisions_can_be_made_again(
    shared_jobs: SharedJobs, operator: Kubectl, tmp_path: Path
) -> None:
    """Both operators are replaced, one after the other, with another value: the steps go on. Then a process is killed, and the log
    that the value has switched on says what was decided. The tests that follow have that log, too."""
    (job,) = shared_jobs.take("elastic", pace_s=PACE_S)
    before = job.training(steps=20)
    generation, newest = before.commits[-1].generation, job.newest()
    old = {pod["metadata"]["uid"] for pod in operator.get("pods", f"--namespace={installation.SYSTEM}")["items"]}
    begun = time.time()
    job.wait_trace(lambda t: t.commits[-1].t >= begun + USUAL_S, USUAL_S + 20, "steps before the upgrade")
    upgrading = time.time()
    installation.install(operator, **{"settings.decisionLog": DECISIONS})
    upgraded = time.time()
    trace = job.wait_trace(
        lambda t: t.commits[-1].t >= upgraded + WATCHED_S, WATCHED_S + 20, "training goes on after the upgrade"
    )
    job.wait(30, "the status follows the new operator", step=trace.step_at(upgraded))
    usual = trace.intervals_s(since=begun, until=upgrading)
    then = trace.intervals_s(since=upgrading, until=upgraded + WATCHED_S)
    p99 = statistics.quantiles(usual, n=100)[98]
    print(f"steps: p99 {p99 * 1000:.1f} ms before, slowest {max(then) * 1000:.1f} ms during and after the upgrade")
    assert max(then) <= max(3 * p99, PAUSE_S), (max(then), p99)
    assert trace.commits[-1].generation == generation, "a generation was issued"
    assert job.newest() == newest
    assert set(trace.pids(generation)) == set(before.pids(generation)), "a worker was disturbed"
    leader = installation.leader(operator)
    assert leader is not None
    assert leader["metadata"]["uid"] not in old
    killed = _kill(job, trace, rank=1)
    job.changed(trace, lambda p: p == killed, workers=WORKERS, survivors=2, generations=(1, 2))
    name = leader["metadata"]["name"]
    log = tmp_path / "decisions.jsonl"
    log.write_text(operator.run("--namespace", installation.SYSTEM, "exec", name, "--", "cat", DECISIONS))
    said = _replayed(log, f"{job.namespace}/{job.name}")
    assert f"generation {job.newest()} of workers" in said, said[-3000:]
    assert "all made again alike" in said


@contextmanager
def _watched(job: SharedJob) -> Iterator[dict[int, set[tuple[str, str]]]]:
    """Look at the job's membership while the block runs: each number, and every (uid, members) that it was seen with."""
    seen: dict[int, set[tuple[str, str]]] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            try:
                membership = job.status().get("membership")
            except ClusterError:
                continue
            if membership:
                seen.setdefault(membership["generation"], set()).add((membership["uid"], membership["members"]))

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        try:
            yield seen
        finally:
            done.set()
        watcher.result()


def _replayed(log: Path, job: str) -> str:
    """Return what `regroup replay` prints; it must find that every decision is made again alike."""
    command = [str(Path(sys.executable).with_name("regroup")), "replay", "--job", job, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def _kill(job: SharedJob, before: Trace, *, rank: int) -> Process:
    """SIGKILL the process that had a rank at the end of `before`; return it."""
    (victim,) = [process for process, r in before.pids(before.commits[-1].generation).items() if r == rank]
    job.kill_rank(rank)
    return victim


def _leads_instead(k: Kubectl, name: str) -> bool:
    leader = installation.leader(k)
    return leader is not None and leader["metadata"]["name"] != name
