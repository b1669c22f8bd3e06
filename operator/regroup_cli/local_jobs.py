"""Jobs of this machine as other commands find them: their directories, and whether `regroup run` still runs them.

`regroup run` holds a lock on a file in its job's directory for as long as it lives. So a run that was killed is known to be over. A
link in the user's state directory names each job's directory. A link whose directory is gone is removed when jobs are listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regroup_cli.local import FileStore
from regroup_client import views
from regroup_operator.api import SpecError, UnavailableError

_LOCK = "running"
_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux: type, whence, start, length, pid."""
KILLED = "Killed"
"""State of a job whose `regroup run` was killed: its workers ended with it."""


def open_job(directory: str) -> tuple[FileStore, dict[str, Any]]:
    """Return the file of a local job and its object. Raises SpecError."""
    store = FileStore(Path(directory, "job.json"))
    try:
        is_there = store.path.exists()
    except OSError as error:
        raise SpecError(
            f"DIR ({directory}) cannot be read ({error.strerror}). Give the directory that `regroup run` printed."
        ) from None
    if not is_there:
        raise SpecError(
            f"DIR ({directory}) holds no job. Give the directory that `regroup run` printed; it is removed when the job ends, "
            "unless --state-dir named it."
        )
    try:
        return store, store.read()
    except UnavailableError as error:
        raise SpecError(f"{error} Give the directory that `regroup run` printed.") from None


def view(directory: Path, raw: dict[str, Any]) -> views.JobView:
    """Return what is shown of a local job."""
    return views.job_view(as_it_is(directory, raw), directory=str(directory))


def as_it_is(directory: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a job's object. Its State is Killed if the file says that it goes on and no `regroup run` runs it."""
    if views.state(raw) in views.ENDED or runner(directory) is not None:
        return raw
    status = raw.get("status") or {}
    message = "Its `regroup run` was killed, and the workers ended with it. Start it again, with --resume if it saved checkpoints."
    return {**raw, "status": {**status, "summary": {"state": KILLED}, "conditions": [
        {"type": "Failed", "status": "True", "reason": KILLED, "message": message}]}}  # fmt: skip


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the lock of a job that this process runs, and name the job's directory among the user's jobs."""
    with (directory / _LOCK).open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        link = _links() / f"{os.getpid()}-{directory.name}"
        with contextlib.suppress(OSError):  # a read-only home: `list` does not show the job, and all else works
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(directory.absolute())
        yield


def runner(directory: Path) -> int | None:
    """Return the pid of the `regroup run` of a job, or None if it has ended."""
    try:
        with (directory / _LOCK).open("r+") as lock:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(lock, fcntl.F_GETLK, asked))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else int(pid)


def directories() -> list[Path]:
    """Return the directories of the user's local jobs, and remove links to those that are gone."""
    found: set[Path] = set()
    with contextlib.suppress(OSError):
        for link in _links().iterdir():
            if (link / "job.json").is_file():
                found.add(link.resolve())
            else:
                link.unlink(missing_ok=True)
    return sorted(found)


def _links() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or ""
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "regroup" / "jobs"
