"""The log of committed steps, by which a benchmark observes training: one file a process, one line a commit.

The trained processes write the log, with the standard library only, so that it costs no import time. `trials` reads it.
An *epoch* changes whenever the group is formed anew: it is Regroup's generation, torchft's quorum number, or torchrun's
restart count.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

BENCH_LOG = "BENCH_LOG"
"""Environment name: the directory of the log."""
BENCH_STEP_S = "BENCH_STEP_S"
"""Environment name: seconds added to each step. They stand for the work of a real step, and leave the cores idle time."""
BENCH_SAMPLE_S = "BENCH_SAMPLE_S"
"""Environment name: seconds added for each sample that a rank computes, so that a step takes longer with fewer ranks."""


@dataclass(frozen=True)
class Commit:
    """A step of one rank's optimizer. `t_s` is wall clock, comparable between processes of one machine."""

    t_s: float
    rank: int
    pid: int
    step: int
    epoch: int
    world: int
    """Number of ranks whose samples are in the step."""


@dataclass(frozen=True)
class Imports:
    """The end of a process's imports, `imports_s` after the process was started."""

    pid: int
    imports_s: float


class CommitLog:
    """Writes the log. Each trained process has one. It writes nothing if BENCH_LOG is not set."""

    def __init__(self) -> None:
        directory = os.environ.get(BENCH_LOG)
        self._fd: int | None = None
        if directory:
            path = Path(directory) / f"{os.getpid()}.jsonl"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def imported(self) -> None:
        """Write that the process has done its imports. Called once, at their end."""
        self._write({"pid": os.getpid(), "imports_s": process_age_s()})

    def committed(self, *, rank: int, step: int, epoch: int, world: int) -> None:
        """Write a commit. Called right after it."""
        record = {"t": time.time(), "rank": rank, "pid": os.getpid(), "step": step, "epoch": epoch, "world": world}
        self._write(record)

    def _write(self, record: dict[str, float]) -> None:
        if self._fd is not None:
            os.write(self._fd, json.dumps(record).encode() + b"\n")  # one write: a kill leaves no half line behind


def process_age_s() -> float:
    """Return the seconds since this process was forked, to the kernel's 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


@dataclass
class LogReader:
    """Reads the log. It keeps the commits that it has read, so that `poll` reads only new lines."""

    directory: Path
    commits: list[Commit] = field(default_factory=list)
    imports: dict[int, Imports] = field(default_factory=dict)  # process id -> its imports
    _offsets: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> None:
        """Read the lines that were written since the last call."""
        for path in self.directory.glob("*.jsonl"):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            for line in whole.splitlines():
                self._add(json.loads(line))

    def _add(self, record: dict[str, float]) -> None:
        pid = int(record["pid"])
        if "imports_s" in record:
            self.imports[pid] = Imports(pid, record["imports_s"])
            return
        rank, step, epoch = int(record["rank"]), int(record["step"]), int(record["epoch"])
        self.commits.append(Commit(record["t"], rank, pid, step, epoch, int(record["world"])))

    def forget(self, before_epoch: int) -> None:
        """Drop the commits of epochs before this one. Their trials are over."""
        self.commits = [commit for commit in self.commits if commit.epoch >= before_epoch]


def steady_epoch(commits: Iterable[Commit], *, ranks: int, steps: int) -> int | None:
    """Return the newest epoch if `ranks` processes have each committed at least `steps` steps in it, else None."""
    counts: dict[int, dict[int, int]] = {}
    for commit in commits:
        of_epoch = counts.setdefault(commit.epoch, {})
        of_epoch[commit.pid] = of_epoch.get(commit.pid, 0) + 1
    if not counts:
        return None
    newest = max(counts)
    is_steady = len(counts[newest]) == ranks and min(counts[newest].values()) >= steps
    return newest if is_steady else None


def pids_of(commits: Iterable[Commit], epoch: int) -> list[int]:
    """Return the process ids that committed in an epoch, in ascending order."""
    return sorted({commit.pid for commit in commits if commit.epoch == epoch})


def first_after(commits: Iterable[Commit], epoch: int) -> Commit | None:
    """Return the earliest commit of any newer epoch: the first step of the group formed anew."""
    return min((commit for commit in commits if commit.epoch > epoch), key=lambda commit: commit.t_s, default=None)


def full_after(commits: Iterable[Commit], epoch: int, *, ranks: int) -> Commit | None:
    """Return the earliest commit of any newer epoch that has all `ranks` in it: the group has its size back."""
    return first_after((commit for commit in commits if commit.world == ranks), epoch)


def is_whole_again(commits: Iterable[Commit], epoch: int, *, ranks: int) -> bool:
    """Return whether all ranks have committed together after `epoch`, and the log has a commit of each since then."""
    seen = list(commits)
    full = full_after(seen, epoch, ranks=ranks)
    return full is not None and len({commit.pid for commit in seen if commit.epoch >= full.epoch}) >= ranks


def rolled_back(commits: Iterable[Commit], epoch: int) -> int:
    """Return how many steps that some rank had committed in `epoch` the next epoch committed again."""
    seen = list(commits)
    first = first_after(seen, epoch)
    last = max((commit.step for commit in seen if commit.epoch == epoch), default=0)
    return max(0, last - first.step + 1) if first else 0


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the percentile, linear between neighbours (numpy's default). With 20 values p99 is close to the largest."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def longest_gap(commits: Iterable[Commit]) -> float:
    """Return the longest time between two commits of anyone, in seconds; 0 where there are fewer than two."""
    times = sorted(commit.t_s for commit in commits)
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
