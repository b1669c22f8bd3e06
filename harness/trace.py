"""Reads the trainers' own traces: each commit with its step, time and process. Pure but for `load`."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import judge


@dataclass(frozen=True)
class Commit:
    """A commit of one step by one process. `t` is seconds since the epoch, by that process's clock."""

    t: float
    pod: str
    pid: int
    rank: int
    generation: int
    step: int


@dataclass(frozen=True)
class Done:
    """A process has made its last step, in this generation. `parameters` is their SHA-256."""

    t: float
    pod: str
    pid: int
    generation: int
    world_size: int
    parameters: str


@dataclass(frozen=True)
class Trace:
    """All events of all processes, in the order of time."""

    commits: tuple[Commit, ...]
    built: tuple[dict[str, object], ...]
    done: tuple[Done, ...]

    def first_of(self, generation: int) -> Commit:
        """Return the first commit of a generation or a later one."""
        return next(c for c in self.commits if c.generation >= generation)

    def last_before(self, generation: int) -> Commit:
        """Return the last commit of an earlier generation."""
        return [c for c in self.commits if c.generation < generation][-1]

    def starting_at(self, t: float) -> set[str]:
        """Return the pods that have begun to train, but had not built their model at time `t`."""
        built: dict[str, float] = {}
        for b in self.built:
            pod, at_s = str(b["pod"]), float(str(b["t"]))
            built[pod] = min(at_s, built.get(pod, at_s))
        return {pod for pod, at_s in built.items() if at_s > t}

    def gap_s(self, generation: int) -> float:
        """Return the time without a commit between a generation and those before it."""
        return self.first_of(generation).t - self.last_before(generation).t

    def median_step_s(self, generation: int | None = None) -> float:
        """Return the median time between the group's commits of successive steps."""
        return statistics.median(self.intervals_s(generation))

    def intervals_s(
        self, generation: int | None = None, *, since: float = 0.0, until: float = float("inf")
    ) -> list[float]:
        """Return the times between the group's first commits of successive steps."""
        first: dict[int, float] = {}
        for c in self.commits:
            if since <= c.t <= until and generation in (None, c.generation):
                first.setdefault(c.step, c.t)
        times = [first[s] for s in sorted(first)]
        return [b - a for a, b in itertools.pairwise(times)]

    def pids(self, generation: int) -> dict[tuple[str, int], int]:
        """Return {(pod, pid): rank} of the processes that committed in a generation."""
        return {(c.pod, c.pid): c.rank for c in self.commits if c.generation == generation}

    def generations(self) -> list[int]:
        """Return the generations that committed anything."""
        return sorted({c.generation for c in self.commits})

    def step_at(self, t: float) -> int:
        """Return the highest step that any process had committed by a time; -1 before the first."""
        return max((c.step for c in self.commits if c.t <= t), default=-1)

    def judged(self, *, restarted: Collection[str] = (), after: int = 0) -> list[judge.Commit]:
        """Return the commits for the judge.

        The containers of the pods `restarted` were started again after generation `after`. Their processes count as new
        ones from then on, although they have the process ids of the old ones.
        """
        return [
            judge.Commit(
                (c.pod, c.pid, "restarted") if c.pod in restarted and c.generation > after else (c.pod, c.pid),
                c.generation,
                c.step,
            )
            for c in self.commits
        ]

    def ended_at(self) -> float:
        """Return the time at which the last process of the last generation was done; infinity while one is not."""
        last = max((d.generation for d in self.done), default=0)
        said = {(d.pod, d.pid): d for d in self.done if d.generation == last}
        whole = {d.world_size for d in said.values()} == {len(said)}
        return max(d.t for d in said.values()) if whole else float("inf")


def load(directory: Path) -> Trace:
    """Read all files of a trace directory. A line that is being written is left for the next call."""
    return parse(line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True))


def parse(lines: Iterable[str]) -> Trace:
    """Return the trace in these lines."""
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    commits = sorted(
        (
            Commit(e["t"], e["pod"], e["pid"], e["rank"], e["generation"], e["step"])
            for e in events
            if e["event"] == "commit"
        ),
        key=lambda c: c.t,
    )
    return Trace(
        tuple(commits),
        tuple(e for e in events if e["event"] == "built"),
        tuple(
            Done(e["t"], e["pod"], e["pid"], e["generation"], e["world_size"], e["parameters"])
            for e in events
            if e["event"] == "done"
        ),
    )
