"""Files that a pod sends as a tar, written into a directory of this machine. The pod is not trusted: its image is the user's.

A name that leads out of the directory, a link, a device, a file twice, and what was not asked for are refused. Python's own filter
for tars would rename some of these. Sizes and SHA-256 are compared while the bytes pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from regroup_client.errors import PullError

COMMIT = "COMMIT.json"
_JOB = ".job"
_BLOCK = 1 << 20


class Source(Protocol):
    """Bytes that come one after another."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, and none at the end."""


@dataclass(frozen=True)
class Mark:
    """Size and hash of a file that was committed. None: nothing is known of the file's content."""

    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Received:
    """Number and size of the files that were written."""

    num_files: int
    num_bytes: int


@dataclass(frozen=True)
class Commit:
    """The part of a COMMIT.json that a copy needs. The library's own reader of this file needs torch, and a laptop has none."""

    job_uid: str
    files: Mapping[str, Mark]


def parse_commit(text: str) -> Commit:
    """Return the record in a COMMIT.json. Raises ValueError if it is none."""
    try:
        raw = json.loads(text)
        job_uid, listed = raw["jobUID"], raw["files"].items()
        marks = {name: Mark(int(mark["size"]), str(mark["sha256"])) for name, mark in listed}
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError("it is no record of a checkpoint") from error
    if not marks or any("/" in name for name in marks):
        raise ValueError("it names no files, or files outside of the checkpoint")
    return Commit(str(job_uid), marks)


def wanted(text: str, commit: Commit) -> dict[str, Mark]:
    """Return the files of a whole checkpoint. The record must be the one that was listed, so that no other passes for it."""
    content = text.encode()
    own = Mark(len(content), hashlib.sha256(content).hexdigest())
    return {**commit.files, COMMIT: own, **({} if _JOB in commit.files else {_JOB: Mark()})}


def receive(source: Source, into: Path, only: Mapping[str, Mark] | None) -> Received:
    """Write the files of a tar into a directory that is empty. Raises PullError.

    `only` are the files that must come, and no others. None: every plain file is taken.
    """
    seen: set[str] = set()
    num_bytes = 0
    with _one_sentence(into):
        try:
            with tarfile.open(fileobj=source, mode="r|") as tar:  # type: ignore[call-overload]
                for member in tar:
                    name = _name(member)
                    mark = _mark(name, only)
                    if mark.size is not None and member.size != mark.size:
                        raise PullError(
                            f"{name} has {member.size} bytes, {mark.size} were committed. Verify the checkpoint."
                        )
                    content = tar.extractfile(member)
                    assert content is not None
                    num_bytes += _write(content, into / name, mark)
                    seen.add(name)
        except tarfile.TarError as error:
            raise PullError(f"What the pod sent ended too early or is no tar ({error}). Try again.") from None
    missing = sorted(set(only or ()) - seen - {_JOB})
    if missing:
        raise PullError(f"{missing[0]} is missing in the checkpoint. Pull another one with --step.")
    return Received(len(seen), num_bytes)


def _name(member: tarfile.TarInfo) -> str:
    """Return the name of a plain file below the directory. Raises PullError for anything else."""
    name = member.name
    path = PurePosixPath(name)
    if not member.isreg():
        raise PullError(f"The pod sent {name!r}, which is no plain file. Nothing of it was kept.")
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise PullError(f"The pod sent {name!r}, which leads out of the directory. Nothing of it was kept.")
    return path.as_posix()


def _mark(name: str, only: Mapping[str, Mark] | None) -> Mark:
    if only is None:
        return Mark()
    if name not in only:
        raise PullError(f"The pod sent {name!r}, which is no file of the checkpoint. Nothing of it was kept.")
    return only[name]


def _write(content: IO[bytes], path: Path, mark: Mark) -> int:
    """Write one file durably, and return its size. Raises PullError if its hash is another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        while block := content.read(_BLOCK):
            digest.update(block)
            file.write(block)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    if mark.sha256 is not None and digest.hexdigest() != mark.sha256:
        raise PullError(f"{path.name} is not what was committed (SHA-256 differs). Pull another one with --step.")
    return size


@contextmanager
def _one_sentence(into: Path) -> Iterator[Any]:
    try:
        yield
    except FileExistsError as error:
        raise PullError(
            f"{error.filename} came twice, or differs in upper and lower case only. Pull it with --path."
        ) from None
    except OSError as error:
        raise PullError(
            f"DIR ({into.parent}) cannot be written ({error.strerror}). Check its owner and the free space."
        ) from None
