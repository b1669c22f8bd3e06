"""`regroup run` whole: the operator's plan, the real endpoint, real agents and trainers, on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.local_run import LocalRun
from harness.polling import until
from harness.processes import children, environment_of
from regroup.protocol import env
from regroup_cli.__main__ import main
from tests.long import LONG, only_long
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SIZES = (3, 5, 2) if LONG else (2, 3, 2)
"""Workers at the start, then, and at the end. Each one imports torch."""
DIGITS = Path(__file__).parents[2] / "manifests" / "samples" / "digits.py"
STEPS = "300"
PACE_S = "0.35"
"""A step takes so long until the last fault is over: 105 s for all of them."""
HOPELESS_S = 30.0
KILLED_AFTER_S = 5.0
"""Agents that do not end by themselves are killed then (LocalWorkers.stop)."""


def _committed(directory: Path) -> set[str]:
    return {path.parent.name for path in directory.glob("step-*/COMMIT.json")}


def _parameters(text: str) -> str:
    found = re.search(r"held-out accuracy (0\.\d+)\s+parameters sha256 (\w+)", text)
    assert found, text
    assert float(found[1]) >= 0.95
    return found[2]


def test_kill_grow_shrink_and_total_loss_end_in_the_same_parameters(
    start: Callable[..., LocalRun], tmp_path: Path, zygote: Zygote
) -> None:
    """SIGKILL of a rank, growth, shrink, then every process at once: resumed from disk, bitwise equal to plain python.

    Of the checkpoints, one a second, no more stay than were asked for.
    """
    script = [str(DIGITS), "--steps", STEPS, "--reduction", "exact"]
    begin, most, end = SIZES
    checkpoints, hurry = tmp_path / "checkpoints", tmp_path / "hurry"
    plain = Plain(zygote, tmp_path / "plain", DIGITS, *script[1:])
    run = start(
        *("--workers", str(begin), "--min", "1", "--max", "5", "--join-quiet", "0.2", "--max-restarts", "100"),
        *("--checkpoint", str(checkpoints), "--checkpoint-every", "1", "--checkpoint-keep", "2"),
        *(*script, "--pace", PACE_S, "--hurry", str(hurry)),
    )
    first = run.trains(begin)["membership"]["generation"]
    before = run.trainers()
    os.kill(before["local-worker-1-0"], signal.SIGKILL)
    second = run.trains(begin, after=first)["membership"]["generation"]
    after = run.trainers()
    assert {w: p for w, p in before.items() if "-1-" not in w} == {w: p for w, p in after.items() if "-1-" not in w}

    run.scale(most)
    third = run.trains(most, after=second)["membership"]["generation"]
    assert set(after.items()) <= set(run.trainers().items()), "a survivor lost its process"
    run.scale(end)
    fourth = run.trains(end, after=third)["membership"]["generation"]

    saved = run.wait(
        lambda s: (s.get("checkpoint") or {}).get("generation", 0) >= fourth, "a checkpoint of the last group"
    )
    # The writer may have committed one more than the operator has heard of.
    until(
        lambda: len(_committed(checkpoints)) in (2, 3),
        "two checkpoints stay",
        details=lambda: str(_committed(checkpoints)),
    )
    for agent in run.agents():
        os.kill(agent, signal.SIGKILL)
    run.trains(end, after=fourth)
    resumed = run.wait(
        lambda s: len(s["lineage"]) > 0 and s["lineage"][-1]["generation"] > fourth, "the resumed generation"
    )
    assert resumed["lineage"][-1]["startStep"] >= saved["checkpoint"]["step"]

    hurry.touch()
    ended = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=240)
    assert run.process.wait(60) == 0
    left = _committed(checkpoints)
    assert left == {*ended["checkpoint"]["kept"]}
    assert len(left) == 2
    assert f"step-{STEPS}." in max(left, key=lambda name: int(re.findall(r"\d+", name)[0]))
    assert _parameters(run.log.read_text()) == _parameters(plain.wait())


def test_interrupted_run_is_resumed_with_another_size_and_ends_in_the_same_parameters(
    start: Callable[..., LocalRun], tmp_path: Path, zygote: Zygote
) -> None:
    """Two processes, Ctrl-C, one process that begins with their newest checkpoint: bitwise equal to plain python. That checkpoint
    stays, and what the new run has committed counts from then on."""
    script = [str(DIGITS), "--steps", "200", "--reduction", "exact"]
    saved, hurry = tmp_path / "saved", tmp_path / "hurry"
    plain = Plain(zygote, tmp_path / "plain", DIGITS, *script[1:])
    (tmp_path / "first").mkdir()
    first = start(
        *("--workers", "2", "--checkpoint", str(saved), "--checkpoint-every", "1", *script, "--pace", PACE_S),
        directory=tmp_path / "first",
    )
    first.wait(lambda s: bool(s.get("checkpoint")), "a checkpoint")
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(60) == 130
    said = re.search(r"--resume (\S+) continues there", first.log.read_text())
    assert said is not None, first.log.read_text()
    begun, before = Path(said[1]), _committed(saved)
    assert begun.name in before
    step = int(re.findall(r"\d+", begun.name)[0])
    assert 0 < step < 200

    hurry.touch()
    (tmp_path / "second").mkdir()
    second = start(
        "--workers", "1", "--resume", str(saved), *script, "--hurry", str(hurry), directory=tmp_path / "second"
    )
    ended = second.wait(lambda s: s.get("phase") == "Succeeded", "the end")
    assert second.process.wait(60) == 0
    assert ended["lineage"][0] == {"generation": 1, "startStep": step}
    assert ended["progress"]["step"] == 200
    assert ended["checkpoint"]["directory"] not in before
    assert before <= _committed(saved), "another job's checkpoints were deleted"
    assert _parameters(second.log.read_text()) == _parameters(plain.wait())


@pytest.mark.slow
def test_run_that_resumes_from_a_checkpoint_that_is_gone_fails_and_says_which(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    gone = tmp_path / "saved" / "step-7.g1-aaaa"
    gone.mkdir(parents=True)
    (gone / "COMMIT.json").touch()

    run = start("--workers", "2", "--max-restarts", "0", "--resume", str(gone), str(DIGITS), "--steps", "10")
    run.wait(lambda s: bool(s.get("startTime")), "the start")
    shutil.rmtree(gone)
    failed = _condition(run.wait(lambda s: s.get("phase") == "Failed", "the end"), "Failed")
    assert run.process.wait(60) == 1
    assert f"Checkpoint {gone}, from which the job is to resume, does not exist." in run.log.read_text()
    assert "does not exist" in failed["message"]


def test_script_that_exits_1_fails_the_run_with_its_last_line(
    start: Callable[..., LocalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROUP_PRELOAD", "json")  # the script has no use for torch
    script = tmp_path / "broken.py"
    script.write_text("import sys\nsys.exit('no such dataset')\n")
    run = start("--workers", "1", "--max-restarts", "1", str(script))
    assert run.process.wait(120) == 1
    assert re.search(r"exit code 1.*no such dataset", run.log.read_text()), run.log.read_text()


RAISES = """
import regroup, torch
from torch.utils.data import TensorDataset

def prepare(rank):
    if rank == 1:
        raise ValueError("shard 1 is empty")

model = torch.nn.Linear(2, 1)
data = TensorDataset(torch.zeros(64, 2), torch.zeros(64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with regroup.session(model=model, optimizer=optimizer, data=data, global_batch=8, microbatch=4) as job:
    for step in job.steps(100):
        prepare(job.rank)
        with step:
            for batch in step.microbatches():
                step.backward(sum=model(batch.x).sum(), weight=len(batch.y))
            step.commit()
"""


@only_long("tests/e2e/test_bad_input.py has it on real pods")
def test_script_that_raises_on_one_rank_at_once_fails_within_30_s_with_its_traceback(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    run = start("--workers", "2", "--min", "2", "--max", "2", "--max-restarts", "100", str(script))
    run.wait(lambda s: (s.get("restarts") or {}).get("processes", 0) >= 1, "the first crash")
    first_s = time.monotonic()
    quoted = run.wait(lambda s: _condition(s, "Degraded").get("reason") == "Crashing", "a condition that quotes it")
    assert "ValueError: shard 1 is empty" in _condition(quoted, "Degraded")["message"]
    ended = run.wait(lambda s: s.get("phase") == "Failed", "the end")
    took_s = time.monotonic() - first_s
    print(f"first crash -> Failed: {took_s:.1f} s, {ended['restarts']['processes']} exits")
    failed = _condition(ended, "Failed")
    assert (failed["reason"], run.process.wait(60)) == ("RepeatedCrash", 1)
    said = failed["message"]
    assert re.search(
        r"Worker \d \(pod \S+-worker-\d-0\) ended with exit code 1, \d+ times in \d+ s at the same place", said
    )
    assert 'raises.py", line 7, in prepare' in said
    assert said.splitlines()[-2:] == [
        "ValueError: shard 1 is empty",
        "Its log is above, in the output of this command.",
    ]
    assert took_s <= HOPELESS_S


OLD_TORCH = """
import torch
torch.__version__ = "2.10.1"
import regroup
regroup.session(model=torch.nn.Linear(2, 1), optimizer=None, data=None, global_batch=2, microbatch=1)
"""


def test_torch_that_is_too_old_fails_the_job_without_a_second_try(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    script = tmp_path / "old.py"
    script.write_text(OLD_TORCH)
    run = start("--workers", "1", "--max-restarts", "100", str(script))
    ended = run.wait(lambda s: s.get("phase") == "Failed", "the end")
    failed = _condition(ended, "Failed")
    assert (failed["reason"], run.process.wait(60)) == ("CannotRun", 1)
    assert failed["message"].startswith(
        "torch 2.10.1 is older than 2.11, the oldest that Regroup runs with: use an image"
    )
    assert ended["restarts"]["processes"] == 1
    assert run.log.read_text().count("UsageError: torch 2.10.1") == 1


FAILS_IN_TORCH = RAISES.replace(
    "        prepare(job.rank)\n",
    """        for attempt in job.collective("eval"):
            with attempt as team:
                try:
                    team.all_reduce(torch.ones(2, dtype=torch.uint16))  # of a type that gloo does not know
                except regroup.RegroupError as error:
                    print(f"rank {job.rank} says: {error}", flush=True)
                    raise
""",
)


@only_long("test_groups.py has the error, and the script above that raises fails its job")
def test_collective_that_fails_by_the_users_own_error_fails_the_job_with_the_errors_text(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    """It was taken for a lost rank: five generations a second, no commit, no message, for ever."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS_IN_TORCH)
    run = start("--workers", "2", "--min", "2", "--max", "2", "--max-restarts", "100", str(script))
    ended = run.wait(lambda s: s.get("phase") == "Failed", "the end", timeout_s=120)
    failed = _condition(ended, "Failed")
    assert (failed["reason"], run.process.wait(60)) == ("RepeatedCrash", 1)
    assert "BackendError: A collective failed, and no rank was lost: Invalid scalar type" in failed["message"]
    assert "team.all_reduce(torch.ones(2, dtype=torch.uint16))" in failed["message"]
    assert ended["membership"]["generation"] <= 12
    said = re.findall(r"rank (\d) says: .*Invalid scalar type", run.log.read_text())
    assert set(said) == {"0", "1"}


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        pytest.param(
            "0",
            "Rank 0 in worker 0 (pod local-worker-0-0) and rank 1 in worker 1 (pod local-worker-1-0) compute on the same GPU "
            "(GPU-5c1a), and NCCL needs one for each process. Give each worker GPUs of its own, without time slicing, or lower the "
            "number of workers.",
            id="two on one GPU",
        ),
        pytest.param(
            "1",
            "The parameters of rank 0 and of rank 1 lie in memory in different orders, ",
            id="odd strides",
            marks=only_long("as two on one GPU; test_strides.py has the sentence"),
        ),
    ],
)
def test_ranks_that_do_not_fit_together_fail_the_job_and_are_not_started_again(
    start: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch, odd: str, sentence: str
) -> None:
    monkeypatch.setenv("TEST_ODD", odd)
    # Both are needed: one that lost the other before it knew why would train to the end alone, while that one still exits.
    sizes = ("--workers", "2", "--min", "2", "--max", "3")
    run = start(*sizes, "--gpus", "none", str(Path(__file__).parent / "shared_gpu_job.py"))
    ended = run.wait(lambda s: s.get("phase") == "Failed", "the end")
    failed = _condition(ended, "Failed")
    assert failed["reason"] == "CannotRun"
    assert failed["message"].startswith(sentence)
    # The operator may hear of one rank's lost connection before it hears why the other one has ended.
    assert ended["membership"]["generation"] <= 2
    assert (ended["restarts"]["processes"] <= 2, run.process.wait(60)) == (True, 1)


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind and c["status"] == "True"), {})


@pytest.mark.parametrize(
    ("script", "holds_state"),
    [
        pytest.param(["sleep", "1000"], False, id="a command"),
        pytest.param([str(DIGITS), "--steps", "1000000"], True, id="a script whose workers hold a state"),
    ],
)
def test_interrupted_run_says_so_and_leaves_no_process_and_no_directory(
    start: Callable[..., LocalRun], script: list[str], holds_state: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "longer-than-the-path-of-a-socket-may-be"
    directory.mkdir()
    run = start("--workers", "2", *script, directory=directory)
    if holds_state:
        run.trains(2)
    until(lambda: sum(bool(children(agent)) for agent in run.agents()) == 2, "both run")
    started = [pid for agent in run.agents() for pid in (agent, *children(agent))]
    assert len(started) >= 4

    def sockets() -> set[Path]:
        return {Path(path) for pid in started if (path := environment_of(pid).get(env.SOCKET))}

    if not holds_state:  # a process that the zygote forks has the zygote's environment
        until(lambda: len(sockets()) == 2, "the commands have got their agents' sockets")
    made = {path.parent for path in sockets()}
    assert not any(path.is_relative_to(directory) for path in made)
    interrupted_s = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130
    assert time.monotonic() - interrupted_s < KILLED_AFTER_S, "the agents had to be killed"
    log = run.log.read_text()
    assert "regroup: interrupted" in log
    assert sorted(re.findall("^regroup: (.*): Connected to the operator", log, re.M)) == ["worker 0", "worker 1"]
    assert not any(path.exists() for path in made)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "every process has ended")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--workers", "3", "nowhere.py"], "SCRIPT (nowhere.py) is not a file.", id="no such script"),
        pytest.param(["--workers", "3", "--min", "4", "--max", "2", str(DIGITS)], "--min (4) is more", id="min above max"),
        pytest.param(["--workers", "9", "--max", "2", str(DIGITS)], "--workers (9) is more", id="more workers than the maximum"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1
