"""Jobs of this machine that the Python client starts. Each is a `regroup run`, which goes on when the client's process ends.

The command reads the rules of the operator, which need more packages than this one. So changes of a job are made by commands, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regroup_client import local_jobs, submission
from regroup_client.errors import ClientError, JobError, SubmitError
from regroup_client.jobs import Verb
from regroup_client.place import How, Options

START_S = 120.0
"""Longest wait until a job is there. Importing the command takes seconds on a loaded machine."""
CHANGE_S = 120.0
"""Longest wait for a command that changes a job."""
LEFT_S = 5 * START_S
"""Age of a directory without a job from which on it is removed. A slower start still finds its directory."""
POLL_S = 0.05
_OUTPUT = "output"
"""File in a job's directory with what `regroup run` prints."""
_ONLY_IN_A_CLUSTER = ("cpu", "memory", "env_from", "data", "pip", "index_url", "user")


class LocalRuns:
    """Implements Place for this machine."""

    def __init__(self) -> None:
        self.jobs = _Jobs(_edit)

    def submit(self, script: Path, args: Sequence[str], how: How, options: Options) -> str:
        refused = [name for name in _ONLY_IN_A_CLUSTER if name in options]
        if refused:
            raise SubmitError(f"{refused[0]} is for jobs of a cluster. Leave it out for a job of this machine.")
        if "directory" in options and not script.is_file():
            script = Path(options["directory"]) / script
        if not script.is_file():
            raise SubmitError(f"script ({script}) is not a file. Give the path of a Python script.")
        name = options.get("name", submission.job_name(script.stem))
        submission.check_name(name)  # before it becomes a part of a path
        submission.check_sizes(how.workers, options.get("min"), options.get("max"))
        directory = _new_directory(name)
        words = [
            "run",
            "--plain",
            f"--state-dir={directory}",
            f"--name={name}",
            f"--workers={how.workers}",
            f"--processes-per-worker={max(1, how.gpus)}",
            f"--gpus={'auto' if how.gpus else 'none'}",
        ]
        chosen = {"min": options.get("min"), "max": options.get("max"), "framework": options.get("framework")}
        chosen |= {"checkpoint": options.get("checkpoint")}
        words += [f"--{option}={value}" for option, value in chosen.items() if value]
        environment = {**os.environ, **options.get("env", {})}
        try:
            _start([*words, str(script), *args], directory, environment)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return str(directory)


class _Jobs(local_jobs.LocalJobs):
    """Jobs of this machine. The directories of those that a client started go with them."""

    def _find(self, job: str) -> Path:
        directory = super()._find(job)
        with contextlib.suppress(OSError):  # then the reader of the file says why
            if not (directory / local_jobs.FILE).exists():
                raise JobError(f"There is no job {job} on this machine. Give the name or the directory of a job.")
        return directory

    def delete(self, job: str) -> str:
        directory = self._find(job)
        said = super().delete(job)
        if directory.resolve().parent == _runs().resolve():
            shutil.rmtree(directory, ignore_errors=True)
        return said


def _runs() -> Path:
    """Return the directory that has those of the jobs that clients started."""
    return local_jobs.home() / "runs"


def _new_directory(name: str) -> Path:
    try:
        _runs().mkdir(parents=True, exist_ok=True)
        _remove_leftovers(time.time())
        return Path(tempfile.mkdtemp(prefix=f"{name[:20]}-", dir=_runs()))
    except OSError as error:
        raise SubmitError(
            f"{_runs()} cannot be written to ({error.strerror}). Set XDG_STATE_HOME to a directory that can."
        ) from None


def _remove_leftovers(now_s: float) -> None:
    """Remove directories without a job. A client that was killed before its job began leaves one."""
    for directory in _runs().iterdir():
        with contextlib.suppress(OSError):  # another client has removed it
            is_old = now_s - directory.stat().st_mtime > LEFT_S
            if is_old and not (directory / local_jobs.FILE).exists() and local_jobs.runner(directory) is None:
                shutil.rmtree(directory, ignore_errors=True)


def _command(*words: str) -> list[str]:
    # Without -P modules of the current directory would hide those of the standard library.
    return [sys.executable, "-P", "-m", "regroup_cli.entry", *words]


def _start(words: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
    """Start a job, and wait until it is there. It is in a session of its own, so that an interrupted notebook does not end it."""
    with (directory / _OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            _command(*words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # so that it leaves no zombie
    deadline_s = time.monotonic() + START_S
    try:
        while local_jobs.runner(directory) is None:
            if process.poll() is not None:
                if (directory / local_jobs.FILE).exists():
                    return  # it has ended already
                raise SubmitError(_sentence((directory / _OUTPUT).read_text(errors="replace"), process.returncode))
            if time.monotonic() > deadline_s:
                raise SubmitError(
                    f"`regroup run` has not begun within {START_S:.0f} s. Try again on a machine with less load."
                )
            time.sleep(POLL_S)
    except BaseException:
        process.terminate()
        raise


def _edit(directory: Path, verb: Verb, patch: Mapping[str, Any]) -> None:
    words = [verb, str(directory), *([str(patch["replicas"])] if verb == "scale" else [])]
    try:
        done = subprocess.run(
            _command(*words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHANGE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClientError(f"`regroup {verb}` has not ended within {CHANGE_S:.0f} s. Try again.") from None
    if done.returncode != 0:
        raise JobError(_sentence(done.stderr, done.returncode))


def _sentence(said: str, code: int | None) -> str:
    """Return the sentence with which a command of `regroup` ended."""
    lines = [line for line in said.splitlines() if line.startswith("regroup")]
    return (
        lines[-1].partition(": ")[2].removeprefix("error: ") if lines else f"`regroup` ended with {code}. {said[-300:]}"
    )
