"""What the tests of the elastic session share: the script, how a job starts, and how it ends."""

import json
from pathlib import Path
from typing import Any

from tests.trainer.agent_double import AgentDouble

SCRIPT = Path(__file__).parent / "small_job.py"


def start(job: AgentDouble, count: int, **environment: str) -> None:
    for slot in range(count):
        job.start(slot, **environment)
    job.wait_attached(*range(count))
    job.announce(range(count))


def finish(job: AgentDouble, slots: list[int]) -> list[dict[str, Any]]:
    """Let the job end, and return the last line of each trainer."""
    job.go()
    job.wait_finished(*slots)
    job.stop()
    job.wait_exit(*slots)
    return [json.loads(job.workers[slot].log.strip().splitlines()[-1]) for slot in slots]


def assert_one_state(ends: list[dict[str, Any]]) -> None:
    assert len({end["hash"] for end in ends}) == 1
    assert all(end["same_model"] for end in ends)


def run_alone(job: AgentDouble, **environment: str) -> dict[str, Any]:
    """Run the job's script with one rank and no fault, and return its last line."""
    alone = AgentDouble(job.directory / "alone", job.zygote, job.script, environment)
    alone.directory.mkdir()
    try:
        start(alone, 1)
        (reference,) = finish(alone, [0])
    finally:
        alone.close()
    return reference
