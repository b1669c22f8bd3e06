"""Shares that follow the speed of ranks: no sample twice or never, through a kill and a growth."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from regroup.data import SamplePlan
from regroup.protocol import env, local
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import assert_one_state, finish

PLAN = SamplePlan(0, 1000, 48, 4)
FAST_S, SLOW_S = 0.002, 0.03
TRIALS = 40
"""Steps of a generation in which a deal of its own is certain: a change comes after 20 at the earliest."""


def used(directory: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the microbatches of each (generation, step), and check that no process wrote half a line."""
    found = defaultdict(list)
    for path in directory.glob("*.ids"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            found[event["generation"], event["step"]].append(event)
    return found


@pytest.mark.slow
def test_samples_are_used_once_while_shares_change_and_ranks_come_and_go(job: AgentDouble) -> None:
    def start(slot: int, slow_s: float, **more: str) -> None:
        settings = {"TEST_UNEVEN": "1", "TEST_PACE": "0", "TEST_STEPS": "400", env.MAX_WORLD_SIZE: "3"}
        ids = {"TEST_IDS": str(job.directory / f"{len(job.everyone)}.ids"), "TEST_SLOW": str(slow_s)}
        job.start(slot, **settings, **ids, **more)

    for slot in range(3):
        start(slot, SLOW_S if slot == 2 else FAST_S)
    job.wait_attached(0, 1, 2)
    job.announce(range(3))
    job.wait_step(1, TRIALS, range(3))
    job.kill(1)
    second = job.announce([0, 2], lost=[job.workers[1].pod_uid]).number
    job.wait_step(second, 1, [0, 2])
    begun = job.workers[0].messages(local.AdoptedLocally, second)[0].start_step
    job.wait_step(second, begun + TRIALS, [0, 2])
    start(3, FAST_S, TEST_INIT="13")
    job.wait_attached(3)
    job.announce([0, 2, 3])
    job.wait_step(3, 1, [0, 2, 3])
    begun = job.workers[0].messages(local.AdoptedLocally, 3)[0].start_step
    job.wait_step(3, begun + TRIALS, [0, 2, 3])
    assert_one_state(finish(job, [0, 2, 3]))

    events = used(job.directory)
    dealt: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for step in range(400):
        committed = [g for g, s in events if s == step and any(e["event"] == "commit" for e in events[g, s])]
        generation = max(committed)
        parts = [event for event in events[generation, step] if event["event"] == "microbatch"]
        assert sorted(event["v"] for event in parts) == list(range(PLAN.num_virtual)), (generation, step)
        for event in parts:
            assert event["ids"] == PLAN.ids(step, event["v"]).tolist()
        counts = tuple(
            sum(event["rank"] == rank for event in parts) for rank in range(2 if generation == second else 3)
        )
        if not dealt[generation]:
            assert counts == tuple(map(len, PLAN.shares(len(counts)))), "a generation begins with equal shares"
        dealt[generation].add(counts)
    slow_rank = {1: 2, second: 1, 3: 1}
    for generation, deals in dealt.items():
        assert min(min(counts) for counts in deals) >= 1
        assert min(counts[slow_rank[generation]] for counts in deals) <= 2, (generation, deals)
    reports = [message for worker in job.everyone for message in worker.messages(local.Committed)]
    assert {report.generation for report in reports} == {1, second, 3}
    assert all(report.digest == PLAN.digest(report.reportable_step) for report in reports)
