"""What the tests of the elastic session share: the script, how a job starts, and how it ends."""

import json
from pathlib import Path
from typing import Any

from harness.polling import until
from harness.processes import alive
from tests.trainer.agent_double import AgentDouble
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "small_job.py"
"""`make test-all`: walks are longer, and tests that others nearly contain are run, too."""
STEPS = 150
PACE_S = 0.08
"""A step takes so long until a test lets the job end: it has 12 s for what it does in mid-training, and the end takes few steps."""


def start(job: AgentDouble, count: int, **environment: str) -> None:
    for slot in range(count):
        job.start(slot, **environment)
    job.wait_attached(*range(count))
    job.announce(range(count))


def finish(job: AgentDouble, slots: list[int]) -> list[dict[str, Any]]:
    """Let the job end, and return the last line of each trainer."""
    job.go()
    job.wait_finished(*slots)
    job.finish()
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


class Plain:
    """A script that runs as it would under plain `python`, beside the test."""

    def __init__(self, zygote: Zygote, output: Path, script: Path, *args: str, **environment: str) -> None:
        self._output = output
        self._pid = zygote.start(script, environment, output, args)

    def wait(self) -> str:
        """Wait for its end and return what it has written. Only that tells how it ended."""
        until(
            lambda: not alive(self._pid), "the end of the plain script", timeout_s=300, details=self._output.read_text
        )
        return self._output.read_text()
