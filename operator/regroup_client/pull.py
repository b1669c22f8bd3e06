"""Fetches checkpoints from a job's volume: makes the reading pod, waits for it, and copies through `kubectl exec`.

kubectl proxy refuses exec, so that the user's kubectl is started for it. `reader_pod` has the decisions on the pod, and `received`
those on the files. The pod is deleted at the end, after Ctrl-C, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from regroup_client import reader_pod, received, views
from regroup_client.access import Target, kubectl
from regroup_client.api import CLAIMS, EVENTS, JOBS, PODS, Api, Object
from regroup_client.errors import ApiError, ArgumentError, ClientError, PullError
from regroup_client.reader_pod import MOUNT, Reader, Volume

LOOK_S = 0.5
END_S = 10.0
"""Longest wait for the end of a kubectl whose output has ended."""
STALL_S = 120.0
"""Longest wait for the next bytes of a pod. A slow volume answers in seconds, and a node that died never."""
WAIT_S = 180.0
"""Longest wait for the pod. Its image may have to be pulled, and an autoscaler may have to add a node."""
_CHECKPOINT = re.compile(r"step-(\d{1,18})\.g(\d{1,18})-[0-9A-Za-z]{1,8}")
# Prints the records of the checkpoints, and number and size of all other files. Links are counted, because they are left out.
_LIST = """\
import json, os, sys
base, commits, files, size, links = sys.argv[1], {}, 0, 0, 0
for entry in os.scandir(base):
    if entry.name.startswith(("step-", ".writing-step-")) and entry.is_dir(follow_symlinks=False):
        try:
            with open(os.path.join(entry.path, "COMMIT.json"), encoding="utf-8") as file:
                commits[entry.name] = file.read(1 << 24)
        except FileNotFoundError:
            commits[entry.name] = None
top = os.path.join(base, sys.argv[2])
if not os.path.lexists(top):
    files = -1
for here, folders, names in os.walk(top) if os.path.isdir(top) else [(os.path.dirname(top), [], [os.path.basename(top)])]:
    if here == base:
        folders[:] = [name for name in folders if name not in commits and name != "lost+found"]
    for name in names + folders:
        path = os.path.join(here, name)
        links += os.path.islink(path)
        if os.path.isfile(path) and not os.path.islink(path):
            files, size = files + 1, size + os.path.getsize(path)
print(json.dumps({"commits": commits, "files": files, "bytes": size, "links": links}))
"""
# Sends the plain files below a directory, or one file, as a tar. Names in it are relative to that directory.
_SEND = """\
import os, stat, sys, tarfile
base, top = sys.argv[1], os.path.join(sys.argv[1], sys.argv[2])
skipped = sys.argv[3:]
def files():
    if not os.path.isdir(top):
        yield os.path.basename(top), top
        return
    for here, folders, names in os.walk(top):
        if here == base:
            folders[:] = [name for name in folders if name not in skipped and name != "lost+found"]
        folders.sort()
        for name in sorted(names):
            path = os.path.join(here, name)
            yield os.path.relpath(path, top), path
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", bufsize=1 << 20) as tar:
    for name, path in files():
        if not stat.S_ISREG(os.lstat(path).st_mode):
            continue
        with open(path, "rb") as file:
            member = tarfile.TarInfo(name)
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)
"""


@dataclass(frozen=True)
class Wanted:
    """The choices of a user for one pull."""

    step: int | None = None
    """The checkpoint of this step. None: the newest."""

    path: str = ""
    """A file or directory that a script has saved, relative to the job's checkpoint directory."""

    has_commits: bool = False
    """True: only a checkpoint of the library is of use."""

    user: int | None = None
    """User id of the reading pod. None: that of the job's template."""

    wait_s: float = WAIT_S


@dataclass(frozen=True)
class Pulled:
    """The result of a pull: the path on this machine, and a sentence about it."""

    path: Path
    sentence: str


@dataclass(frozen=True)
class _Checkpoint:
    """A complete checkpoint of the job. The order is that of the library: generation first."""

    generation: int
    step: int
    name: str
    text: str
    commit: received.Commit


def pull(api: Api, target: Target, job_name: str, into: Path, wanted: Wanted, say: Callable[[str], None]) -> Pulled:
    """Copy a checkpoint, or what a script has saved, into a directory. Raises ClientError.

    A checkpoint gets a directory of its own in `into`. The files of a script are `into` itself, which must be empty or not there.
    """
    check(into, wanted)
    job = _job(api, job_name)
    volume = reader_pod.volume_of(job)
    with _reading(api, target, job, volume, wanted, say) as pod:
        listed = pod.listed(wanted.path)
        chosen = None if wanted.path else choose(job, volume, listed["commits"], wanted.step)
        if chosen is not None:
            return _pull_checkpoint(pod, chosen, into, say)
        if wanted.has_commits:
            raise PullError(
                f"The job {job_name} has no checkpoint of the library, and no others can be exported. Fetch what its script has "
                "saved with `regroup checkpoint pull`."
            )
        if wanted.path and listed["files"] < 0:
            raise PullError(
                f"--path ({wanted.path}) is not in the checkpoints of the job {job_name}. Give a path that is."
            )
        if not listed["files"]:
            raise PullError(f"The claim {volume.claim} holds no checkpoint of the job {job_name}, and no other file.")
        return _pull_files(pod, wanted.path, listed, into, say)


def check(into: Path, wanted: Wanted) -> None:
    """Raise ArgumentError for arguments that no cluster could make right."""
    given = PurePosixPath(wanted.path)
    if wanted.path and (given.is_absolute() or ".." in given.parts or not given.parts or "\0" in wanted.path):
        raise ArgumentError(
            f"--path ({wanted.path}) is not below the job's checkpoint directory. Give a relative path without two dots."
        )
    if wanted.user is not None and wanted.user < 1:
        raise ArgumentError(
            f"--user ({wanted.user}) is not above 0, and the pod may not run as root. Give the id of another user."
        )
    if into.exists() and not into.is_dir():
        raise ArgumentError(f"DIR ({into}) is no directory. Name another one.")
    if not into.absolute().parent.is_dir():
        raise ArgumentError(f"DIR ({into}) is in no directory: {into.absolute().parent} is none. Make it first.")


def _job(api: Api, name: str) -> Object:
    try:
        return api.get(JOBS, name)
    except ApiError as error:
        if error.status == 404 and error.reason == "NotFound":
            raise PullError(
                f"The namespace {api.namespace} has no job {name}. `kubectl regroup list -A` shows all."
            ) from None
        if error.status == 404:
            raise PullError(
                "The cluster does not know DistributedTrainingJobs. Install Regroup's operator there first."
            ) from None
        raise


def choose(job: Object, volume: Volume, commits: Mapping[str, str | None], step: int | None) -> _Checkpoint | None:
    """Return the job's newest complete checkpoint, or that of a step. None: there are none, nor begun ones. Raises PullError.

    `commits` has the text of COMMIT.json by the name of a checkpoint's directory, or None where it is missing.
    """
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    found: list[_Checkpoint] = []
    damaged, foreign = [], []
    for directory, text in commits.items():
        match = _CHECKPOINT.fullmatch(directory)
        if match is None or text is None:
            continue
        try:
            commit = received.parse_commit(text)
        except ValueError as error:
            damaged.append(f"{directory}: {error}")
            continue
        if commit.job_uid != uid:
            foreign.append(directory)
            continue
        found.append(_Checkpoint(int(match[2]), int(match[1]), directory, text, commit))
    fitting = [one for one in found if step in (None, one.step)]
    if fitting:
        return max(fitting, key=lambda one: (one.generation, one.step))
    if found:
        steps = sorted({one.step for one in found})
        listed = ", ".join(map(str, steps[-10:]))
        raise PullError(
            f"--step ({step}) is the step of no complete checkpoint of the job {name}. Give one of {listed}."
        )
    if damaged:
        raise PullError(f"The job {name} has no checkpoint that can be used. {damaged[0]}.")
    if foreign:
        raise PullError(
            f"The claim {volume.claim} holds {views.counted(len(foreign), 'checkpoint')} of other jobs, and none of {name}. "
            f"To fetch one all the same give --path {max(foreign)}."
        )
    if commits:
        raise PullError(f"The job {name} has not completed a checkpoint yet. Try again later.")
    if step is not None:
        raise PullError(
            f"--step ({step}) goes with checkpoints of the library, and the job {name} has none. Leave it out."
        )
    return None


def _pull_checkpoint(pod: Pod, chosen: _Checkpoint, into: Path, say: Callable[[str], None]) -> Pulled:
    place = into / chosen.name
    if os.path.lexists(place):
        raise PullError(f"DIR ({into}) has {chosen.name} already. Delete it there, or name another directory.")
    files = received.wanted(chosen.text, chosen.commit)
    total = sum(mark.size or 0 for mark in files.values())
    say(f"Reading {chosen.name}: {views.counted(len(files), 'file')}, {total:,} bytes.")
    with _directory(into), _aside(into) as aside:
        got = pod.receive(chosen.name, aside, files)
        _finish(aside, place)
    return Pulled(place, f"{place}: {views.counted(got.num_files, 'file')}, {got.num_bytes:,} bytes, as committed")


def _pull_files(pod: Pod, path: str, listed: Mapping[str, Any], into: Path, say: Callable[[str], None]) -> Pulled:
    if into.exists() and any(into.iterdir()):
        raise PullError(
            f"DIR ({into}) is not empty, and the job's own files would mix with what is there. Name another one."
        )
    say(f"Reading {path or 'all files'}: {views.counted(listed['files'], 'file')}, {listed['bytes']:,} bytes.")
    skipped = () if path else tuple(listed["commits"])
    with _aside(into.absolute().parent) as aside:
        got = pod.receive(path, aside, None, skipped)
        _finish(aside, into)  # onto an empty directory, too
    left = f"; {views.counted(listed['links'], 'link')} left out" if listed["links"] else ""
    return Pulled(into, f"{into}: {views.counted(got.num_files, 'file')}, {got.num_bytes:,} bytes{left}")


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Make a directory if it is missing. After an error one that was made is removed."""
    made = not path.exists()
    with _writing(path):
        path.mkdir(exist_ok=True)
    try:
        yield
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


@contextlib.contextmanager
def _aside(beside: Path) -> Iterator[Path]:
    """Yield a new directory for files that are not complete. What is in it at the end is removed."""
    with _writing(beside):
        made = Path(tempfile.mkdtemp(prefix=".pulling-", dir=beside))
    try:
        inner = made / "files"
        inner.mkdir()  # with the mode that the user's umask gives, which is not that of mkdtemp
        yield inner
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _finish(aside: Path, place: Path) -> None:
    with _writing(place.parent):
        aside.rename(place)
        handle = os.open(place.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PullError(
            f"DIR ({directory}) cannot be written ({error.strerror}). Check its owner and the free space."
        ) from None


@contextlib.contextmanager
def _reading(
    api: Api, target: Target, job: Object, volume: Volume, wanted: Wanted, say: Callable[[str], None]
) -> Iterator[Pod]:
    """Yield the reading pod once it runs, and delete it at the end. Raises ClientError."""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    program = kubectl()
    _sweep(api, name, namespace)
    node = _only_node(api, volume, namespace)
    reader = Reader(f"{name}-pull-{secrets.token_hex(3)}", node, wanted.user)
    made: Object | None = None
    try:
        made = api.create(PODS, reader_pod.manifest(job, volume, reader), namespace)
        say(f"The pod {reader.name} reads the claim {volume.claim}.")
        _await_start(api, reader, namespace, wanted.wait_s)
        head = [program, "exec", f"--namespace={namespace}", *target.options(), f"--container={reader_pod.CONTAINER}"]
        yield Pod([*head, reader.name, "--", "python3", "-I", "-c"])
    finally:
        # Its name has a random part, so that nobody else's pod is deleted if Ctrl-C came before the answer.
        uid = "" if made is None else made["metadata"]["uid"]
        with contextlib.suppress(ClientError):
            api.delete(PODS, reader.name, namespace, uid=uid)


def _sweep(api: Api, job: str, namespace: str) -> None:
    """Delete the reading pods that have ended by themselves, because their commands were killed. Another one may still read."""
    with contextlib.suppress(ApiError):  # without the right to list pods they stay until the job goes
        for pod in api.list(PODS, namespace, labelSelector=f"{reader_pod.LABEL}={job}"):
            if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                api.delete(PODS, pod["metadata"]["name"], namespace, uid=pod["metadata"]["uid"])


def _only_node(api: Api, volume: Volume, namespace: str) -> str:
    claim = api.find(CLAIMS, volume.claim, namespace)
    if claim is None:
        raise PullError(
            f"The claim {volume.claim} is not in the namespace {namespace}, so that there is nothing to pull."
        )
    return reader_pod.only_node(claim, api.list(PODS, namespace))


def _await_start(api: Api, reader: Reader, namespace: str, wait_s: float) -> None:
    """Return once the pod runs. Raises ClientError: it ended, or `wait_s` have passed."""
    end_s = time.monotonic() + wait_s
    while True:
        pod = api.find(PODS, reader.name, namespace)
        if pod is None:
            raise PullError(f"The pod {reader.name}, which reads the checkpoints, was deleted. Try again.")
        if reader_pod.is_ready(pod):
            return
        if time.monotonic() >= end_s:
            events = api.list(EVENTS, namespace, fieldSelector=f"involvedObject.uid={pod['metadata']['uid']}")
            raise PullError(reader_pod.late(pod, events, reader, wait_s))
        time.sleep(LOOK_S)


class Pod:
    """The reading pod. `command` starts Python code in it, and `mount` is where the job's checkpoints are there."""

    def __init__(self, command: list[str], mount: str = MOUNT) -> None:
        """Take a command that ends where the code follows."""
        self._command, self._mount = command, mount

    def listed(self, path: str) -> dict[str, Any]:
        """Return what is on the volume. Raises PullError."""
        with self._run(_LIST, self._mount, path) as output:
            said = b"".join(iter(lambda: output.read(1 << 20), b""))
        try:
            found = json.loads(said)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not {"commits", "files", "bytes", "links"} <= found.keys():
            raise PullError("The pod did not list its files. Check what python3 is in the job's image.")
        return found

    def receive(
        self, path: str, into: Path, only: Mapping[str, received.Mark] | None, skipped: Sequence[str] = ()
    ) -> received.Received:
        """Copy the files below `path` into a directory. Raises PullError."""
        with self._run(_SEND, self._mount, path, *skipped) as output:
            got = received.receive(output, into, only)
            output.drain()
        return got

    @contextlib.contextmanager
    def _run(self, code: str, *arguments: str) -> Iterator[_Output]:
        """Yield the output of Python code in the pod. Raises PullError if it fails, even if the caller had enough of its output."""
        with tempfile.TemporaryFile() as errors, self._started(errors, code, *arguments) as process:
            assert process.stdout is not None
            output = _Output(process.stdout)
            try:
                yield output
            except PullError:
                # Output that ended too early has a cause, which the process knows.
                self._check(process, errors, END_S if output.has_ended else 0.0)
                raise
            self._check(process, errors, END_S)

    @contextlib.contextmanager
    def _started(self, errors: IO[bytes], code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [*self._command, code, *arguments]
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        with subprocess.Popen(command, stdin=null, stdout=pipe, stderr=errors) as process:
            try:
                yield process
            finally:
                process.terminate()

    def _check(self, process: subprocess.Popen[bytes], errors: IO[bytes], wait_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if code := process.wait(wait_s):
                errors.seek(0)
                raise PullError(_refusal(errors.read(1 << 16).decode(errors="replace"), code)) from None


def _refusal(said: str, code: int) -> str:
    """Return the sentence for an exec that failed: Python's last line if it is one, else kubectl's."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("command terminated with exit code")]
    last = lines[-1].removeprefix("error: ") if lines else f"kubectl ended with {code}"
    if last.startswith("PermissionError"):
        return f"The pod may not read a file ({last}). Give the user id that wrote it with --user."
    return f"The pod could not be read: {last.rstrip('.')}. Try again."


class _Output:
    """The output of a process, with a bound on the wait for its next bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._number = stream.fileno()
        self.has_ended = False

    def read(self, size: int) -> bytes:
        """Return some bytes, or nothing at the end. Raises PullError."""
        if not select.select([self._number], [], [], STALL_S)[0]:
            raise PullError(f"The pod sent nothing for {STALL_S:.0f} s. Look at its node, and try again.")
        found = os.read(self._number, size)
        self.has_ended = not found
        return found

    def drain(self) -> None:
        """Read the padding after a tar, so that its sender does not fail. Raises PullError if it is more than that."""
        left = 1 << 21
        while left > 0:
            found = self.read(left)
            if not found:
                return
            left -= len(found)
        raise PullError("The pod sent more than its files. Check what python3 is in the job's image.")
