"""Jobs of this machine as other commands find them: their directories, and whether `regroup run` still runs them.

`regroup run` holds a lock on a file in its job's directory for as long as it lives. So a run that was killed is known to be over. A
link in the user's state directory names each job's directory. A link whose directory is gone is removed when jobs are listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regroup_cli.local import FileStore
from regroup_client import views
from regroup_operator.api import SpecError, StatusError, UnavailableError, parse_job

_LOCK = "running"
_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux: type, whence, start, length, pid."""
_VERBS = {"scale": "Resize", "suspend": "Suspend", "resume": "Resume"}
POLL_S = 0.2
END_S = 60.0
"""Longest wait for the end of a job that is deleted."""
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
    if views.state(raw) in views.ENDED or not (directory / _LOCK).exists() or runner(directory) is not None:
        return raw  # without the file it is just being started
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


class LocalJobs:
    """Implements verbs.Jobs for the jobs of this machine. A job is named by its directory, or by its name if only one has it."""

    def all(self) -> list[views.JobView]:
        out = []
        for directory in directories():
            with contextlib.suppress(UnavailableError):
                out.append(view(directory, FileStore(directory / "job.json").read()))
        return out

    def look(self, job: str) -> views.JobView:
        directory = find(job)
        return view(directory, open_job(str(directory))[1])

    def read(self, job: str) -> views.Object:
        directory = find(job)
        return as_it_is(directory, open_job(str(directory))[1])

    def changes(self, job: str) -> Iterator[views.Object]:
        directory, version = find(job), ""
        found = as_it_is(directory, open_job(str(directory))[1])
        while True:
            if (now := f"{found['metadata']['resourceVersion']} {views.state(found)}") != version:
                version = now
                yield found
            if views.state(found) == KILLED:
                raise SpecError(f"The `regroup run` of the job in {directory} was killed. Start it again.")
            time.sleep(POLL_S)
            try:
                found = as_it_is(directory, FileStore(directory / "job.json").read())
            except UnavailableError:
                raise SpecError(
                    f"The job in {directory} has ended, and its directory is gone. Its last lines are where it was started."
                ) from None

    def change(self, job: str, verb: str, patch: Mapping[str, Any]) -> int:
        directory = find(job)
        store, raw = open_job(str(directory))
        try:
            parse_job(raw)
        except (SpecError, StatusError) as error:
            raise SpecError(f"{store.path} has been changed, and is no job any more: {error}") from None
        try:
            store.change_spec(lambda spec: merge(spec, patch))
        except UnavailableError as error:  # the job has ended meanwhile
            raise SpecError(f"{error} Start the job again.") from None
        except OSError as error:
            raise SpecError(
                f"DIR ({job}) cannot be written to ({error.strerror}). {_VERBS[verb]} the job as the user who started it."
            ) from None
        print(
            f"regroup: {views.counted(patch['replicas'], 'worker')} wanted"
            if verb == "scale"
            else f"regroup: {verb} is asked for"
        )
        return 0

    def delete(self, job: str) -> int:
        directory = find(job)
        open_job(str(directory))
        pid = runner(directory)
        if pid is not None:
            os.kill(pid, signal.SIGINT)
            deadline_s = time.monotonic() + END_S
            while runner(directory) is not None:
                if time.monotonic() > deadline_s:
                    raise SpecError(f"The job in {directory} has not ended within {END_S:.0f} s. Its process is {pid}.")
                time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            for link in _links().iterdir():
                if link.resolve() == directory.resolve():
                    link.unlink(missing_ok=True)
        print("regroup: the job has ended" + (f"; its files stay in {directory}" if directory.exists() else ""))
        return 0

    def refuse(self, sentence: str) -> Exception:
        return SpecError(sentence)


def find(job: str) -> Path:
    """Return the directory of a job that is named by it, or by the job's name. Raises SpecError."""
    try:
        if "/" in job or Path(job).exists():
            return Path(job)
    except OSError:
        return Path(job)
    named = [one for one in LocalJobs().all() if one.name == job]
    if len(named) > 1:
        raise SpecError(f"{len(named)} jobs have the name {job}. Give the directory of one: `regroup list` shows them.")
    return Path(named[0].directory) if named else Path(job)


def merge(spec: dict[str, Any], patch: Mapping[str, Any]) -> None:
    """Merge a patch into a spec in place, as the API server does."""
    for name, value in patch.items():
        if isinstance(value, Mapping):
            merge(spec.setdefault(name, {}), value)
        else:
            spec[name] = value
