"""Aims of the figures of `bench.gpu`, and the reading of figures from output and traces. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

FIRST_COMMIT_MEDIAN_S, FIRST_COMMIT_WORST_S = 0.3, 0.7
"""From SIGKILL of a rank to the next commit, one H100 or H200 shared by two ranks."""
PAUSE_S = 0.5
"""Longest time without a commit at a planned change of the number of ranks."""
WAIT_MS_PER_GB = 20.0
"""Wait of a step for a copy of the state that is taken beside it, if the step is longer than the copy."""
RESTORE_S, RESTORE_BYTES = 3.0, 1.5e9
"""Time from the start of a process's session to its first step, for a state of this size."""
IDLE_GPT2, IDLE_SHORT_STEP = 0.02, 0.05
"""Share of a step in which the GPU has nothing to do: GPT-2 124M at microbatch 16, and a step of 20 ms."""
OF_SAME, OF_BEST = 0.98, 0.95
"""Tokens per second beside a plain loop with the same vocabulary and microbatch, and beside the plain loop's best."""
TOKENS_PER_S: Mapping[str, float] = {"H200": 500e3, "H100": 470e3}
"""Speed of GPT-2 124M. Other GPUs have no aim."""
LOSS_ABOVE, LOSS_ROUNDED = 0.002, 0.03
"""Largest difference between losses of equal steps: with sums in another order in float32, and with products in bfloat16."""

_LOSS = re.compile(r"^step (\d+)  loss (\d+\.\d+)", re.MULTILINE)
_HASH = re.compile(r"^parameters sha256 (\w+)$", re.MULTILINE)


def losses(text: str) -> dict[int, float]:
    """Return the loss of each step that `regroup.train` printed."""
    return {int(step): float(loss) for step, loss in _LOSS.findall(text)}


def parameter_hash(text: str) -> str | None:
    """Return the hash that `regroup.train` printed at its end."""
    found = _HASH.findall(text)
    return found[-1] if found else None


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the largest difference between losses of equal steps. It is infinite if a step is missing, or there is none."""
    if not one or set(one) != set(other):
        return float("inf")
    return max(abs(one[step] - other[step]) for step in one)


def tokens_aim(gpu: str) -> float | None:
    """Return the tokens per second that this GPU must reach, or None if there is no aim for it."""
    return next((aim for name, aim in TOKENS_PER_S.items() if name in gpu), None)


def idle_share(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of time in which the GPU ran nothing, from a profiler's trace; None if the trace has no GPU work.

    The time is from the first kernel's start to the last one's end. Kernels of several streams may overlap.
    """
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    if not spans:
        return None
    merged = [spans[0]]
    for begin, end in spans[1:]:
        if begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    whole = merged[-1][1] - merged[0][0]
    return sum(later[0] - earlier[1] for earlier, later in pairwise(merged)) / whole if whole else None


def waits_ms(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the extra milliseconds of the steps beside each copy, compared with a usual step. The first copy is left out.

    `steps` has the steps in their order, each with `ms` and `copies`, the number of copies begun so far. Two steps are
    beside a copy: the one after which it begins, and the next one, which changes the copied tensors. The first copy
    allocates its memory, once. A usual step is the median of those beside no copy, or of all steps if every step is
    beside one.
    """
    begun = [i + 1 for i, (one, other) in enumerate(pairwise(steps)) if other["copies"] > one["copies"]]
    beside = {i for first in begun for i in (first, first + 1)}
    apart = [step["ms"] for i, step in enumerate(steps) if i not in beside]
    usual = statistics.median(apart or [step["ms"] for step in steps])
    counted = [first for first in begun if steps[first - 1]["copies"] > 0]
    return [sum(max(0.0, step["ms"] - usual) for step in steps[first : first + 2]) for first in counted]
