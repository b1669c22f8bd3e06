"""The memory snapshot's directory as agent and library see it: which states lie in it, complete.

A slot is a file of bytes and a description (JSON). The description is renamed into place after the last byte, so that a slot
without one is absent. The library writes both (`regroup.state.slots`); the agent reads descriptions only, as it starts and
whenever a process has ended. Where a model is split, each process of the worker has slots of its own.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .state import StatePair

SLOTS = ("a", "b")
VERSION = 1


@dataclass(frozen=True)
class SnapshotState:
    """The state that a snapshot holds: all that the agent knows of it."""

    state: StatePair
    adopted: int
    """The generation in which the state was adopted."""
    is_last: bool
    """Its process took it as it ended, after its last commit: it is what the process held."""


@dataclass(frozen=True)
class Snapshot(SnapshotState):
    """One complete slot."""

    slot: str
    description: "dict[str, Any]"
    """The whole description, for the library."""


def directory_of(root: Path, local_rank: int) -> Path:
    """Return the directory of a process's slots."""
    return root / str(local_rank) if local_rank else root


def description_path(directory: Path, slot: str) -> Path:
    """Return the path of a slot's description."""
    return directory / f"{slot}.json"


def data_path(directory: Path, slot: str) -> Path:
    """Return the path of a slot's bytes."""
    return directory / f"{slot}.bin"


def held(directory: Path, job_uid: str) -> "list[Snapshot]":
    """Return the complete snapshots of this job, the newest first. What cannot be read counts as absent."""
    found = []
    for slot in SLOTS:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(description_path(directory, slot).read_text(encoding="utf-8"))
            if data["version"] == VERSION and data["job"] == job_uid:
                generation, step = (int(number) for number in data["state"])
                state = StatePair(generation, step)
                found.append(Snapshot(state, int(data["adopted"]), bool(data["is_last"]), slot, data))
    # Of one state the copy that its process took as it ended, or in the generation that adopted it last, says more.
    return sorted(found, key=lambda one: (one.state, one.adopted, one.is_last), reverse=True)
