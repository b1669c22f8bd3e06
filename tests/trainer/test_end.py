"""The end of a job under `regroup run`: Complete once the script has returned 0 in every worker, else its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.local_run import LocalRun
from tests.long import only_long
from tests.trainer.split_kit import SplitJob
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "ending_job.py"
STEPS = 6
SNAPSHOT = ("--memory-snapshot", "64Mi")
ENDED_S = 150


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the script leaves what it has seen and made."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("TEST_OUT", str(out))
    return out


def seen(out: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"rank-{rank}").read_text().splitlines()]


def failed(status: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in status["conditions"] if c["type"] == "Failed" and c["status"] == "True")


@pytest.mark.parametrize(
    ("arguments", "fails", "steps"),
    [
        pytest.param(("--workers", "2", *SNAPSHOT), "0:1:raise", STEPS, id="rank 0, from its memory snapshot"),
        pytest.param(
            ("--workers", "1", "--processes-per-worker", "2", *SNAPSHOT), "1:1:SIGKILL", STEPS, marks=pytest.mark.slow,
            id="one of two processes of a worker, from that of the other",
        ),
        pytest.param(
            ("--workers", "2", "--checkpoint", "CHECKPOINTS"), "1:2:7", 4, marks=pytest.mark.slow,
            id="twice, after an early break, from the checkpoint",
        ),
    ],
)  # fmt: skip
def test_script_that_fails_after_its_loop_runs_again_and_the_job_is_complete_once_it_has_returned(
    start: Callable[..., LocalRun],
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    fails: str,
    steps: int,
) -> None:
    monkeypatch.setenv("TEST_FAILS", fails)
    monkeypatch.setenv("TEST_BREAK", str(steps))
    run = start(*(a.replace("CHECKPOINTS", str(tmp_path / "checkpoints")) for a in arguments), str(SCRIPT))
    assert run.process.wait(ENDED_S) == 0, run.log.read_text()
    status, (who, times, _) = run.status(), map(str, fails.split(":"))
    failing, num = seen(out, int(who)), int(times)
    other = seen(out, 1 - int(who))
    assert len(failing) == num + 1
    assert len(other) == 1, "a script that has returned 0 does not run again"
    assert [*failing, *other] == [{**failing[0], "step": steps, "world_size": 2, "generation": 1}] * (num + 2)
    assert torch.load(out / "model.pt", weights_only=True)["digest"] == failing[0]["digest"]
    assert (status["phase"], status["restarts"]["processes"], status["membership"]["generation"]) == (
        "Succeeded",
        num,
        1,
    )
    assert "exitCode" not in status


@pytest.mark.slow
def test_script_that_returns_0_before_its_session_in_its_second_run_completes_the_job(
    start: Callable[..., LocalRun], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FAILS", "0:1:raise")
    monkeypatch.setenv("TEST_SKIPS", "1")
    run = start("--workers", "1", *SNAPSHOT, str(SCRIPT))
    assert run.process.wait(ENDED_S) == 0, run.log.read_text()
    status = run.status()
    assert (status["phase"], status["restarts"]["processes"]) == ("Succeeded", 1), "the exit with 0 is no failure"
    assert len(seen(out, 0)) == 1


@pytest.mark.slow
def test_script_that_always_fails_after_its_loop_fails_the_job_with_its_exit_code(
    start: Callable[..., LocalRun], out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FAILS", "0:99:7")
    run = start("--workers", "2", "--max-restarts", "1", "--checkpoint", str(tmp_path / "checkpoints"), str(SCRIPT))
    assert run.process.wait(ENDED_S) == 7, run.log.read_text()
    status = run.status()
    assert (status["phase"], status["exitCode"], failed(status)["reason"]) == ("Failed", 7, "TooManyRestarts")
    assert len(seen(out, 0)) == 2
    assert not (out / "model.pt").exists()


def test_script_that_fails_after_its_loop_where_the_state_is_nowhere_fails_the_job(
    start: Callable[..., LocalRun], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FAILS", "0:1:raise")
    run = start("--workers", "1", str(SCRIPT))
    assert run.process.wait(ENDED_S) == 1, run.log.read_text()
    said = failed(run.status())
    assert said["reason"] == "EndFailed"
    assert '"RuntimeError: could not save the model to the bucket" after the last step' in said["message"]
    assert "Set spec.checkpoint" in said["message"]
    assert len(seen(out, 0)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["0", pytest.param("1", marks=only_long("as rank 0"))])
def test_members_of_a_model_group_all_run_their_end_again(
    start: Callable[..., LocalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote, fails: str
) -> None:
    """No member can put its part of the model together alone: all join another generation, and train nothing more."""
    undisturbed = SplitJob(tmp_path / "undisturbed", zygote, "shard=2", TEST_PACE="0")
    try:
        undisturbed.start(range(2))
        undisturbed.agents.announce(range(2))
        undisturbed.finish(range(2))
    finally:
        undisturbed.close()
    directory = tmp_path / "fails"
    directory.mkdir()
    trace = directory / "trace"
    values = {"MESH": "shard=2", "PARTS": str(directory), "TRACE": str(trace), "END_FAILS": fails}
    for name, value in values.items():
        monkeypatch.setenv(f"TEST_{name}", value)
    saves = ("--checkpoint", str(directory / "saved"), "--checkpoint-every", "1")
    script = str(Path(__file__).parent / "split_job.py")
    run = start("--workers", "2", "--workers-per-group", "2", *saves, script, directory=directory)
    assert run.process.wait(ENDED_S) == 0, run.log.read_text()
    got, want = ([torch.load(where / f"{rank}.pt") for rank in (0, 1)] for where in (directory, undisturbed.parts))
    status = run.status()
    assert (status["phase"], status["restarts"]["processes"]) == ("Succeeded", 1)
    assert status["finished"]["generation"] == status["membership"]["generation"] == 2
    steps = [json.loads(line)["step"] for line in trace.read_text().splitlines()]
    assert sorted(steps) == sorted([*range(20)] * 2), "a step was trained again"
    for part, undisturbed_part in zip(got, want, strict=True):
        for name, held in undisturbed_part.items():
            for key, value in held["local"].items():
                assert torch.equal(part[name]["local"][key], value), (name, key)


SCRIPT_OF_TWO = """
echo "$RANK" >> "$TEST_OUT/begun"
if test "$RANK" = 1; then exit 0; fi
while test "$(grep -c 1 "$TEST_OUT/begun")" -lt 1; do sleep 0.1; done
if test -e "$TEST_OUT/failed"; then exit 0; fi
sleep 2
touch "$TEST_OUT/failed"
exit 3
"""


def test_script_that_fails_runs_again_with_the_member_that_has_returned(
    start: Callable[..., LocalRun], out: Path
) -> None:
    run = start("--workers", "2", "sh", "-c", SCRIPT_OF_TWO)
    assert run.process.wait(60) == 0, run.log.read_text()
    assert sorted((out / "begun").read_text().split()) == ["0", "0", "1", "1"]
    status = run.status()
    assert (status["phase"], status["restarts"]["processes"], status["finished"]["generation"]) == ("Succeeded", 1, 2)


@pytest.mark.parametrize(
    ("workers", "command", "code"),
    [
        pytest.param(
            2, 'test "$RANK" = 0 && exit 0; sleep 0.2', 0, marks=pytest.mark.slow, id="one returns before the other"
        ),
        pytest.param(1, "kill -SEGV $$", 139, id="a signal ends it"),
        pytest.param(2, 'test "$RANK" = 1 && exit 5; exec sleep 60', 5, id="one of two fails, and the other is ended"),
    ],
)
def test_exit_code_is_that_of_the_script(start: Callable[..., LocalRun], workers: int, command: str, code: int) -> None:
    run = start("--workers", str(workers), "--max-restarts", "0", "sh", "-c", command)
    assert run.process.wait(60) == code, run.log.read_text()
    assert run.status().get("exitCode", 0) == code
    assert run.status()["phase"] == ("Failed" if code else "Succeeded")
