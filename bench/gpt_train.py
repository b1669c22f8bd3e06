"""`regroup.train` with the sizes of `bench.gpt_plain`. It prints the same line of JSON.

    python -m bench.gpt_train --vocab 50257 --microbatch 16 --steps 5 --device cuda

It trains manifests/samples/train/gpt2.yaml in a process of its own, on random tokens. The time of a step is the time
between two printed lines, so the loop's work between steps counts as well.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regroup.train import tokens

from .gpt_plain import parser, sizes, speed

CONFIG = Path(__file__).parents[1] / "manifests" / "samples" / "train" / "gpt2.yaml"
_STEP = re.compile(r"step \d+  loss (\d+\.\d+)")


def changes(args: argparse.Namespace, corpus: Path) -> list[str]:
    """Return the changes of the sample configuration, as `--set` takes them. Pure."""
    return [
        f"task.size={args.size}",
        f"task.length={args.length}",
        f"task.tokens={corpus}",
        f"global_batch={args.batch // args.microbatch * args.microbatch}",
        f"microbatch={args.microbatch}",
        f"steps={args.steps}",
        f"precision={args.precision}",
        f"activation_checkpointing={'full' if args.activation_checkpointing else 'none'}",
        f"device={args.device}",
        f"compile={'true' if args.compile else 'false'}",
        "schedule.warmup_steps=1",
        "evaluate_every=null",
        "print_every=1",
    ]


def write_corpus(path: Path, args: argparse.Namespace) -> None:
    """Write random tokens, enough for the samples of a step and of the evaluation."""
    count = (args.batch + 64) * args.length + 1
    drawn = np.random.default_rng(0).integers(0, min(args.vocab, 256), count, dtype=np.uint16)
    tokens.write(path, [drawn], vocabulary=args.vocab)


def read(lines: Iterable[str], now_s: Any = time.perf_counter) -> tuple[list[float], float, list[str]]:
    """Return the time at which each step's line came, the last loss, and all lines."""
    ends_s, loss, all_ = [now_s()], float("nan"), []
    for line in lines:
        all_.append(line)
        if found := _STEP.match(line):
            ends_s.append(now_s())
            loss = float(found[1])
    return ends_s, loss, all_


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train and return what was measured. Raises SystemExit with the loop's last lines if it fails."""
    with tempfile.TemporaryDirectory(prefix="gpt-train-") as directory:
        corpus = Path(directory) / "tokens"
        write_corpus(corpus, args)
        sets = [word for change in changes(args, corpus) for word in ("--set", change)]
        command = [sys.executable, "-m", "regroup.train", str(CONFIG), *sets]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            ends_s, loss, lines = read(process.stdout)
    if process.returncode or len(ends_s) != args.steps + 1:
        raise SystemExit("".join(lines[-20:]))
    case = f"regroup.train, compile {'true' if args.compile else 'false'}"
    return {"case": case, **sizes(args), **speed(args, ends_s), "loss": loss}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one line of JSON."""
    arguments = parser("Train GPT-2 with regroup.train, and print its speed.")
    arguments.add_argument("--no-compile", action="store_false", dest="compile", help="compile: false")
    print(json.dumps(run(arguments.parse_args(argv))), flush=True)


if __name__ == "__main__":
    main()
