"""Decides which checkpoint may be read and which may be deleted, from names and records. No I/O; the files are in `store`.

Owns the names `step-N.gG-uid8`, the record COMMIT.json, and rules STATE and CKPT on them. Order is by (generation, step),
generation first. So a late checkpoint of a fenced generation sorts below those of its successor (trace H15).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from regroup.protocol.document import CheckpointRef, LineageEntry
from regroup.protocol.state import StatePair

from .errors import skipped

T = TypeVar("T")

ASIDE = ".writing-"
"""Prefix of a directory whose data files are not complete."""
_NAME = re.compile(r"step-(\d{1,18})\.g(\d{1,18})-([0-9A-Za-z]{1,8})")


@dataclass(frozen=True, order=True)
class Name:
    """The name of a checkpoint. Names are ordered by (generation, step), generation first."""

    generation: int
    step: int
    uid8: str
    """First eight letters and digits of the generation's uid."""

    @property
    def directory(self) -> str:
        """Name of the checkpoint's directory."""
        return f"step-{self.step}.g{self.generation}-{self.uid8}"


def name_of(generation: int, step: int, uid: str) -> Name:
    """Return the name of the checkpoint that a generation writes after `step` commits. `uid` is the generation's."""
    return Name(generation, step, re.sub(r"[^0-9A-Za-z]", "", uid)[:8] or "0")


def parse_name(directory: str) -> Name | None:
    """Return the checkpoint's name from that of its directory, finished or not. None for another directory."""
    match = _NAME.fullmatch(directory.removeprefix(ASIDE))
    return Name(int(match[2]), int(match[1]), match[3]) if match else None


@dataclass(frozen=True)
class FileMark:
    """Size and hash of a committed file, by which a reader recognises it."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Commit:
    """The record COMMIT.json, which is written last. A directory without it is not a checkpoint."""

    job_uid: str
    generation: int
    """Generation that wrote the checkpoint and had adopted the state."""
    step: int
    state_generation: int
    """Generation of the state's last commit. It is lower than `generation` if the latter has not committed a step."""
    parent_generation: int
    start_step: int
    """First step of `generation`."""
    digest: str
    """Digest of the samples of the first `step` steps."""
    files: Mapping[str, FileMark] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the record in hex. The record has the hash of every file, so equal fingerprints mean equal states."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the text of COMMIT.json."""
        record = {key: getattr(self, name) for name, (key, _) in _KEYS.items()}
        record["files"] = {name: asdict(mark) for name, mark in self.files.items()}
        return json.dumps(record, indent=2) + "\n"


_KEYS: Mapping[str, tuple[str, type]] = {
    "job_uid": ("jobUID", str),
    "generation": ("generation", int),
    "step": ("step", int),
    "state_generation": ("stateGeneration", int),
    "parent_generation": ("parentGeneration", int),
    "start_step": ("startStep", int),
    "digest": ("digest", str),
}
"""Key and type in COMMIT.json of each field of Commit but `files`."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that may be read."""

    name: Name
    path: str
    commit: Commit

    @property
    def pair(self) -> StatePair:
        """The state's name."""
        return StatePair(self.commit.state_generation, self.commit.step)


def parse_commit(text: str, name: Name, job_uid: str) -> Commit:
    """Return the record in a COMMIT.json. Raises CheckpointError if it is damaged, or of another checkpoint or job."""
    try:
        raw = json.loads(text)
        values: dict[str, Any] = {name: _typed(raw, key, kind) for name, (key, kind) in _KEYS.items()}
        marks = _typed(raw, "files", dict).items()
        files = {file: FileMark(_typed(mark, "size", int), _typed(mark, "sha256", str)) for file, mark in marks}
        commit = Commit(**values, files=files)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise skipped(name.directory, f"its COMMIT.json is damaged ({error}).") from error
    if (commit.generation, commit.step) != (name.generation, name.step):
        raise skipped(
            name.directory, f"its COMMIT.json is that of step {commit.step} of generation {commit.generation}."
        )
    if commit.job_uid != job_uid:
        raise skipped(
            name.directory,
            f"it belongs to job {commit.job_uid}, this is {job_uid}. To continue from it, name it in "
            "spec.checkpoint.resumeFrom (`regroup run --resume`).",
        )
    return commit


def imported(info: CheckpointInfo) -> CheckpointInfo:
    """Return another job's checkpoint as the begin of this job.

    Its state is named (0, step), so that every state of a generation of this job is newer (rule STATE).
    """
    return replace(info, commit=replace(info.commit, state_generation=0))


def _typed(raw: object, key: str, kind: type[T]) -> T:
    if not isinstance(raw, dict):
        raise TypeError("it is not an object")
    if key not in raw:
        raise KeyError(f"no {key}")
    value = raw[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key} is {value!r}")
    return value


def is_named(name: Name, named: CheckpointRef | None) -> bool:
    """Return whether status.checkpoint (`named`) names this checkpoint.

    If no other may be read, it is read even if a later generation has left it behind. That one has saved no checkpoint
    since, or the status would name it.
    """
    return named is not None and (named.generation, named.step, named.directory) == (
        name.generation, name.step, name.directory
    )  # fmt: skip


def refusal(name: Name, lineage: Sequence[LineageEntry], named: CheckpointRef | None) -> str | None:
    """Return a sentence on why a checkpoint must not be read, or None if it may be.

    - `lineage`: status.lineage, in any order. Any later generation that began at an earlier step has left this checkpoint behind.
    - `named`: status.checkpoint. A checkpoint of a generation outside the lineage may be read only if the status names it.
    """
    if all(entry.generation != name.generation for entry in lineage):
        if is_named(name, named):
            return None
        return (
            f"Skipped {name.directory}: generation {name.generation} is not in the job's lineage, "
            f"and the job's status does not name this checkpoint."
        )
    for entry in sorted(lineage, key=lambda entry: entry.generation):
        if entry.generation > name.generation and name.step > entry.start_step:
            return (
                f"Skipped {name.directory}: generation {entry.generation} went on from step {entry.start_step}, "
                f"so step {name.step} of generation {name.generation} is fenced."
            )
    return None


def unwelcome(names: Iterable[Name], generation: int) -> str | None:
    """Return a sentence if a writer of `generation` must not write, because a later generation has written. Otherwise None."""
    above = max((name.generation for name in names), default=0)
    if above > generation:
        return f"Generation {above} has written a checkpoint, so generation {generation} is fenced and writes none."
    return None


def prunable(
    committed: Iterable[Name], unfinished: Iterable[Name], keep: Sequence[str], generation: int
) -> tuple[list[Name], list[Name]]:
    """Return the (committed, unfinished) checkpoints of this job that the command `prune{keep}`, heard in `generation`, deletes.

    - Checkpoints of later generations stay.
    - Checkpoints newer than the newest one to keep stay, since the operator did not know of them.
    - Unfinished ones of `generation` itself stay, since they may be in the making.
    - Without a name to keep, all stay.
    """
    kept = [name for name in map(parse_name, keep) if name is not None]
    if not kept:
        return [], []
    newest = max(kept)
    old = [name for name in committed if name.generation <= generation and name < newest and name not in kept]
    left = [name for name in unfinished if name.generation < generation and name < newest and name not in kept]
    return sorted(old), sorted(left)
