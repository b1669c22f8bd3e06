"""The traces of one job: `Reader` reads them while they grow, `verdict` judges them later."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Who = tuple[str, int, int]
"""A process: its worker's name, its process id there, and its start in clock ticks since the machine's boot."""


@dataclass(frozen=True)
class Commit:
    """A commit of one step by one process. `t_s` is seconds since the epoch."""

    t_s: float
    who: Who
    generation: int
    """0 in the Script tier, whose processes do not know their generation."""
    step: int
    part: int = 0
    """Part of the model that the process has: its index in its model group."""


@dataclass(frozen=True)
class Built:
    """A process is ready to train. In the Script tier it has read its checkpoint of this step."""

    t_s: float
    who: Who
    started_s: float
    step: int


@dataclass(frozen=True)
class Done:
    """A process has made the last step, with these parameters."""

    t_s: float
    who: Who
    generation: int
    world_size: int
    parameters: str
    """Digest of the parameters; empty for a split model."""
    samples: str
    elements: dict[str, str] = field(default_factory=dict)
    """Only for a split model: name and position in the whole parameter, "head.bias[3]" -> value in this process's part."""


@dataclass(frozen=True)
class Evaluated:
    """A process has evaluated the model together with others, after this number of steps."""

    who: Who
    step: int
    value: float


@dataclass
class Trace:
    """All events so far. The events of each kind are in the order of reading, which is nearly that of time."""

    commits: list[Commit] = field(default_factory=list)
    built: list[Built] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    evaluated: list[Evaluated] = field(default_factory=list)
    saved: list[tuple[float, int]] = field(default_factory=list)
    """Only in the Script tier: the time at which a checkpoint was complete, and its step."""
    step: int = -1
    """Highest step committed so far."""
    generation: int = 0
    """Newest generation that has committed."""

    def add(self, event: dict[str, Any]) -> None:
        """Add one line of a trace."""
        who = (event["pod"], event["pid"], event["start"])
        match event["event"]:
            case "commit":
                commit = Commit(event["t"], who, event["generation"], event["step"], event.get("part", 0))
                self.commits.append(commit)
                self.step, self.generation = max(self.step, commit.step), max(self.generation, commit.generation)
            case "built":
                self.built.append(Built(event["t"], who, event["started"], event.get("step", 0)))
            case "done":
                self.done.append(
                    Done(
                        event["t"],
                        who,
                        event["generation"],
                        event["world_size"],
                        event["parameters"],
                        event["samples"],
                        event.get("elements", {}),
                    )
                )
            case "evaluated":
                self.evaluated.append(Evaluated(who, event["step"], event["value"]))
            case "saved":
                self.saved.append((event["t"], event["step"]))


@dataclass
class Reader:
    """Reads a directory of traces. Each call of `poll` reads only new lines."""

    directory: Path
    trace: Trace = field(default_factory=Trace)
    _offsets: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> Trace:
        """Read the lines that were written since the last call. A line that is being written is left for the next call."""
        for path in self.directory.glob("*.jsonl"):
            offset = self._offsets.get(path, 0)
            if path.stat().st_size <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            for line in whole.splitlines():
                self.trace.add(json.loads(line))
        return self.trace
