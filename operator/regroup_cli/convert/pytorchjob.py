"""The rules for a PyTorchJob of kubeflow.org/v1."""

from __future__ import annotations

from regroup.protocol import launchers
from regroup_cli.convert.draft import Draft, take_metadata
from regroup_cli.convert.findings import Field
from regroup_cli.convert.kubeflow import (
    ALL_TIME_S,
    HPA,
    replicas_of,
    take_priority,
    take_run_policy,
    take_workers,
)
from regroup_cli.convert.launch import take_launch
from regroup_cli.convert.pod import AT_RUNTIME, num_gpus
from regroup_operator.api import SpecError


def convert(document: Field, draft: Draft) -> None:
    """Convert a PyTorchJob."""
    take_metadata(document, draft)
    spec = document.at("spec")
    types = replicas_of(spec.at("pytorchReplicaSpecs"), ("Master", "Worker"))
    if not types:
        raise SpecError("spec.pytorchReplicaSpecs has neither a Master nor a Worker. Add one.")
    take_workers(list(types.values()), draft, ("pytorch",), default="OnFailure")
    take_run_policy(spec.at("runPolicy"), draft)
    take_priority(spec.at("runPolicy"), draft)
    _take_elastic(spec.at("elasticPolicy"), draft, spec)
    command = next(iter(types.values())).source.at("template", "spec", "containers")
    if spec.at("elasticPolicy", "nProcPerNode"):
        spec.at("nprocPerNode").unneeded("spec.elasticPolicy.nProcPerNode counts more.")
    else:
        _take_processes(spec.at("nprocPerNode"), draft)
    take_launch(draft, command)


def _take_elastic(policy: Field, draft: Draft, spec: Field) -> None:
    if not policy:
        return
    low, high = policy.at("minReplicas"), policy.at("maxReplicas")
    workers = spec.at("pytorchReplicaSpecs", "Worker", "replicas").count(1)
    least = low.count(high.count(workers))
    most = high.count(low.count(workers))
    draft.put("elasticPolicy", {"minReplicas": least, "maxReplicas": most})
    for one, name in ((low, "minReplicas"), (high, "maxReplicas")):
        one.mapped(f"spec.elasticPolicy.{name}")
    if not low or not high:
        policy.note(f"The range is {least} to {most}, as Kubeflow completes it.")
    for name in ("rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone"):
        policy.at(name).unneeded(AT_RUNTIME)
    policy.at("metrics").dropped(HPA)
    if policy.at("nProcPerNode"):
        draft.put("processesPerWorker", policy.at("nProcPerNode").count(1))
        policy.at("nProcPerNode").mapped("spec.processesPerWorker")
    if policy.at("maxRestarts"):
        number = policy.at("maxRestarts").count(0)
        policy.at("maxRestarts").changed(
            f"It is spec.recovery.maxRestarts ({number}) in a window of a year. torchrun counts in each pod, Regroup in the job."
        )
        draft.put("recovery.maxRestarts", number)
        draft.put("recovery.windowSeconds", ALL_TIME_S)


def _take_processes(processes: Field, draft: Draft) -> None:
    """Convert nprocPerNode, which torchrun gets as PET_NPROC_PER_NODE. Its own option in the command counts more."""
    container = draft.trainer
    command = [*map(str, container.get("command") or ()), *map(str, container.get("args") or ())]
    text = processes.text() or "auto"
    has_launcher = launchers.recognise(command) is not None or launchers.hidden(command) is not None
    if text.isdecimal() and has_launcher and not _says_processes(command):
        processes.mapped("spec.processesPerWorker")
        draft.put("processesPerWorker", int(text))
    elif text.isdecimal() and not has_launcher and int(text) > 1:
        processes.changed(
            f"The command is no launcher, so that one process in each pod had a WORLD_SIZE for {text}. Regroup counts one process."
        )
    elif text == "auto" and has_launcher and num_gpus(container) is None:
        processes.note(
            "Without GPUs auto means as many processes as the node has CPUs. Regroup starts one process in each worker, unless "
            "spec.processesPerWorker says another number."
        )
        processes.mapped("the default of spec.processesPerWorker")
    else:
        processes.unneeded("The command, or the container's limit of GPUs, says the number of processes.")


def _says_processes(command: list[str]) -> bool:
    """Return whether the launcher's own options say the number of processes."""
    return any(word.replace("_", "-").partition("=")[0] == "--nproc-per-node" for word in command)
