"""`regroup run`: a training job over local processes, under the same plan and the same membership endpoint as a cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _regroup_agent.build import build as build_agent
from _regroup_agent.launch.command import python_command, uses_library
from _regroup_agent.launch.program import guess
from regroup import torch_versions
from regroup.protocol import launchers
from regroup_cli import gpus, live_run
from regroup_cli.local import ADDRESS, FileStore, LocalWorkers, Terminal, edit, say
from regroup_client import local_jobs
from regroup_client.submission import check_sizes
from regroup_operator.api import SpecError, UnavailableError, parse_job
from regroup_operator.background import LoopBackground
from regroup_operator.controller import Controller, Options, Ports, Turns
from regroup_operator.endpoint.certificates import Authority, server_context
from regroup_operator.endpoint.registry import Registry
from regroup_operator.endpoint.server import serve
from regroup_operator.model.records import Key, Settings
from regroup_operator.queue import WorkQueue

if TYPE_CHECKING:
    from regroup.train.config import Config
    from regroup_cli.page.server import Serving

NAMESPACE = "local"
POLL_S = 0.1
"""Time between two looks at the job's file, which `regroup scale` changes, and between two updates of the terminal's line."""
PROGRESS_S = 1.0
"""Time between two writes of progress. It is short, because the store is a local file that nobody else writes."""
_CONFIGURATIONS = (".yaml", ".yml")
"""Suffixes of configurations of `regroup.train`."""


def job_object(args: argparse.Namespace) -> dict[str, Any]:
    """Return the DistributedTrainingJob that the arguments describe. Raises SpecError and SubmitError."""
    fill_counts(args, os.environ)
    check_sizes(args.workers, args.min, args.max)
    trainer: dict[str, Any] = {"name": "trainer", "image": "local", "command": trainer_command(args)}
    spec: dict[str, Any] = {
        "replicas": args.workers,
        "processesPerWorker": args.processes_per_worker,
        "workersPerGroup": args.workers_per_group,
        "framework": args.framework,
        "recovery": {
            "maxRestarts": args.max_restarts,
            "disconnectSeconds": args.disconnect_seconds,
            "rejoinSeconds": args.rejoin_seconds,
            "hangSeconds": args.hang_seconds,
            "gracefulStop": {"signal": args.stop_signal, "seconds": args.stop_seconds},
        },
        "template": {"spec": {"containers": [trainer]}},
    }
    if any(given is not None for given in (args.min, args.max, args.sizes, args.grow_at)):
        least = args.workers_per_group if args.sizes is None else min(args.sizes)
        low = least if args.min is None else args.min
        high = max(args.workers, low, *(args.sizes or ())) if args.max is None else args.max
        spec["elasticPolicy"] = {"minReplicas": low, "maxReplicas": high}
        if args.sizes is not None:
            spec["elasticPolicy"]["sizes"] = args.sizes
        if args.grow_at is not None:
            spec["elasticPolicy"]["growAt"] = args.grow_at.capitalize()
    begun = None if args.resume is None else checkpoint_to_resume(Path(_absolute(args.resume, "--resume")))
    directory = _directory(args, begun)
    if directory is not None:
        trainer["volumeMounts"] = [{"name": "checkpoint", "mountPath": directory}]
        spec["checkpoint"] = {"path": directory, "everySeconds": args.checkpoint_every, "keep": args.checkpoint_keep}
    if begun is not None:
        trainer["volumeMounts"] += [{"name": "resume", "mountPath": str(begun.parent)}]
        spec["checkpoint"]["resumeFrom"] = str(begun)
    if args.memory_snapshot is not None:
        spec["memorySnapshot"] = {"sizeLimit": args.memory_snapshot, "everySeconds": args.memory_snapshot_every}
    if args.progress_log is not None:
        spec["progress"] = {"log": args.progress_log}
    return {"metadata": {"name": args.name, "namespace": NAMESPACE}, "spec": spec}


def fill_counts(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Set --workers and --processes-per-worker where they are absent: to what a launcher in the command says, else to 1 or to the
    smallest of --sizes.

    Raises SpecError for a launcher's command that cannot be translated.
    """
    if args.workers is not None and args.processes_per_worker is not None:
        return
    try:
        found = launchers.read([*(["python", "-m"] if args.module else []), args.script, *args.args], environment)
    except launchers.LauncherError as error:
        raise SpecError(str(error)) from None
    counts = launchers.Counts() if found is None else found.counts
    if args.workers is None:
        args.workers = counts.workers[1] if counts.workers else min(args.sizes or [1])
    if args.processes_per_worker is None:
        args.processes_per_worker = _processes(counts, args.workers)


def _processes(counts: launchers.Counts, workers: int) -> int:
    if isinstance(counts.processes, str):
        each = len(gpus.find()) // workers if counts.processes in ("gpu", "auto") else 0
        if each == 0:
            raise SpecError(
                f"{counts.processes_said} in the command says no number on this machine. Write a number there, or give "
                "--processes-per-worker."
            )
        return each
    if counts.processes is None and counts.total is not None:
        return max(1, counts.total // workers)
    return counts.processes or 1


def _directory(args: argparse.Namespace, begun: Path | None) -> str | None:
    """Return the directory for checkpoints, or None if none are written.

    It is --checkpoint, else the directory of the checkpoint that the job begins with.
    """
    if args.checkpoint is not None:
        return _absolute(args.checkpoint, "--checkpoint")
    return None if begun is None else str(begun.parent)


def checkpoint_to_resume(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, else the newest checkpoint in it. Raises SpecError if there is none.

    Several runs may have written there, and each counts its generations from 1. So the run that completed a checkpoint
    last is chosen by time. The newest of that run's checkpoints by (generation, step) is returned, as the run itself would choose.
    """
    from regroup.checkpoint import selection, store

    of_itself = selection.parse_name(directory.name)
    try:
        if of_itself is not None and (directory / store.COMMIT).is_file():
            return directory
        complete = store.names(directory)[0]
        when_s = {name: (directory / name.directory / store.COMMIT).stat().st_mtime for name in complete}
    except OSError as error:
        raise SpecError(
            f"--resume ({directory}) cannot be read ({error.strerror}). Check its owner and its mount."
        ) from None
    if not complete:
        raise SpecError(
            f"--resume ({directory}) holds no complete checkpoint. Give the directory of an earlier run's --checkpoint, or leave "
            "--resume out to begin at step 0."
        )
    job_uid = store.job_of(directory, max(complete, key=lambda name: when_s[name]))
    newest = max(name for name in complete if store.job_of(directory, name) == job_uid)
    return directory / newest.directory


def _absolute(directory: str, option: str) -> str:
    try:
        return str(Path(directory).absolute())
    except OSError as error:
        raise SpecError(
            f"{option} ({directory}) is relative, and the current directory cannot be found ({error.strerror}). Give a "
            "path that begins with /."
        ) from None


def _most_workers(args: argparse.Namespace) -> int:
    """Return the largest number of workers that the job may have."""
    return int(max(args.workers, args.min or 1, args.max or 1, *(args.sizes or ())))


def _most_processes(args: argparse.Namespace) -> int:
    """Return the largest number of processes that the job may have at once."""
    return _most_workers(args) * int(args.processes_per_worker)


def trainer_command(args: argparse.Namespace) -> list[str]:
    """Return the command of one trainer process."""
    if args.module:
        return [sys.executable, "-m", args.script, *args.args]
    if Path(args.script).suffix == ".py":
        if not _is_file(args.script):
            raise SpecError(f"SCRIPT ({args.script}) is not a file. Give the path of a Python script, or -m MODULE.")
        return [sys.executable, "-u", args.script, *args.args]
    if Path(args.script).suffix in _CONFIGURATIONS:
        _check_configuration([args.script, *args.args], _most_processes(args))
        return [sys.executable, "-m", "regroup.train", args.script, *args.args]
    command = [args.script, *args.args]
    found = shutil.which(args.script) or shutil.which(args.script, path=str(Path(sys.executable).parent))
    if found is None and launchers.recognise(command) is None:  # Regroup needs no mpirun to translate one
        raise SpecError(
            f"SCRIPT ({args.script}) is neither a file that ends in .py or .yaml nor a command that can be started. Give one of "
            "them, or -m MODULE."
        )
    _check_program(command)
    return [args.script if found is None or shutil.which(args.script) else found, *args.args]


def _check_program(command: list[str]) -> None:
    """Raise SpecError if the Python script is missing that a command runs, by a launcher or itself. No later try would find it."""
    try:
        found = launchers.read(command, os.environ)
    except launchers.LauncherError as error:
        raise SpecError(str(error)) from None
    python = python_command(command if found is None else guess(found, sys.executable))
    if python is not None and python.script is not None and not _is_file(str(python.script)):
        raise SpecError(
            f"The script in the command ({python.script}) is not a file. Give the path of a Python script, or -m MODULE."
        )


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # too long a name
        return False


def _shares(args: argparse.Namespace) -> gpus.Shares:
    """Return the GPUs of each slot. Raises SpecError if there are too few."""
    choice = args.gpus
    if not args.module and Path(args.script).suffix in _CONFIGURATIONS:
        device = _configuration([args.script, *args.args]).device
        if (choice, device) == ("none", "cuda"):
            raise SpecError("device ('cuda') needs a GPU, and --gpus none hides them all. Leave one of the two out.")
        choice = "none" if device == "cpu" else choice
    return gpus.share(
        workers=args.workers,
        most_workers=_most_workers(args),
        processes=args.processes_per_worker,
        choice=choice,
        found=gpus.find() if choice == "auto" else (),
        environment=os.environ,
    )


def _configuration(arguments: list[str]) -> Config:
    """Return the configuration that the script's arguments name. Raises SpecError."""
    from regroup.train import command
    from regroup.train.config import ConfigError, load

    parser = argparse.ArgumentParser(prog="regroup run CONFIG", allow_abbrev=False)
    command.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    if parsed.prints:
        raise SpecError("--print prints a configuration and trains nothing. Use it with `regroup train`.")
    try:
        return load(parsed.config, parsed.changes)
    except ConfigError as error:
        raise SpecError(str(error)) from None


def _check_configuration(arguments: list[str], most_processes: int) -> None:
    """Raise SpecError for a configuration that `regroup.train` would refuse. Here the sentence comes once, not from each worker."""
    config = _configuration(arguments)
    group_size = math.prod(config.mesh.sizes.values()) if config.mesh is not None else 1
    most_processes -= most_processes % group_size  # a process without a whole model group trains nothing
    if config.most_processes is not None and config.most_processes < most_processes:
        together = config.most_processes // config.num_microbatches
        each = "" if together == 1 else f", each for {together} processes together,"
        raise SpecError(
            f"global_batch / microbatch ({config.global_batch} / {config.microbatch} = {config.num_microbatches}){each} is less "
            f"than the largest number of processes ({most_processes}). Raise global_batch, or lower microbatch, --workers or --max."
        )


def check_torch(command: Sequence[str], version: str) -> None:
    """Raise SpecError for a version of torch that the library would refuse in each worker; "" means that there is no torch.

    A script that does not use the library may have any torch.
    """
    refuses = torch_versions.judge(version).refuses
    if refuses and uses_library(python_command(command)):
        raise SpecError(refuses)


def torch_version(command: Sequence[str]) -> str:
    """Return the version of torch that is installed beside this command, or "" if there is none.

    If another interpreter runs the script, it has a torch of its own, and the result is "". The library judges that
    torch in each worker.
    """
    if command[0] != sys.executable:
        return ""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


async def run(args: argparse.Namespace) -> int:
    """Run the job to its end and return the exit code: 0 if it succeeded, and 130 if it was interrupted.

    For a failed job it is the exit code of the script's process that failed it, else 1.
    """
    if args.port and not args.ui:
        raise SpecError(f"--port ({args.port}) is the port of the page. Give --ui, too, or leave --port out.")
    raw = job_object(args)
    parse_job(raw)
    command = trainer_command(args)
    check_torch(command, torch_version(command))
    shares = _shares(args)
    directory = Path(args.state_dir or _temporary())
    store = FileStore(directory / local_jobs.FILE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if store.path.exists():
            raise SpecError(f"--state-dir ({directory}) holds a job already. Give an empty directory.")
        store.create(raw)
    except OSError as error:
        raise SpecError(
            f"--state-dir ({directory}) cannot be written to ({error.strerror}). Give a directory that you can write to."
        ) from None
    try:
        with local_jobs.held(directory):
            code = await _run(store, directory, command, shares, args)
        if code != 0:
            _say_way_on(raw)
        return code
    finally:
        if not args.state_dir:
            shutil.rmtree(directory, ignore_errors=True)


def _say_way_on(raw: dict[str, Any]) -> None:
    """Print the command that continues a run that was interrupted or has failed. A run that saved nothing has none."""
    saved = raw["spec"].get("checkpoint")
    if saved is None:
        return
    from regroup.checkpoint import (
        store,
    )  # imports torch, which takes seconds: only a user who interrupts a run waits for it

    directory = Path(saved["path"])
    with contextlib.suppress(OSError):
        own = [n for n in store.names(directory)[0] if store.job_of(directory, n) == raw["metadata"]["uid"]]
        begun = [directory / max(own).directory] if own else [Path(path) for path in [saved.get("resumeFrom")] if path]
        for one in begun:
            say(f"the same command with --resume {one} continues there; without --resume it begins at step 0.")


def _temporary() -> str:
    try:
        return tempfile.mkdtemp(prefix="regroup-")
    except OSError as error:
        raise SpecError(
            f"A temporary directory cannot be made ({error.strerror}). Set TMPDIR to a directory that you can write to, or give "
            "--state-dir."
        ) from None


async def _run(
    store: FileStore, directory: Path, command: list[str], shares: gpus.Shares, args: argparse.Namespace
) -> int:
    key: Key = (NAMESPACE, args.name)
    loop = asyncio.get_running_loop()
    agent = directory / "agent.pyz"
    build_agent(agent)
    shown = live_run.terminal(say, plain=args.plain)
    page: Serving | None = None
    if args.ui:  # before there are workers: a port that cannot be used ends the command
        try:
            page = await _page(directory, args, shown)
        except BaseException:
            shown.close()
            store.path.unlink(missing_ok=True)  # nothing has begun: the same command works with another port
            raise
    workers = LocalWorkers(
        directory, agent, command, os.environ, checkpoint_wait_s=args.checkpoint_wait, gpus=shares, write=shown.write
    )
    controllers: list[Controller] = []

    async def reconcile(which: Key) -> float | None:
        return await controllers[0].reconcile(which)

    queue = WorkQueue(
        reconcile, num_workers=1, clock=loop.time, put_off=lambda which: controllers[0].progress_overdue_s(which)
    )
    registry = Registry(loop.time, queue.add, queue.add_after, progress_plan_s=PROGRESS_S)
    authority = Authority.create()
    certificate, private_key = authority.issue(["localhost"], [ADDRESS])
    runner, port = await serve(
        registry,
        workers,
        server_context(certificate, private_key),
        host=ADDRESS,
        port=0,
        leader=lambda: None,
    )
    workers.url, workers.ca_pem = f"https://{ADDRESS}:{port}", authority.ca_pem
    settings = Settings(
        first_wait_s=args.first_wait,
        join_quiet_s=args.join_quiet,
        first_step_s=args.first_step_seconds,
        checkpoint_s=args.checkpoint_wait,
        progress_write_s=PROGRESS_S,
    )
    background = LoopBackground()
    controllers.append(
        Controller(
            Ports(
                store=store,
                workers=workers,
                recorder=Terminal(shown.say),
                registry=registry,
                background=background,
            ),
            Options(
                settings=settings,
                endpoint=f"{ADDRESS}:{port}",
                logs="Its log is above, in the output of this command.",
            ),
            Turns(queue.add_after, queue.expect, queue.rest),
            monotonic=loop.time,
        )
    )
    workers.on_change(queue.add)
    queue.add(key)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    shown.say(f"job in {store.path}; resize it with: regroup scale {directory} N")
    working = loop.create_task(queue.run())
    try:
        return await _watch(store, key, queue, stop, working, shown)
    finally:
        working.cancel()  # first: what ends now is no failure to react to
        with contextlib.suppress(asyncio.CancelledError):
            await working
        await background.stop()
        await runner.cleanup()  # an agent that has an operator asks it before it ends
        await workers.stop()
        shown.close()
        if page is not None:
            await page.close()


async def _page(directory: Path, args: argparse.Namespace, shown: live_run.Terminal) -> Serving:
    """Serve the page of this machine's jobs, and say the address of this one. Raises JobError."""
    from regroup_cli.page import command, server
    from regroup_cli.page.sources import Local

    source = Local(local_jobs.LocalJobs(edit))
    serving = await command.start(source, args.port, shown.say)
    key = source.key(local_jobs.view(directory.resolve(), local_jobs.open_job(directory)))
    shown.say(f"page: {serving.page.address(server.path_of(key))}")
    return serving


async def _watch(
    store: FileStore,
    key: Key,
    queue: WorkQueue,
    stop: asyncio.Event,
    working: asyncio.Task[None],
    shown: live_run.Terminal,
) -> int:
    """Follow the job's file until the job ends. Changes that others make are passed to the queue."""
    generation = -1
    while not stop.is_set():
        if working.done():
            working.result()
        try:
            job = await store.get(key)
            shown.show(store.read())
        except UnavailableError as error:
            raise SpecError(
                f"{error} Leave the directory as it is while its job runs, and start the job again."
            ) from None
        assert job is not None
        if job.spec_generation != generation:
            generation = job.spec_generation
            queue.add(key)
        if job.status.phase in ("Succeeded", "Failed"):
            await _until_stopped(store, key)
            return 0 if job.status.phase == "Succeeded" else job.status.exit_code or 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), POLL_S)
    shown.say("interrupted; stopping the workers.")
    return 130


async def _until_stopped(store: FileStore, key: Key, grace_s: float = 30.0) -> None:
    """Wait until the agents, which were told to stop, have ended. So the script's last lines come before the command ends."""
    deadline = asyncio.get_running_loop().time() + grace_s
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(UnavailableError):
            job = await store.get(key)
            if job is None or not job.status.replicas:
                return
        await asyncio.sleep(POLL_S)
