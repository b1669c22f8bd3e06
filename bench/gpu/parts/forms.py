"""Groups of torch's own, without Regroup: where these do not form, nothing else can."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.gpu.part import SCRIPTS, Context, Row


def run(context: Context, say: Callable[[Row], None]) -> None:
    """Form a group of each size and sum a tensor over it."""
    for ranks in context.sizes.worlds:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory, contextlib.ExitStack() as stack:
            environment = context.environment(ranks)
            processes = [
                stack.enter_context(
                    context.started(
                        f"{ranks}-ranks-{rank}",
                        [
                            sys.executable,
                            str(SCRIPTS / "form.py"),
                            str(rank),
                            str(ranks),
                            str(Path(directory, "store")),
                        ],
                        environment,
                    )
                )
                for rank in range(ranks)
            ]
            found = [json.loads(process.finished().splitlines()[-1]) for process in processes]
        right = all(one["sum"] == ranks * (ranks + 1) / 2 for one in found)
        say(
            context.judged(
                f"{ranks} rank{'s' if ranks > 1 else ''}",
                f"formed in {max(one['formed_s'] for one in found):.2f} s, the sum is {'right' if right else 'wrong'}",
                "forms, sums right",
                right,
                found,
            )
        )
