"""The plain loop and the library's loop are run with the same sizes, and print the same line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpt_plain, gpt_train
from regroup.train import config
from regroup.train.tasks.language_model import GPT, GPT2

SMALL = ["--size", "tiny", "--vocab", "300", "--length", "16", "--batch", "9", "--microbatch", "4", "--device", "cpu"]


@pytest.mark.parametrize("more", [[], ["--precision", "float32"], ["--activation-checkpointing"]])
def test_plain_loop_prints_a_line(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    gpt_plain.main([*SMALL, "--steps", "2", "--compile", "none", *more])
    line = json.loads(capsys.readouterr().out)
    assert line["tokens_per_s"] == pytest.approx(8 * 16 / line["step_s"], rel=0.05)
    assert 5 < line["loss"] < 6  # log 300, less what the first step has learned
    assert (line["microbatch"], line["vocab"]) == (4, 300)


def test_plain_loop_trains_the_model_of_the_library() -> None:
    with torch.device("meta"):
        plain, ours = gpt_plain.GPT("gpt2", 1024, 50257), GPT(GPT2)
    assert sorted(p.shape for p in plain.parameters()) == sorted(p.shape for p in ours.parameters())


def test_library_is_run_with_the_same_sizes(tmp_path: Path) -> None:
    arguments = gpt_plain.parser("").parse_args([*SMALL, "--steps", "2", "--activation-checkpointing"])
    arguments.compile = True
    corpus = tmp_path / "tokens"
    gpt_train.write_corpus(corpus, arguments)
    asked = config.load(str(gpt_train.CONFIG), gpt_train.changes(arguments, corpus))
    assert (asked.global_batch, asked.microbatch, asked.steps, asked.compile) == (8, 4, 2, True)
    assert (asked.precision, asked.activation_checkpointing, asked.device) == ("bfloat16", "full", "cpu")
    assert corpus.stat().st_size > 9 * 16 * 2


def test_first_step_is_not_in_the_speed() -> None:
    clock = iter([0.0, 100.0, 102.0, 103.0, 105.0])
    lines = ["regroup: begins\n", *(f"step {step}  loss {8 / step:.4f}  rate 1\n" for step in (1, 2, 3, 4))]
    ends_s, loss, all_ = gpt_train.read(lines, lambda: next(clock))
    assert (loss, len(all_)) == (2.0, 5)
    arguments = gpt_plain.parser("").parse_args(SMALL)
    assert gpt_plain.speed(arguments, ends_s) == {"tokens_per_s": 64.0, "step_s": 2.0, "first_step_s": 100.0}
