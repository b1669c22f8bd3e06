"""Unmodified scripts under `regroup run`, real processes throughout: State is true, and a newcomer's imports stop nobody."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from harness.local_run import LocalRun
from harness.polling import until

IMPORT_S = 5.0
"""What the script does before it calls init_process_group takes so long."""
PRELOAD_S = 3.0
"""The module that the zygote imports beside torch takes so long."""
LAG_S = 4.0
"""State may be so old, and a step may take so long while a newcomer imports torch on the same two cores."""

SCRIPT = f"""
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

time.sleep({IMPORT_S})
dist.init_process_group("gloo")
directory, rank = Path(sys.argv[1]), dist.get_rank()
saved = directory / "step"
step = int(saved.read_text()) if saved.exists() else 0
while True:
    end = torch.tensor([float(rank == 0 and (directory / "end").exists())])
    dist.all_reduce(end)
    if end.item():
        break
    time.sleep(0.05)
    step += 1
    if rank == 0:
        with open(directory / "steps.jsonl", "a") as trace:
            trace.write(json.dumps({{"t": time.time(), "world": dist.get_world_size(), "step": step}}) + "\\n")
        aside = directory / "step.new"
        aside.write_text(str(step))
        aside.replace(saved)
dist.destroy_process_group()
"""
PRELOAD = f"""
import os, time
time.sleep({PRELOAD_S})
open(os.path.join({{directory!r}}, "preloaded"), "a").write(f"{{{{time.time()}}}}\\n")
"""


class Job:
    """A running job of two workers, what it committed, and what State said meanwhile."""

    def __init__(self, run: LocalRun, directory: Path) -> None:
        self.run, self.directory = run, directory
        self.states: list[tuple[float, str]] = []
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()

    def _sample(self) -> None:
        while not self._ended.wait(0.05):
            self.states.append((time.time(), self.run.status().get("phase", "")))

    def close(self) -> None:
        self._ended.set()
        self._sampler.join()

    def commits(self) -> list[tuple[float, int]]:
        """Return (time, world size) of each step."""
        path = self.directory / "steps.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [(e["t"], e["world"]) for e in map(json.loads, (line for line in lines if line.endswith("\n")))]

    def preloads(self) -> list[float]:
        """Return when each zygote had imported."""
        path = self.directory / "preloaded"
        return [float(t) for t in path.read_text().split()] if path.exists() else []

    def trains(self, world: int, after: float = 0.0) -> None:
        """Wait until steps are committed, and said to be, by so many ranks."""

        def there() -> bool:
            recent = [c for c in self.commits()[-60:] if c[0] > max(after, time.time() - 4.0)]
            steady = [w for _, w in recent if w == world]
            return len(steady) > 40 and self.run.status().get("phase") == "Running"

        until(there, f"{world} ranks train", timeout_s=120, details=lambda: str(self.run.status()))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "slow_preload.py").write_text(PRELOAD.format(directory=str(tmp_path)))
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + (os.pathsep + path if path else ""))
    monkeypatch.setenv("REGROUP_PRELOAD", "torch,slow_preload")
    run = LocalRun(tmp_path, "--workers", "2", "--min", "1", "--max", "3", str(script), str(tmp_path))
    job = Job(run, tmp_path)
    yield job
    job.close()
    run.close()


@pytest.mark.slow
def test_state_is_true_and_a_newcomer_imports_while_the_others_train(job: Job) -> None:
    job.trains(2)
    os.kill(next(iter(job.run.trainers().values())), signal.SIGKILL)
    job.trains(2, after=time.time() + IMPORT_S)
    scaled_at = time.time()
    job.run.scale(3)
    job.trains(3)
    (job.directory / "end").touch()
    assert job.run.process.wait(60) == 0
    job.close()
    commits = job.commits()

    newcomer = max(job.preloads())
    assert newcomer > scaled_at + PRELOAD_S / 2, "the newcomer has not imported"
    last = max(t for t, world in commits if world == 2)
    pause_s = min(t for t, world in commits if world == 3) - last
    print(
        f"scaled 2 -> 3: paused {pause_s:.1f} s, of which the script takes {IMPORT_S:.0f} s before init_process_group"
    )
    assert last > newcomer, f"training stopped {newcomer - last:.1f} s before the newcomer had imported"

    wrong = list(_false(job.states, [t for t, _ in commits]))
    print(f"State: {len(job.states)} times looked at, {len(wrong)} times false")
    assert not wrong, "\n".join(wrong[:10])
    assert {state for _, state in job.states} >= {"Starting", "Running", "Recovering", "Succeeded"}


def _false(states: list[tuple[float, str]], times: list[float]) -> Iterator[str]:
    """Yield what State said that no moment of the last LAG_S, nor the next, made true."""
    ended = times[-1]
    for t, state in states:
        near = [at for at in times if t - LAG_S <= at <= t + LAG_S]
        if state == "Running" and not near:
            before = max((at for at in times if at < t), default=0.0)
            yield f"Running, but the last step was {t - before:.1f} s ago"
        steady = near and max(b - a for a, b in pairwise([t - LAG_S, *near])) < 1.0 and t < ended - LAG_S
        if state != "Running" and steady and max(b - a for a, b in pairwise([*near, t + LAG_S])) < 1.0:
            yield f"{state}, but steps were committed all the time"


def test_the_judge_of_this_test_knows_a_false_state() -> None:
    begin, end = 100.0, 120.0
    times = [begin + n / 20 for n in range(int((end - begin) * 20) + 1)]
    early, late = begin - LAG_S, end + LAG_S
    true = [(110.0, "Running"), (early + 0.5, "Running"), (early, "Starting"), (late - 0.5, "Recovering")]
    assert list(_false(true, times)) == []
    assert ["committed all the time" in said for said in _false([(110.0, "Starting")], times)] == [True]
    false = [(early - 0.5, "Running"), (late + 0.5, "Running")]
    assert ["Running, but" in said for said in _false(false, times)] == [True, True]
