"""Reads the counts in the command of a launcher, and compares them with the spec.

A launcher such as torchrun is read here before any pod exists, for its counts alone. In the pod its own parser reads the whole
command (`_regroup_agent/launch/`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regroup.protocol import launchers
from regroup.protocol.launchers import LauncherCommand, LauncherError
from regroup_operator.api.errors import SpecError
from regroup_operator.api.names import TRAINER_CONTAINER
from regroup_operator.api.spec import ElasticPolicy, JobSpec

MAX_NAMED = 8
"""Options that one sentence names."""


def trainer_of(containers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the trainer's container: the one that is named `trainer`, else the only one.

    The rules of the template refuse a pod of several containers of which none is named `trainer`.
    """
    named = next((container for container in containers if container.get("name") == TRAINER_CONTAINER), None)
    return containers[0] if named is None else named


def launcher_of(spec_raw: Mapping[str, Any]) -> LauncherCommand | None:
    """Return the launcher that the trainer's command begins with, or None. Raises SpecError for one that cannot be translated."""
    trainer = trainer_of(spec_raw["template"]["spec"]["containers"])
    command, environ = _command_of(trainer)
    try:
        return _read(command, environ)
    except LauncherError as error:
        raise SpecError(f"command of container {trainer['name']} cannot be translated. {error}") from None


def ignored_options(spec_raw: Mapping[str, Any]) -> str:
    """Return the sentence on the options of the launcher's command that change nothing, without values. Empty: there are none.

    The sentence names at most MAX_NAMED of them.
    """
    launcher = launcher_of(spec_raw)
    names = [] if launcher is None else [option.names[0] for option in launcher.ignored()]
    if launcher is None or not names:
        return ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (
        f"Regroup ignores options of {launcher.launcher} in the command: {', '.join(names[:MAX_NAMED])}{more} "
        "(the pod's log and docs/reference/launchers.md say why)."
    )


def launcher_counts(trainer: Mapping[str, Any]) -> list[str]:
    """Return a command of the same counts as the trainer's, for the decision log. Nothing else of the command is in it."""
    command, environ = _command_of(trainer)
    return launchers.shortened(command, dict(environ))


def _command_of(trainer: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the command with its arguments, and the literal variables."""
    command = (*map(str, trainer.get("command") or ()), *map(str, trainer.get("args") or ()))
    environ = {one["name"]: str(one["value"]) for one in trainer.get("env") or () if one.get("value") is not None}
    return command, tuple(sorted(environ.items()))


@functools.lru_cache(maxsize=1024)  # each plan of a job asks several times
def _read(command: tuple[str, ...], environ: tuple[tuple[str, str], ...]) -> LauncherCommand | None:
    why = launchers.hidden(command)
    if why is not None:
        raise LauncherError(why)
    return launchers.read(command, dict(environ))


def with_range(spec: JobSpec, found: LauncherCommand | None) -> JobSpec:
    """Return the spec with the elastic policy of a command such as `torchrun --nnodes 1:4`, if the spec itself has none."""
    workers = None if found is None else found.counts.workers
    if workers is None or workers[0] == workers[1] or spec.elastic_policy is not None:
        return spec
    return spec.model_copy(update={"elastic_policy": ElasticPolicy(min_replicas=workers[0], max_replicas=workers[1])})


def processes_of(found: LauncherCommand, spec: JobSpec, num_gpus: int | None) -> int | None:
    """Return the processes per worker that a command asks for, or None if it leaves the number to the spec.

    `num_gpus` is the container's limit of GPUs; None: it has none. Raises SpecError for a word that needs GPUs there.
    """
    processes, said = found.counts.processes, found.counts.processes_said
    if isinstance(processes, str):
        if spec.processes_per_worker is not None:
            return None
        if processes == "cpu" or num_gpus is None:
            why = (
                "is the number of CPUs of a node"
                if processes == "cpu"
                else "needs a limit of GPUs, and the container has none"
            )
            raise SpecError(
                f"{said} in the command {why}, so the number of processes is not known. Write a number there, or set "
                "spec.processesPerWorker."
            )
        return num_gpus
    if processes is not None or found.counts.total is None:
        return processes
    if spec.processes_per_worker is not None or spec.elastic_policy is not None:
        return None
    each, left = divmod(found.counts.total, spec.replicas)
    return each if left == 0 else None


def contradictions(found: LauncherCommand, spec: JobSpec, processes: int) -> Iterator[str]:
    """Yield a sentence for each count in the command that the spec contradicts. `processes` is the job's number per worker."""
    counts = found.counts
    if isinstance(counts.processes, int) and counts.processes != processes:
        yield (
            f"spec.processesPerWorker ({processes}) differs from {counts.processes_said} in the command, which asks for "
            f"{counts.processes}. Set spec.processesPerWorker to {counts.processes}, or leave one of the two out."
        )
    if counts.workers is not None:
        yield from _of_workers(counts.workers, counts.workers_said, spec)
    if counts.total is not None and not isinstance(counts.processes, str):
        yield from _of_total(counts.total, counts.processes_said, spec, processes)


def _of_workers(workers: tuple[int, int], said: str, spec: JobSpec) -> Iterator[str]:
    low, high = workers
    policy = spec.elastic_policy
    if policy is not None and (policy.min_replicas, policy.max_replicas) != workers:
        yield (
            f"spec.elasticPolicy ({policy.min_replicas} to {policy.max_replicas}) differs from {said} in the command. Leave {said} "
            "out, or set minReplicas and maxReplicas to its numbers."
        )
    elif not low <= spec.replicas <= high:
        wanted = str(low) if low == high else f"a number from {low} to {high}"
        yield (
            f"spec.replicas ({spec.replicas}) differs from {said} in the command. Set spec.replicas to {wanted}, or leave {said} "
            "out."
        )


def _of_total(total: int, said: str, spec: JobSpec, processes: int) -> Iterator[str]:
    policy = spec.elastic_policy
    if policy is not None and spec.processes_per_worker is None and not said.startswith(("-N", "--slots-per-host")):
        yield (
            f"{said} in the command counts the processes of all workers, and with spec.elasticPolicy the number of workers "
            "changes. Set spec.processesPerWorker."
        )
        return
    low, high = (policy.min_replicas, policy.max_replicas) if policy else (spec.replicas, spec.replicas)
    if total % processes or not low <= total // processes <= high:
        range_ = str(low * processes) if low == high else f"{low * processes} to {high * processes}"
        yield (
            f"{total} processes in the command differ from those of the job ({range_}: spec.replicas times {processes} in each "
            "worker). Correct the number, spec.replicas or spec.processesPerWorker."
        )
