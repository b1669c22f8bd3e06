"""Snapshots and checkpoints: what a step waits for one, and how soon the only process of a job continues from one after SIGKILL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import judge
from bench.gpu.part import SCRIPTS, Context, Process, Row, regroup_run
from bench.trials import BenchError

ROOM_BYTES = 24 << 30
"""Free memory that two snapshots, two checkpoints and what is being written need at most."""


def run(context: Context, say: Callable[[Row], None]) -> None:
    """Measure both tiers, each in a job of its own."""
    for tier in ("snapshot", "checkpoint"):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=_memory()) as directory:
            _measure(context, say, tier, Path(directory))


def _memory() -> str | None:
    """Return where files are in memory, if there is room: a disk's speed is not what is measured."""
    try:
        return "/dev/shm" if shutil.disk_usage("/dev/shm").free > ROOM_BYTES else None
    except OSError:
        return None


def _measure(context: Context, say: Callable[[Row], None], tier: str, directory: Path) -> None:
    tiers = {
        "snapshot": ("--memory-snapshot", "8Gi", "--memory-snapshot-every", "2"),
        "checkpoint": ("--checkpoint", str(directory / "checkpoints"), "--checkpoint-every", "2"),
    }
    events = directory / "events"
    events.mkdir()
    environment = context.environment(1, BENCH_OUT=str(events), BENCH_MODEL=context.sizes.model)
    always = ("--max-restarts", "1000", "--state-dir", str(directory / "job"))
    command = regroup_run(1, *always, *tiers[tier], script=[str(SCRIPTS / "state.py"), tier])
    with context.started(tier, command, environment) as job:
        steps = _steps(job, events, context.sizes.copies)
        for row in cost(context, tier, steps):
            say(row)
        pid = steps[-1]["pid"]
        os.kill(pid, signal.SIGKILL)
        again = job.until("the next process has made a step", lambda: _next(events, pid))
        for row in continued(context, tier, read(events), pid, again):
            say(row)


def _steps(job: Process, events: Path, copies: int) -> list[dict[str, Any]]:
    """Return the steps of the first process, once it has made `copies` copies after the first one, and some steps after them."""

    def enough() -> list[dict[str, Any]]:
        steps = [one for one in read(events) if one["event"] == "step"]
        done = sum(one["copies"] > copies for one in steps)
        return steps if done >= 4 and len(steps) >= 8 else []

    found: list[dict[str, Any]] = job.until(f"{copies + 1} copies were made", enough)
    return found


def read(events: Path) -> list[dict[str, Any]]:
    """Return what all processes have noted, in the order of time."""
    found = [
        json.loads(line)
        for path in events.glob("*.jsonl")
        for line in path.read_text().splitlines()
        if line[-1:] == "}"
    ]
    return sorted(found, key=lambda one: float(one["t"]))


def _next(events: Path, pid: int) -> int | None:
    return next((one["pid"] for one in read(events) if one["pid"] != pid and one["event"] == "step"), None)


def cost(context: Context, tier: str, steps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return what a copy costs the steps beside it. Pure."""
    waits, size = judge.waits_ms(steps), steps[-1]["bytes"]
    if not waits:
        raise BenchError(f"no {tier} was taken beside steps")
    each = statistics.median(waits) / (size / 1e9)
    usual = statistics.median([step["ms"] for step in steps])
    said = f"{each:.0f} ms per GB: {len(waits)} of {size / 1e9:.2f} GB beside steps of {usual:.0f} ms"
    what = f"steps wait for a {tier}, median"
    if tier == "checkpoint":  # no aim: it is rarer
        return [Row(what, said, value=round(each, 2))]
    aim = judge.WAIT_MS_PER_GB
    return [context.judged(what, said, f"at most {aim:g} ms per GB", each <= aim, round(each, 2), speed=True)]


def continued(context: Context, tier: str, events: Sequence[Mapping[str, Any]], pid: int, again: int) -> list[Row]:
    """Return from what the next process went on, and how soon. Pure. `pid`: the killed one; `again`: the next one."""

    def of(which: int, event: str) -> list[Mapping[str, Any]]:
        return [one for one in events if one["pid"] == which and one["event"] == event]

    begin = of(again, "before")[0]
    known = {one["step"]: one["hash"] for one in of(pid, "step")}
    known |= {one["step"]: one["hash"] for one in of(pid, "before")}
    took_s = begin["t"] - of(again, "session")[0]["t"]
    # A state that is smaller than the aim's has no more time: starting takes some, whatever the size.
    aim_s = judge.RESTORE_S * max(1.0, begin["bytes"] / judge.RESTORE_BYTES)
    same = known.get(begin["step"]) == begin["hash"]
    return [
        context.judged(
            f"the next process continues from the {tier}",
            f"after step {begin['step']} of {max(known)}, {'the same' if same else 'other'} bits",
            "not from step 0, the same bits",
            same and begin["step"] > 0,
            {"step": begin["step"], "last": max(known)},
        ),
        context.judged(
            f"its session's start to its first step, {tier}",
            f"{took_s:.1f} s for {begin['bytes'] / 1e9:.2f} GB",
            f"at most {aim_s:.1f} s",
            took_s <= aim_s,
            round(took_s, 2),
            speed=True,
        ),
    ]
