"""A checkpoint volume that stops answering under `regroup run`: training goes on, the job ends, and all of it is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.local_run import LocalRun
from tests.trainer.dead_volume import DeadVolume

SCRIPT = Path(__file__).with_name("small_job.py")
WAIT_S = 2
HANGS = rf"(Writing checkpoint step-\S+|Deleting old checkpoints) has taken more than {WAIT_S} s: the volume of"
STEPS = 800
"""At 80 ms a step more than the test takes until it takes that pause away."""


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


@pytest.mark.slow
def test_volume_that_hangs_delays_no_step_and_the_end_by_its_bound_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, go = tmp_path / "saved", tmp_path / "go"
    monkeypatch.setenv("TEST_STEPS", str(STEPS))
    monkeypatch.setenv("TEST_GO", str(go))
    monkeypatch.setenv("TEST_PACE", "0.08")
    run = LocalRun(
        tmp_path, "--workers", "2", "--checkpoint", str(saved), "--checkpoint-every", "1",
        "--checkpoint-wait", str(WAIT_S), str(SCRIPT),
    )  # fmt: skip
    try:
        run.wait(lambda s: condition(s, "CheckpointsSaved").get("reason") == "Saved", "a checkpoint that is saved")
        with DeadVolume(saved) as volume:
            said = run.wait(lambda s: condition(s, "CheckpointsSaved").get("reason") == "NotSaved", "the condition")
            message = condition(said, "CheckpointsSaved")["message"]
            assert re.match(rf"Worker 0: {HANGS} {re.escape(str(saved))} does not answer\. ", message), message
            assert f"The newest checkpoint is of step {said['checkpoint']['step']}." in message
            step = said["progress"]["step"]
            run.wait(lambda s: s["progress"]["step"] >= step + 20, "steps while the volume hangs")
            volume.answer()
            run.wait(lambda s: condition(s, "CheckpointsSaved").get("status") == "True", "the volume that is back")
        with DeadVolume(saved):
            go.touch()
            ended = run.wait(lambda s: s.get("phase") == "Succeeded", "the end, although the volume hangs")
            assert run.process.wait(60) == 0
    finally:
        run.close()
    newest = ended["checkpoint"]["step"]
    assert newest < STEPS
    last_words = {
        ("CheckpointsSaved", "NotSaved"): f"The newest checkpoint is of step {newest}.",
        ("Complete", "FinishedUnsaved"): f"A new job continues after step {newest} with spec.checkpoint.resumeFrom: ",
    }
    for (kind, reason), words in last_words.items():
        assert condition(ended, kind)["reason"] == reason
        message = condition(ended, kind)["message"]
        assert re.search(rf"The last step is committed, but not saved\. Worker 0: {HANGS}", message), message
        assert words in message
    lines = run.log.read_text().splitlines()
    assert any("Warning CheckpointNotSaved" in line for line in lines), "an event"
    ends = [json.loads(line) for line in lines if line.startswith('{"hash"')]
    assert len({end["hash"] for end in ends}) == 1, "one state at the end"
    assert len(ends) == 2, "what stands behind the loop was not run"
