"""A stream in real processes: each record once through a kill and a growth, and all end before the step that is not whole."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regroup.protocol import env, local
from tests.trainer.agent_double import AgentDouble
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "stream_job.py"
BATCH, WHOLE = 24, 120
LENGTH = WHOLE * BATCH + 13
"""The last ranks find the end, the first ones have all of their share."""


@pytest.fixture
def job(tmp_path: Path, zygote: Zygote) -> Iterator[AgentDouble]:
    double = AgentDouble(tmp_path, zygote, SCRIPT, {"TEST_PACE": "0.05", env.MAX_WORLD_SIZE: "3"})
    yield double
    double.close()


def start(job: AgentDouble, slot: int, **environment: str) -> None:
    ids = str(job.directory / f"{len(job.everyone)}.ids")
    job.start(slot, **{"TEST_IDS": ids, "TEST_LENGTH": str(LENGTH), **environment})


def events(job: AgentDouble) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(job.directory.glob("*.ids")) for line in path.read_text().splitlines()]


def committed(job: AgentDouble) -> list[list[int]]:
    """Return the records of each step, of the generation that committed it."""
    read: dict[tuple[int, int], list[int]] = defaultdict(list)
    generation: dict[int, int] = {}
    for event in events(job):
        if event["event"] == "read":
            read[event["generation"], event["step"]] += event["records"]
        elif event["event"] == "commit":
            generation[event["step"]] = max(event["generation"], generation.get(event["step"], 0))
    assert sorted(generation) == list(range(len(generation)))
    return [sorted(read[generation[step], step]) for step in range(len(generation))]


def end(job: AgentDouble, slots: list[int]) -> list[dict[str, Any]]:
    job.wait_finished(*slots)
    job.finish()
    job.wait_exit(*slots)
    return [json.loads(job.workers[slot].log.strip().splitlines()[-1]) for slot in slots]


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_every_record_is_used_once_through_a_kill_and_a_growth(job: AgentDouble, reduction: str) -> None:
    for slot in range(3):
        start(job, slot, TEST_REDUCTION=reduction)
    job.wait_attached(0, 1, 2)
    job.announce(range(3))
    job.wait_step(1, 10, range(3))
    job.kill(1)
    job.announce([0, 2], lost=[job.workers[1].pod_uid])
    job.wait_step(2, 20, [0, 2])
    start(job, 3, TEST_REDUCTION=reduction)
    job.wait_attached(3)
    job.announce([0, 2, 3])
    job.wait_step(3, 30, [0, 2, 3])
    joined = job.workers[3].messages(local.AdoptedLocally, 3)[0].start_step
    job.go()
    ends = end(job, [0, 2, 3])
    assert committed(job) == [list(range(step * BATCH, (step + 1) * BATCH)) for step in range(WHOLE)]
    assert len({json.dumps(one) for one in ends}) == 1
    assert (ends[0]["outcome"], ends[0]["step"]) == ("Complete", WHOLE)
    opened = [event["position"] for event in events(job) if event["event"] == "open" and event["generation"] == 3]
    assert min(opened) >= joined * BATCH, "nobody reads again from the start"


@pytest.mark.parametrize("width", [2, 40_000], ids=["gradients go with the rows", "gradients go in buckets"])
def test_end_is_the_same_where_a_rank_dies_as_it_is_found(job: AgentDouble, width: int) -> None:
    """The survivors know of it, or find it again; a rank that joins afterwards hears of it."""
    for slot in range(2):
        start(job, slot, TEST_LENGTH=str(10 * BATCH + 5), TEST_WIDTH=str(width))
    job.wait_attached(0, 1)
    job.announce(range(2))
    job.wait_finished(0, 1)
    job.kill(1)
    gone = job.workers[1].pod_uid
    start(job, 1, TEST_LENGTH=str(10 * BATCH + 5), TEST_WIDTH=str(width))
    job.wait_attached(1)
    job.announce(range(2), lost=[gone])
    ends = end(job, [0, 1])
    assert [one["step"] for one in ends] == [10, 10]
    assert [worker.messages(local.FinishedLocally)[-1].step for worker in job.workers.values()] == [10, 10]
    assert committed(job) == [list(range(step * BATCH, (step + 1) * BATCH)) for step in range(10)]


def test_stream_without_a_whole_step_ends_every_process_with_a_sentence(job: AgentDouble) -> None:
    for slot in range(2):
        start(job, slot, TEST_LENGTH=str(BATCH - 1))
    job.wait_attached(0, 1)
    job.announce(range(2))
    job.wait_exit(0, 1)
    for slot in range(2):
        assert "DataError: data ended in step 0: the stream has fewer samples" in job.workers[slot].log
