"""The first trace that left a job waiting for ever, with real processes under `regroup run` (in memory and with its siblings:
tests/unit/controller/test_liveness.py). Kills are real; when they come is read from the status and the agents' own files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.local_run import LocalRun
from harness.polling import until

SCRIPT = Path(__file__).with_name("gated_job.py")
BOUND_S = 10.0
"""From the moment that worker 1 may go on to its first step: 2 s by the clock of the plan, the rest is a busy machine's."""


class Held:
    """A run whose trainers are held by files."""

    def __init__(self, directory: Path) -> None:
        self.hold = directory / "hold"
        self.hold.mkdir()
        saved = ("--checkpoint", str(directory / "saved"), "--checkpoint-every", "1")
        self.run = LocalRun(
            directory, "--workers", "2", "--min", "1", "--max", "5", "--max-restarts", "1000", *saved, str(SCRIPT)
        )

    def generation_of(self, members: str, after: int) -> int:
        """Wait until a generation above `after` has these members; return its number."""

        def there(status: dict[str, Any]) -> bool:
            membership = status.get("membership") or {}
            return membership.get("members") == members and membership["generation"] > after

        found: int = self.run.wait(there, f"a generation of {members}")["membership"]["generation"]
        return found

    def trainer(self, slot: int) -> int:
        return self.run.trainers()[f"local-worker-{slot}-0"]

    def kill(self, slot: int, first: signal.Signals = signal.SIGKILL) -> None:
        """Kill a worker's process and hold the one that comes after it at its start."""
        before = self.trainer(slot)
        (self.hold / f"start-{slot}").touch()
        os.kill(before, first)
        with contextlib.suppress(ProcessLookupError):  # the first one may have been enough
            os.kill(before, signal.SIGKILL)
        until(
            lambda: self.run.trainers().get(f"local-worker-{slot}-0", before) != before,
            "the next process",
            details=self.run.log.read_text,
        )

    def release(self, what: str) -> None:
        (self.hold / what).unlink()

    def said_on_disk(self, slot: int) -> dict[str, int]:
        """Return what the agent of a worker keeps for a container restart."""
        found: dict[str, int] = json.loads(
            (self.run.state / f"local-worker-{slot}-0" / "state" / "agent.json").read_text()
        )
        return found


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setenv("TEST_HOLD", str(tmp_path / "hold"))
    one = Held(tmp_path)
    yield one
    one.run.close()


@pytest.mark.slow
def test_word_that_a_generation_was_never_entered_ends_the_wait_for_it(held: Held) -> None:
    """HEARD, WORDS. Worker 1 trains alone and dies; the next generation names worker 0, which is stopped and killed before it
    enters. Worker 1 comes back and asks for a witness of that generation: worker 0's agent is it."""
    first = held.run.trains(2)["membership"]["generation"]
    held.kill(0)
    alone = held.run.trains(1, after=first)["membership"]["generation"]
    saved = held.run.wait(
        lambda s: (s.get("checkpoint") or {}).get("generation", 0) >= alone, "a checkpoint of worker 1 alone"
    )["checkpoint"]["step"]
    held.run.scale(1)
    held.kill(1)
    held.run.wait(lambda s: s.get("phase") == "Waiting", "nobody is left")
    (held.hold / "enter-0").touch()
    held.release("start-0")
    announced = held.generation_of("0", after=alone)
    held.kill(0, first=signal.SIGSTOP)
    assert held.said_on_disk(0)["entered"] < announced, "it has entered: this is another trace"
    held.release("start-1")
    released_s = time.monotonic()
    trained = held.run.trains(1, after=announced)
    took_s = time.monotonic() - released_s
    print(f"worker 1 may go on -> it trains: {took_s:.1f} s")
    assert trained["membership"]["members"] == "1"
    assert trained["lineage"][-1]["startStep"] >= saved > 0
    assert took_s <= BOUND_S
