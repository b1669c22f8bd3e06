"""SIGKILL of a trainer process: the group steps again within a second, nobody else loses anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.trace import Trace
from harness.traced_job import TracedJob

RECOVERY_S = 1.0
TRIALS = 3

Start = Callable[..., TracedJob]


@pytest.mark.parametrize("processes", [1, 2], ids=["one process per worker", "two processes per worker"])
def test_killed_process_costs_the_group_less_than_a_second(jobs: Start, processes: int) -> None:
    job = jobs(elastic=(2, 3), processesPerWorker=processes, environment={"STEPS": 100000})
    job.training(workers=3)
    containers = job.containers()
    recoveries: dict[str, list[float]] = {}
    for _ in range(TRIALS):
        for who in ("rank 0", "the store's host", "the last rank"):
            recoveries.setdefault(who, []).append(_kill(job, who, processes))
    print(f"SIGKILL -> next committed step, s: { {w: [round(x, 3) for x in r] for w, r in recoveries.items()} }")
    assert max(max(r) for r in recoveries.values()) <= RECOVERY_S, recoveries
    assert job.containers() == containers, "a pod or container was restarted"
    trace = job.trace()
    assert trace.missing() == []
    assert job.status()["restarts"]["processes"] == 3 * TRIALS


def _kill(job: TracedJob, who: str, processes: int) -> float:
    """Kill a process, wait until everybody trains again; return the seconds to the next commit."""
    before = job.training(workers=3, steps=10)
    status = job.status()
    generation = status["membership"]["generation"]
    ranks = before.pids(generation)
    rank = {
        "rank 0": 0,
        "the store's host": status["membership"]["store"]["slot"] * processes,
        "the last rank": 3 * processes - 1,
    }[who]
    (victim,) = [key for key, r in ranks.items() if r == rank]
    killed = job.kill_rank(rank)
    trace = job.wait_trace(
        lambda t: t.commits[-1].generation > generation, 30, f"the group trains after the kill of {who}"
    )
    first = trace.first_of(generation + 1)
    _nothing_lost(trace, generation, killed)
    after = job.training(workers=3, steps=5)
    newest = after.pids(after.commits[-1].generation)
    assert set(ranks) - {victim} <= set(newest), "a survivor (or a sibling) lost its process"
    assert victim not in newest
    return first.t - killed


def _nothing_lost(trace: Trace, generation: int, killed: float) -> None:
    """At most the step in flight is done again: the new group begins at, or right after, the last committed one."""
    last = max(c.step for c in trace.commits if c.generation <= generation)
    first = min(c.step for c in trace.commits if c.generation > generation)
    assert last <= first <= last + 1, (last, first, killed)


def test_fixed_size_job_waits_for_its_process_and_no_longer(jobs: Start) -> None:
    job = jobs(elastic=None, environment={"STEPS": 100000})
    job.training(workers=3)
    containers = job.containers()
    waits = []
    for _ in range(TRIALS):
        before = job.training(workers=3, steps=10)
        generation = before.commits[-1].generation
        survivors = {key for key, rank in before.pids(generation).items() if rank != 1}
        killed = job.kill_rank(1)
        trace = job.wait_trace(
            lambda t, g=generation: t.commits[-1].generation > g, 60, "the group trains after the kill"
        )  # type: ignore[misc]
        built = [
            float(str(b["t"])) - float(str(b["started"])) for b in trace.built if float(str(b["started"])) > killed
        ]
        waits.append((trace.first_of(generation + 1).t - killed, built[0]))
        _nothing_lost(trace, generation, killed)
        after = job.training(workers=3, steps=5)
        assert survivors <= set(after.pids(after.commits[-1].generation)), "a survivor lost its process"
    print(
        f"SIGKILL -> next committed step (the script's own build), s: {[(round(a, 3), round(b, 3)) for a, b in waits]}"
    )
    assert all(total <= RECOVERY_S + build for total, build in waits), waits
    assert job.containers() == containers, "a pod or container was restarted"
    trace = job.trace()
    print(f"steps done twice in {TRIALS} kills: {len(trace.redone())}")
    assert len(trace.redone()) <= TRIALS
    assert trace.missing() == []
