"""SIGKILL of a trainer process: the group steps again within a second, nobody else loses anything."""

from __future__ import annotations

import pytest

from harness.traced_job import Process
from tests.e2e.shared import WORKERS, SharedJob, SharedJobs
from tests.long import trials

RECOVERY_S = 1.0
TRIALS = trials(1, long=3)


@pytest.mark.parametrize("kind", ["elastic", "two processes"])
def test_killed_process_costs_the_group_less_than_a_second(shared_jobs: SharedJobs, kind: str) -> None:
    (job,) = shared_jobs.take(kind)
    containers, counted = job.containers(), job.counted()
    recoveries: dict[str, list[float]] = {}
    hosts = []
    for _ in range(TRIALS):
        for who in _order(job):
            rank, recovery_s = _kill(job, who)
            recoveries.setdefault(who, []).append(recovery_s)
            hosts += [rank] if who == "the store's host" else []
    print(f"SIGKILL -> next committed step, s: { {w: [round(x, 3) for x in r] for w, r in recoveries.items()} }")
    assert max(max(r) for r in recoveries.values()) <= RECOVERY_S, recoveries
    assert 0 not in hosts, "the store's host was rank 0"
    assert job.containers() == containers, "a pod or container was restarted"
    assert job.counted() == counted + 3 * TRIALS


def _order(job: SharedJob) -> list[str]:
    """Return whom to kill, so that the store's host is another one than rank 0. A worker whose process was killed is the
    store's host once it is in again: it arrives before the others leave (rule JOIN)."""
    job.training()
    if job.rank_of("the store's host") == 0:
        return ["the last rank", "the store's host", "rank 0"]
    return ["the store's host", "rank 0", "the last rank"]


def _kill(job: SharedJob, who: str) -> tuple[int, float]:
    """Kill a process, wait until everybody trains again; return its rank, and the seconds to the next commit."""
    before = job.training()
    generation, rank = before.commits[-1].generation, job.rank_of(who)
    (victim,) = [process for process, r in before.pids(generation).items() if r == rank]
    killed = job.kill_rank(rank)

    def sibling(process: Process) -> bool:
        return process[0] == victim[0]

    # One generation without the worker, one with it again.
    survivors = job.processes * WORKERS - 1
    trace = job.changed(
        before, lambda p: p == victim, workers=WORKERS, survivors=survivors, generations=(2, 2), pausing=sibling
    )
    return rank, trace.first_of(generation + 1).t - killed


def test_fixed_size_job_waits_for_its_process_and_no_longer(shared_jobs: SharedJobs) -> None:
    (job,) = shared_jobs.take("fixed size")
    containers = job.containers()
    waits = []
    for _ in range(TRIALS):
        before = job.training()
        generation = before.commits[-1].generation
        (victim,) = [process for process, rank in before.pids(generation).items() if rank == 1]
        killed = job.kill_rank(1)
        trace = job.changed(before, lambda p, victim=victim: p == victim, workers=3, survivors=2)  # type: ignore[misc]
        built = [
            float(str(b["t"])) - float(str(b["started"])) for b in trace.built if float(str(b["started"])) > killed
        ]
        waits.append((trace.first_of(generation + 1).t - killed, built[0]))
    print(
        f"SIGKILL -> next committed step (the script's own build), s: {[(round(a, 3), round(b, 3)) for a, b in waits]}"
    )
    assert all(total <= RECOVERY_S + build for total, build in waits), waits
    assert job.containers() == containers, "a pod or container was restarted"
