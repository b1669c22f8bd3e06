"""The library's own loop: every sample configuration trains, and under `regroup run` a killed worker changes no bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.local_run import LocalRun
from tests.long import only_long
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "train_job.py"
SAMPLES = sorted((Path(__file__).parents[2] / "manifests" / "samples" / "train").glob("*.yaml"))
EXACT = next(sample for sample in SAMPLES if sample.stem == "exact")
STEPS = 4
SMALLER = {
    # Shorter samples, so that a step takes moments on a CPU.
    "language-model": ["task.length=32", "global_batch=8"],
    "compile": ["compile=false"],
    "activation-checkpointing": ["task.length=32", "global_batch=8", "task.text={text}"],
    "gpt2": ["task.length=16", "task.text={text}", "task.tokens={text}.tokens", "global_batch=2", "microbatch=1", "compile=false"],
}  # fmt: skip
"""By sample: what a test changes in it besides its number of steps."""
ELSEWHERE = {
    *("fsdp", "zero1", "tensor", "fsdp-tensor", "context", "context-ring", "experts", "model-parallel", "pipeline"),
    *("pipeline-gpipe", "pipeline-interleaved", "pipeline-zero-bubble", "pipeline-fsdp", "pipeline-tensor"),
    *("hook-fp16", "hook-bf16", "powersgd", "ring", "uneven", "batch-per-rank", "local-sgd"),
}
"""Samples that test_train_samples.py runs: what they are for needs several processes."""
KILL_STEPS = 40


def _arguments(sample: Path, *changes: str) -> list[str]:
    return [str(sample), *(word for change in changes for word in ("--set", change))]


def _hash(output: str) -> str:
    found = re.search(r"parameters sha256 (\w{64})", output)
    assert found, output
    return found[1]


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(
            one, id=one.stem, marks=only_long("GPT-2 in its full size takes 90 s") if one.stem == "gpt2" else ()
        )
        for one in SAMPLES
        if one.stem not in ELSEWHERE
    ],
)
def test_sample_trains(sample: Path, tmp_path: Path, zygote: Zygote) -> None:
    (tmp_path / "text").write_text(SCRIPT.read_text() * 10)
    smaller = [change.format(text=tmp_path / "text") for change in SMALLER.get(sample.stem, ())]
    common = [f"steps={STEPS}", "print_every=1", "schedule.warmup_steps=1", "evaluate_every=3"]
    output = Plain(zygote, tmp_path / "output", SCRIPT, *_arguments(sample, *common, *smaller)).wait()
    steps = re.findall(r"^step (\d+)  loss (\d+\.\d+) .* generation \d+  ranks 1$", output, re.MULTILINE)
    assert [int(step) for step, _ in steps] == list(range(1, STEPS + 1)), output
    evaluations = re.findall(r"^step (\d+)  held-out loss (\d+\.\d+)  accuracy [01]\.\d+$", output, re.MULTILINE)
    assert [int(step) for step, _ in evaluations] == [3, 4], output
    assert float(steps[-1][1]) < float(steps[0][1]) + 0.1, output
    _hash(output)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    # Of fixed size: after the kill the survivor waits for the other, so that steps are left for both.
    one = LocalRun(tmp_path, "--workers", "2", *_arguments(EXACT, f"steps={KILL_STEPS}"))
    yield one
    one.close()


def test_worker_killed_in_the_middle_changes_no_bit(run: LocalRun, tmp_path: Path, zygote: Zygote) -> None:
    run.trains(2)
    before = run.wait(lambda status: (status.get("progress") or {}).get("step", 0) >= 10, "ten steps")
    os.kill(run.trainers()["local-worker-1-0"], signal.SIGKILL)
    after = run.trains(2, after=before["membership"]["generation"])
    assert after["progress"]["step"] < KILL_STEPS, "the kill came after the last step"
    plain = Plain(zygote, tmp_path / "plain", SCRIPT, *_arguments(EXACT, f"steps={KILL_STEPS}"))
    ended = run.wait(lambda status: status.get("phase") == "Succeeded", "the end")
    assert run.process.wait(60) == 0
    assert ended["progress"]["step"] == KILL_STEPS
    assert ended["restarts"]["processes"] == 1
    assert _hash(run.log.read_text()) == _hash(plain.wait())


def test_mistake_is_one_sentence_before_any_worker_starts() -> None:
    command = [sys.executable, "-m", "regroup_cli", "run", "--workers", "2", *_arguments(EXACT, "steps=0")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "regroup: steps (0) must be at least 1. Correct it.\n"


def test_module_trains_as_the_command_of_a_job_runs_it(tmp_path: Path) -> None:
    missing = tmp_path / "no.txt"
    arguments = _arguments(EXACT, f"task.text={missing}")
    done = subprocess.run([sys.executable, "-m", "regroup.train", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"regroup: text ({missing}) cannot be read (No such file or directory). Give the path of a text file.\n"
    )
