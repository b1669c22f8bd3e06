"""The controller's ports for one machine: a versioned file, agents as subprocesses, a random token for each.

`regroup run` uses the same plan, the same membership endpoint and the same agent as a cluster; only these ports differ.
An agent process stands for a pod. If it is killed it has failed, and is replaced as a pod would be.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import fcntl
import hmac
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from regroup.protocol import env
from regroup_cli import local_logs
from regroup_cli.gpus import Shares
from regroup_client import local_jobs
from regroup_client.errors import JobError
from regroup_client.jobs import Verb
from regroup_client.log_lines import Worker
from regroup_operator.api import (
    ConflictError,
    Job,
    SpecError,
    StatusError,
    UnavailableError,
    check_change,
    parse_job,
    processes_per_worker,
    worker_digest,
)
from regroup_operator.api.members import MemberId
from regroup_operator.api.names import worker_pod_name
from regroup_operator.model.ports import EventNote, Forbidden, Unauthorized
from regroup_operator.model.records import Key, Pod, Settings
from regroup_operator.render.pod import size_environment, stop_environment

ADDRESS = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_AS_HERE = Shares(None)
"""Workers see the GPUs that this process sees."""


class FileStore:
    """The job as a JSON file with a resourceVersion. A change is a compare-and-swap under a lock, then a rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Return the job's object. Raises UnavailableError if the file cannot be read as one."""
        try:
            return local_jobs.read_file(self.path)
        except JobError as error:
            raise UnavailableError(str(error)) from None

    def create(self, raw: dict[str, Any]) -> None:
        """Write the first version."""
        raw["metadata"] |= {"resourceVersion": "1", "generation": 1, "uid": str(uuid.uuid4())}
        self._replace(raw)

    async def get(self, key: Key) -> Job | None:  # noqa: ARG002 (one file holds one job)
        return parse_job(self.read())

    async def write_status(
        self,
        job: Job,
        status: dict[str, Any],
        *,
        progress_only: bool = False,  # noqa: ARG002 (a reader of the file sees each change)
    ) -> Job:
        with self._locked():
            raw = self.read()
            if raw["metadata"]["resourceVersion"] != job.resource_version:
                raise ConflictError(f"{self.path} changed since it was read.")
            raw["status"] = status
            self._bump(raw)
        return parse_job(raw)

    async def confirm(self, job: Job, within_s: float) -> None:
        """Return at once: each read is a read of the file, so no job is out of date."""

    async def remove(self, job: Job) -> None:
        """Keep the file: the command that made the file ends with its job."""

    def change_spec(self, change: Callable[[dict[str, Any]], None]) -> Job:
        """Change the spec as a user would. Raises SpecError, without a change, if the new spec breaks a rule."""
        with self._locked():
            raw = self.read()
            before = parse_job(copy.deepcopy(raw))
            change(raw["spec"])
            raw["metadata"]["generation"] += 1
            job = parse_job(raw)
            check_change(before, job)
            self._bump(raw)
        return job

    def _bump(self, raw: dict[str, Any]) -> None:
        raw["metadata"]["resourceVersion"] = str(int(raw["metadata"]["resourceVersion"]) + 1)
        self._replace(raw)

    def _replace(self, raw: dict[str, Any]) -> None:
        aside = self.path.with_suffix(".tmp")
        aside.write_text(json.dumps(raw))  # with an indent Python would encode it, six times slower than C
        aside.rename(self.path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


_VERBS: dict[Verb, str] = {"scale": "Resize", "suspend": "Suspend", "resume": "Resume"}


def edit(directory: Path, verb: Verb, patch: Mapping[str, Any]) -> None:
    """Merge a patch into the spec of a local job, as the API server does. Raises SpecError if the new spec breaks a rule."""
    store = FileStore(directory / local_jobs.FILE)
    try:
        parse_job(store.read())
    except (SpecError, StatusError) as error:
        raise SpecError(f"{store.path} has been changed, and is no job any more: {error}") from None
    try:
        store.change_spec(lambda spec: merge(spec, patch))
    except UnavailableError as error:  # the job has ended meanwhile
        raise SpecError(f"{error} Start the job again.") from None
    except OSError as error:
        raise SpecError(
            f"DIR ({directory}) cannot be written to ({error.strerror}). {_VERBS[verb]} the job as the user who started it."
        ) from None


def merge(spec: dict[str, Any], patch: Mapping[str, Any]) -> None:
    """Merge a patch into a spec in place, as the API server does."""
    for name, value in patch.items():
        if isinstance(value, Mapping):
            merge(spec.setdefault(name, {}), value)
        else:
            spec[name] = value


@dataclass
class _Agent:
    pod: Pod
    token: str
    process: subprocess.Popen[bytes]
    log: local_logs.LogFile
    readers: list[threading.Thread]
    """They pass on what the worker writes."""
    waiter: asyncio.Task[None] | None = field(default=None)


class LocalWorkers:
    """Implements Workers and Authenticator. Agents are subprocesses of this process, and die with it."""

    def __init__(
        self,
        directory: Path,
        agent: Path,
        command: list[str],
        environment: Mapping[str, str],
        *,
        checkpoint_wait_s: float = Settings.checkpoint_s,
        gpus: Shares = _AS_HERE,
        write: Callable[[int, Worker, bytes], None] = lambda fd, _, data: local_logs.write_all(fd, data),
    ) -> None:
        """Prepare to start agents.

        `agent` is the zipapp, `command` the trainer's command, `environment` the environment of both, `gpus` the GPUs
        of each slot. `write` gets what workers write to stdout (1) and stderr (2); threads call it.
        """
        self._gpus, self._write = gpus, write
        self._checkpoint_wait_s = checkpoint_wait_s
        self._directory, self._agent, self._command = directory, agent, command
        self._environment = dict(environment)
        self._agents: dict[str, _Agent] = {}
        self._waiters: set[asyncio.Task[None]] = set()
        """Each waits for the end of an agent, and then until its output is passed on."""
        self._on_change: list[Callable[[Key], None]] = []
        self.url = ""
        self.ca_pem = b""

    def on_change(self, callback: Callable[[Key], None]) -> None:
        self._on_change.append(callback)

    def list(self, key: Key, job_uid: str) -> tuple[Pod, ...]:
        pods = (a.pod for a in self._agents.values())
        return tuple(sorted((p for p in pods if p.job_uid == job_uid and p.job == key[1]), key=lambda p: p.id))

    def roles(self, key: Key, job_uid: str) -> tuple[Pod, ...]:  # noqa: ARG002
        """Return no pods: a local job has no roles."""
        return ()

    async def create_role(self, job: Job, role: str, index: int, attempt: int) -> bool:  # noqa: ARG002
        raise SpecError("spec.roles needs a cluster. Start these processes yourself.")

    def pod(self, namespace: str, name: str) -> Pod | None:
        return next((a.pod for a in self._agents.values() if (a.pod.namespace, a.pod.name) == (namespace, name)), None)

    async def prepare(self, job: Job) -> None:
        """Do nothing: one machine needs no Service or ConfigMap."""

    async def validate(self, job: Job) -> None:
        """Do nothing: the command line has been parsed, and there is no template to try."""

    async def create(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> bool:  # noqa: ARG002
        """Start an agent as a local process. This machine is the only node, so `avoid_nodes` is ignored."""
        name = worker_pod_name(job.name, slot, attempt)
        if self.pod(job.namespace, name) is not None:
            return False
        uid, token = str(uuid.uuid4()), secrets.token_urlsafe(32)
        home = self._directory / name
        (home / "state").mkdir(parents=True, exist_ok=True)
        (home / "ca.crt").write_bytes(self.ca_pem)
        (home / "token").touch(mode=0o600)
        (home / "token").write_text(token)
        (stdout, to_stdout), (stderr, to_stderr) = os.pipe(), os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", str(self._agent), "--", *self._command],
            env={
                **self._environment,
                **self._gpus.environment(slot),
                **self._agent_environment(job, name, uid, home, MemberId(slot, attempt)),
            },
            stdin=subprocess.DEVNULL,
            stdout=to_stdout,
            stderr=to_stderr,
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
            preexec_fn=_die_with_parent,
        )
        os.close(to_stdout)
        os.close(to_stderr)
        log = local_logs.LogFile(home)
        worker = Worker(slot, attempt)
        readers = [
            local_logs.keep(pipe, partial(self._write, fd, worker), log) for fd, pipe in ((1, stdout), (2, stderr))
        ]
        pod = Pod(
            namespace=job.namespace,
            name=name,
            uid=uid,
            job=job.name,
            job_uid=job.uid,
            slot=slot,
            attempt=attempt,
            phase="Running",
            ip=ADDRESS,
            node="localhost",
            running_since_s=time.monotonic(),
            spec_digest=worker_digest(job),
        )
        agent = self._agents[uid] = _Agent(pod, token, process, log, readers)
        agent.waiter = asyncio.get_running_loop().create_task(self._wait(agent))
        self._waiters.add(agent.waiter)
        agent.waiter.add_done_callback(self._waiters.discard)
        self._changed(job.key)
        return True

    def _agent_environment(self, job: Job, name: str, uid: str, home: Path, worker: MemberId) -> dict[str, str]:
        spec, processes = job.spec, processes_per_worker(job)
        out = {
            env.OPERATOR_URL: self.url,
            env.NAMESPACE: job.namespace,
            env.POD_NAME: name,
            env.POD_UID: uid,
            env.POD_IP: ADDRESS,
            env.JOB_NAME: job.name,
            env.JOB_UID: job.uid,
            env.PROCESSES: str(processes),
            env.FRAMEWORK: spec.framework,
            env.MAX_WORLD_SIZE: str(job.max_replicas * processes),
            env.CA_FILE: str(home / "ca.crt"),
            env.TOKEN_FILE: str(home / "token"),
            env.STATE_DIR: str(home / "state"),
            env.LOG_NAME: f"worker {worker}",
            env.ENDS_ON_SIGINT: "1",
            env.MAX_RESTARTS: str(spec.recovery.max_restarts),
            **stop_environment(job),
            **size_environment(job),
        }
        if spec.workers_per_group > 1:
            out |= {
                env.WORKERS_PER_GROUP: str(spec.workers_per_group),
                env.GROUP_POSITION: str(job.position(worker.slot)),
            }
        if spec.checkpoint is not None:
            out |= {
                env.CHECKPOINT_DIR: spec.checkpoint.directory,
                env.CHECKPOINT_EVERY_SECONDS: str(spec.checkpoint.every_seconds),
                env.CHECKPOINT_WAIT_SECONDS: f"{self._checkpoint_wait_s:g}",
            }
            if spec.checkpoint.resume_path is not None:
                out[env.RESUME_FROM] = spec.checkpoint.resume_path
        if job.progress_log is not None:
            out[env.PROGRESS_LOG] = job.progress_log
        if spec.memory_snapshot is not None:
            (home / "snapshot").mkdir(exist_ok=True)
            out |= {
                env.SNAPSHOT_DIR: str(home / "snapshot"),
                env.SNAPSHOT_BYTES: str(spec.memory_snapshot.size_bytes),
                env.SNAPSHOT_EVERY_SECONDS: str(spec.memory_snapshot.every_seconds),
            }
        return out

    async def _wait(self, agent: _Agent) -> None:
        code = await _exit_code(agent.process)
        agent.pod = replace(agent.pod, phase="Succeeded" if code == 0 else "Failed", last_exit_code=code)
        if agent.pod.terminating:
            self._agents.pop(agent.pod.uid, None)
        self._changed((agent.pod.namespace, agent.pod.job))
        await local_logs.drain(agent.readers, agent.log)

    async def delete(self, pod: Pod) -> None:
        """Send SIGTERM to the worker's agent. The agent bounds its own grace."""
        agent = self._agents.get(pod.uid)
        if agent is None:
            return
        agent.pod = replace(agent.pod, terminating=True)
        if agent.process.poll() is None:
            agent.process.send_signal(signal.SIGTERM)
        else:
            self._agents.pop(pod.uid, None)
        self._changed((pod.namespace, pod.job))

    async def authenticate(self, token: str, namespace: str, pod_name: str) -> Pod:
        """Return the worker of a token. The token opens only the paths of its own worker."""
        for agent in self._agents.values():
            if hmac.compare_digest(agent.token.encode(), token.encode()):
                if (agent.pod.namespace, agent.pod.name) != (namespace, pod_name):
                    raise Unauthorized(f"The token is bound to pod {agent.pod.name}, not to {pod_name}.")
                return agent.pod
        raise Unauthorized("The token belongs to no worker of this job.")

    def known(self, pod: Pod) -> Pod:
        agent = self._agents.get(pod.uid)
        if agent is None:
            raise Forbidden(f"Worker {pod.name} has ended.")
        return agent.pod

    async def stop(self, grace_s: float = 25.0) -> None:
        """End every agent, and with it its trainers: SIGINT, then SIGKILL.

        An agent ends its trainers as soon as they write no file any more (_regroup_agent/planned_end.py). SIGTERM would not end a
        worker that holds the job's state: it would wait for the operator to come back.
        """
        for sign, wait_s in ((signal.SIGINT, grace_s), (signal.SIGKILL, 5.0)):
            running = [a for a in self._agents.values() if a.process.poll() is None]
            for agent in running:
                agent.process.send_signal(sign)
            waiters = [a.waiter for a in running if a.waiter is not None]
            if waiters:
                await asyncio.wait(waiters, timeout=wait_s)
        if self._waiters:
            await asyncio.wait(self._waiters, timeout=local_logs.DRAIN_S)

    def _changed(self, key: Key) -> None:
        for callback in self._on_change:
            callback(key)


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process in a thread of its own.

    The loop's pool has as many threads as the machine has processors, and four: the ends of further workers would be seen late.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def tell(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name="regroup-worker-end", daemon=True).start()
    return await ended


class Terminal:
    """Recorder that writes events to a terminal, one line each."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def record(self, job: Job, note: EventNote) -> None:  # noqa: ARG002
        self._say(f"{note.kind} {note.reason}: {note.note}")


def say(text: str, out: TextIO | None = None) -> None:
    """Write a line to a terminal, stderr by default, in one piece.

    Workers write to the same terminal, and `print` writes the end of a line apart if PYTHONUNBUFFERED is set.
    """
    out = out or sys.stderr
    out.write(f"regroup: {text}\n")
    out.flush()


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
