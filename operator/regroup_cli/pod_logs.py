"""The logs of a job's pods, read by the user's own kubectl: one `kubectl logs` for each container."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from regroup_client import views
from regroup_client.log_lines import Worker
from regroup_client.log_streams import Log, LogsError, Opened

_NAME = re.compile(r"-worker-(\d+)-(\d+)$")
_TRAINER = "regroup.dev/trainer-container"


@dataclass(frozen=True)
class Wanted:
    """The containers whose logs are read."""

    slot: int | None = None
    rank: int | None = None
    all_attempts: bool = False
    previous: bool = False


def logs_of(job: views.Object, pods: Sequence[views.Object], wanted: Wanted) -> list[Log]:
    """Return the logs to read: of the newest pod of each slot, or of every pod. Raises LogsError for a rank that there is not.

    The key of a log names pod and container, so that `PodLogs` can open it."""
    ranks = views.ranks(job)
    slot = wanted.slot
    if wanted.rank is not None:
        slot = next((member.slot for member, of_it in ranks.items() if wanted.rank in of_it), None)
        if slot is None:
            raise LogsError(missing_rank(wanted.rank, job, sum(map(len, ranks.values()))))
    found: dict[Worker, views.Object] = {}
    for pod in pods:
        name = _NAME.search(pod["metadata"]["name"])
        if name is not None and slot in (None, int(name[1])):
            found[Worker(int(name[1]), int(name[2]))] = pod
    newest: dict[int, Worker] = {}
    for worker in sorted(found, key=lambda one: (one.slot, one.attempt)):
        newest[worker.slot] = worker
    chosen = sorted(found, key=lambda one: (one.slot, one.attempt)) if wanted.all_attempts else list(newest.values())
    out: list[Log] = []
    for worker in chosen:
        of_it = ranks.get(views.Member(worker.slot, worker.attempt), ())
        out += _of_pod(found[worker], worker, of_it[0] if len(of_it) == 1 else None, wanted)
    return out


def _of_pod(pod: views.Object, worker: Worker, rank: int | None, wanted: Wanted) -> Iterator[Log]:
    metadata, status = pod["metadata"], pod.get("status") or {}
    names = [one["name"] for one in (pod.get("spec") or {}).get("containers") or ()]
    trainer = (metadata.get("annotations") or {}).get(_TRAINER) or ("trainer" if "trainer" in names else "")
    container = trainer or (names[0] if names else "")
    of_trainer: views.Object = next(
        (one for one in status.get("containerStatuses") or () if one["name"] == container), {}
    )
    restarts = of_trainer.get("restartCount", 0)
    key = f"{metadata['name']}/{container}/{metadata.get('uid', '')}"
    if (wanted.previous or wanted.all_attempts) and (restarts or wanted.previous):
        yield Log(f"{key}/{restarts - 1}", worker, rank, previous=True, is_open=False)
    if not wanted.previous:
        ended = status.get("phase") in ("Succeeded", "Failed") or "terminated" in (of_trainer.get("state") or {})
        yield Log(f"{key}/{restarts}", worker, rank, is_open=not ended)


def missing_rank(rank: int, job: views.Object, num_ranks: int) -> str:
    """Return the sentence for a rank that there is not."""
    if not num_ranks:
        return f"The job {job['metadata']['name']} has no ranks yet: its first generation has not formed. Use --slot N."
    return f"Rank {rank} is not in the newest generation, whose ranks are 0 to {num_ranks - 1}. Give one of them, or use --slot N."


class PodLogs:
    """Implements Reader with kubectl. `look` returns the job and its pods, and raises LogsError; `command` makes a command."""

    def __init__(
        self,
        look: Callable[[], tuple[Any, list[Any]]],
        command: Callable[..., list[str]],
        wanted: Wanted,
        since_s: int | None = None,
    ) -> None:
        self._look, self._command, self._wanted, self._since_s = look, command, wanted, since_s

    def logs(self) -> tuple[list[Log], bool]:
        job, pods = self._look()
        return logs_of(job, pods, self._wanted), views.state(job) in views.ENDED

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Opened:
        pod, container, *_ = log.key.split("/")
        options = [f"--container={container}"] if container else []
        options += ["--follow"] if follow and not log.previous else []
        options += ["--previous"] if log.previous else []
        if after_ns > 1:
            options.append(
                f"--since-time={datetime.fromtimestamp(after_ns // 10**9, UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}"
            )
        else:
            options += [f"--tail={tail}"] if tail is not None else []
            options += [f"--since={self._since_s}s"] if self._since_s else []
        return _KubectlLogs(self._command("logs", pod, "--timestamps", *options))


@dataclass
class _KubectlLogs:
    """One running `kubectl logs`."""

    command: list[str]
    _process: subprocess.Popen[bytes] | None = None
    _errors: Any = field(default=None)
    _is_closed: bool = False

    def start(self) -> None:
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        except OSError as error:
            raise LogsError(
                f"A temporary file cannot be made ({error.strerror}). Set TMPDIR, or use --slot N."
            ) from None
        try:
            self._process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self._errors)
        except OSError as error:
            self._errors.close()
            raise LogsError(f"kubectl cannot be started ({error.strerror}). Install it, or correct the PATH.") from None
        if self._is_closed:
            self._process.terminate()

    def chunks(self) -> Iterator[bytes]:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            while data := os.read(process.stdout.fileno(), 1 << 16):
                yield data
        finally:
            process.terminate()
            process.stdout.close()
            code = process.wait()
            self._errors.seek(0)
            said = self._errors.read(4096).decode("utf-8", "replace").strip()
            self._errors.close()
        if code not in (0, -15):
            raise LogsError(said.removeprefix("error: ").splitlines()[0] if said else f"kubectl ended with {code}.")

    def close(self) -> None:
        self._is_closed = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
