"""Jobs of this machine as other commands find them: their directories, and whether `regroup run` still runs them.

`regroup run` holds a lock on a file in its job's directory for as long as it lives. So a run that was killed is known to be over. A
link in the user's state directory names each job's directory. A link whose directory is gone is removed when jobs are listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from regroup_client import views
from regroup_client.errors import JobError
from regroup_client.jobs import Verb, Wanted
from regroup_client.local_logs import LocalLogs
from regroup_client.log_streams import LogsError

_LOCK = "running"
_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux: type, whence, start, length, pid."""
_own: set[Path] = set()
"""Directories of jobs that this process runs. It must not look at the lock: the kernel reports no lock of the asking process, and
drops its lock when it closes the file."""
FILE = "job.json"
"""File of a local job in its directory."""
POLL_S = 0.2
END_S = 60.0
"""Longest wait for the end of a job that is deleted."""


Edit = Callable[[Path, Verb, Mapping[str, Any]], None]
"""Merges a patch into the spec of the job in a directory, if the operator's rules allow it. Raises an error with one sentence."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the object in the file of a local job. Raises JobError if the file cannot be read as one."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        why = _lack(data)
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        why = str(error)
    if why:
        raise JobError(f"{path} cannot be read as a job ({why}).")
    return data


def _lack(data: Any) -> str:
    """Return why an object is no job as `regroup run` writes it, or "" if it is one."""
    if not isinstance(data, dict):
        return "it is no object"
    metadata = data.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return "it has no metadata.name"
    for name in ("resourceVersion", "generation"):
        if re.fullmatch(r"\d{1,18}", str(metadata.get(name))) is None:
            return f"its metadata.{name} is no number"
    if not isinstance(data.get("spec"), dict):
        return "it has no spec"
    return "" if isinstance(data.get("status", {}), dict) else "its status is no object"


def open_job(directory: Path) -> dict[str, Any]:
    """Return the object of a local job. Raises JobError."""
    path = directory / FILE
    try:
        is_there = path.exists()
    except OSError as error:
        raise JobError(
            f"DIR ({directory}) cannot be read ({error.strerror}). Give the directory that `regroup run` printed."
        ) from None
    if not is_there:
        raise JobError(
            f"DIR ({directory}) holds no job. Give the directory that `regroup run` printed; it is removed when the job ends, "
            "unless --state-dir named it."
        )
    try:
        return read_file(path)
    except JobError as error:
        raise JobError(f"{error} Give the directory that `regroup run` printed.") from None


def view(directory: Path, raw: dict[str, Any]) -> views.JobView:
    """Return what is shown of a local job."""
    return views.job_view(as_it_is(directory, raw), directory=str(directory))


def as_it_is(directory: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a job's object. Its State is Killed if the file says that it goes on and no `regroup run` runs it."""
    if "conditions" not in (
        raw.get("status") or {}
    ):  # `regroup run` starts it. No operator of a cluster is to look at it.
        raw = {**raw, "status": {"phase": "Starting", **(raw.get("status") or {}), "conditions": []}}
    if views.state(raw) in views.ENDED or not (directory / _LOCK).exists() or runner(directory) is not None:
        return raw  # without the file it is just being started
    status = raw.get("status") or {}
    message = "Its `regroup run` was killed, and the workers ended with it. Start it again, with --resume if it saved checkpoints."
    return {**raw, "status": {**status, "summary": {"state": views.KILLED}, "conditions": [
        {"type": "Failed", "status": "True", "reason": views.KILLED, "message": message}]}}  # fmt: skip


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the lock of a job that this process runs, and name the job's directory among the user's jobs."""
    link = _links() / f"{os.getpid()}-{directory.name}"
    with contextlib.suppress(OSError):  # a read-only home: `list` does not show the job, and all else works
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(directory.absolute())
    with (directory / _LOCK).open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _own.add(directory.resolve())
        try:
            yield
        finally:
            _own.discard(directory.resolve())


def runner(directory: Path) -> int | None:
    """Return the pid of the `regroup run` of a job, or None if it has ended."""
    if directory.resolve() in _own:
        return os.getpid()
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
            if (link / FILE).is_file():
                found.add(link.resolve())
            else:
                link.unlink(missing_ok=True)
    return sorted(found)


def home() -> Path:
    """Return the directory in which Regroup notes the user's local jobs."""
    base = os.environ.get("XDG_STATE_HOME") or ""
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "regroup"


def _links() -> Path:
    return home() / "jobs"


class LocalJobs:
    """Implements Jobs for this machine. A job is named by its directory, or by its name if only one job has it."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def _find(self, job: str) -> Path:
        return find(job)

    def all(self) -> list[views.JobView]:
        return local_views()

    def look(self, job: str) -> views.JobView:
        directory = self._find(job)
        return view(directory, open_job(directory))

    def read(self, job: str) -> views.Object:
        directory = self._find(job)
        return as_it_is(directory, open_job(directory))

    def changes(self, job: str) -> Iterator[views.Object]:
        directory, version = self._find(job), ""
        found = as_it_is(directory, open_job(directory))
        while True:
            if (now := f"{found['metadata']['resourceVersion']} {views.state(found)}") != version:
                version = now
                yield found
            if views.state(found) == views.KILLED:
                raise JobError(f"The `regroup run` of the job in {directory} was killed. Start it again.")
            time.sleep(POLL_S)
            try:
                found = as_it_is(directory, read_file(directory / FILE))
            except JobError:
                raise JobError(
                    f"The job in {directory} has ended, and its directory is gone. Its last lines are where it was started."
                ) from None

    def change(self, job: str, verb: Verb, patch: Mapping[str, Any]) -> None:
        directory = self._find(job)
        open_job(directory)
        self._edit(directory, verb, patch)

    def delete(self, job: str) -> str:
        directory = self._find(job)
        open_job(directory)
        pid = runner(directory)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGINT)
            deadline_s = time.monotonic() + END_S
            while runner(directory) is not None:
                if time.monotonic() > deadline_s:
                    raise JobError(f"The job in {directory} has not ended within {END_S:.0f} s. Its process is {pid}.")
                time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            for link in _links().iterdir():
                if link.resolve() == directory.resolve():
                    link.unlink(missing_ok=True)
        return "the job has ended" + (f"; its files stay in {directory}" if directory.exists() else "")

    def logs(self, job: str, wanted: Wanted, since_s: int | None = None) -> LocalLogs:  # noqa: ARG002 (files are short)
        directory = self._find(job)
        last: list[views.Object] = []

        def look() -> tuple[views.Object, bool]:
            try:
                found = as_it_is(directory, open_job(directory))
            except JobError as error:
                if last:  # the run has ended, and has removed its directory
                    return last[0], False
                raise LogsError(str(error)) from None
            last[:] = [found]
            return found, views.state(found) not in views.OVER

        return LocalLogs(directory, look, wanted)


def local_views() -> list[views.JobView]:
    """Return the jobs of this machine. A file that is no job is left out."""
    out = []
    for directory in directories():
        with contextlib.suppress(JobError):
            out.append(view(directory, read_file(directory / FILE)))
    return out


def find(job: str) -> Path:
    """Return the directory of a job that is named by it, or by the job's name. Raises JobError."""
    try:
        if "/" in job or (Path(job) / FILE).exists():  # a script's folder may have the name of a job
            return Path(job)
    except OSError:
        return Path(job)
    named = [one for one in local_views() if one.name == job]
    if len(named) > 1:
        first = ", ".join(one.directory for one in named[:3]) + (", ..." if len(named) > 3 else "")
        raise JobError(f"{len(named)} jobs have the name {job}. Give the directory of one: {first}")
    return Path(named[0].directory) if named else Path(job)
