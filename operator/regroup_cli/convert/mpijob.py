"""The rules for an MPIJob of kubeflow.org/v2beta1 and v1. Its launcher's command runs in each worker, translated by Regroup."""

from __future__ import annotations

from typing import Any

from regroup.protocol import launchers
from regroup_cli.convert.draft import Draft, take_metadata
from regroup_cli.convert.findings import Field
from regroup_cli.convert.kubeflow import Replicas, replicas_of, take_priority, take_restart_policies, take_run_policy
from regroup_cli.convert.launch import take_launch
from regroup_cli.convert.pod import check_pod, take_env, take_pod
from regroup_operator.api import SpecError

_NO_LAUNCHER = "There is no pod of a launcher: Regroup starts the program in each worker, without ssh."
_NO_MPI = (
    "The program finds its peers by the variables of torchrun and Open MPI. MPI itself does not start, so mpi4py forms no group. A "
    "program of Horovod for PyTorch needs spec.framework Horovod (--framework Horovod)."
)
_FRAMEWORKS = {"horovodrun": "Horovod", "deepspeed": "DeepSpeed"}


def convert(document: Field, draft: Draft) -> None:
    """Convert an MPIJob."""
    take_metadata(document, draft)
    spec = document.at("spec")
    types = replicas_of(spec.at("mpiReplicaSpecs"), ("Launcher", "Worker"))
    launcher = types.get("Launcher")
    if launcher is None:
        raise SpecError("spec.mpiReplicaSpecs.Launcher is missing, and its command says what to run. Add it.")
    worker = types.get("Worker", launcher)
    as_worker = spec.at("runLauncherAsWorker").value is True
    spec.at("runLauncherAsWorker").mapped("spec.replicas, with the launcher as a worker more")
    draft.put("replicas", (worker.count if worker is not launcher else 0) + (as_worker or worker is launcher))
    worker.source.at("replicas").mapped("spec.replicas")
    slots = spec.at("slotsPerWorker")
    slots.mapped("spec.processesPerWorker")
    draft.put("processesPerWorker", slots.count(1))
    main = spec.at("mainContainer").text()
    names = (*([main] if main else []), "mpi", "mpi-worker", "mpi-launcher")
    spec.at("mainContainer").unneeded("It names the container that trains.")
    draft.spec["template"] = take_pod(worker.source.at("template"), draft, names)
    containers = launcher.source.at("template", "spec", "containers")
    if worker is not launcher:
        _take_command(launcher, worker, draft, names)
    if document.at("apiVersion").value == "kubeflow.org/v1":
        take_restart_policies([launcher], draft, "Never")
    else:
        launcher.source.at("restartPolicy").unneeded("spec.recovery bounds how often the program starts again.")
    if worker is not launcher:
        worker.source.at("restartPolicy").unneeded("That of the launcher counts, whose program is the job's.")
    for name in ("sshAuthMountPath", "mpiImplementation", "launcherCreationPolicy"):
        spec.at(name).unneeded(_NO_LAUNCHER)
    draft.take(spec.at("cleanPodPolicy"), "runPolicy.cleanPodPolicy")
    take_run_policy(spec.at("runPolicy"), draft)
    take_priority(spec.at("runPolicy"), draft)
    take_launch(draft, containers)
    containers.note(_NO_MPI)
    _take_range(draft, containers)


def _take_command(launcher: Replicas, worker: Replicas, draft: Draft, names: tuple[str, ...]) -> None:
    """Give the workers' container the launcher's command, variables and directory."""
    source, target = launcher.source, draft.trainer
    check_pod(source.at("template"))
    source.at("replicas").unneeded(_NO_LAUNCHER)
    containers = list(source.at("template", "spec", "containers").items())
    if not containers:
        raise SpecError(f"{source}.template.spec.containers is empty. Add the container with the command.")
    chosen = next((one for name in names for one in containers if one.at("name").value == name), containers[0])
    for one in worker.source.at("template", "spec", "containers").items():
        for name in ("command", "args"):
            if one.at("name").value in (target.get("name"), *names):
                one.at(name).unneeded("The workers run the launcher's program, and no sshd.")
    target.pop("command", None)
    target.pop("args", None)
    to = "spec.template.spec.containers[0]"
    for name in ("command", "args", "workingDir"):
        value = chosen.at(name).mapped(f"{to}.{name}")
        if value is not None:
            target[name] = value
    if env := take_env(chosen.at("env"), draft, f"{to}.env"):
        own: list[dict[str, Any]] = target.get("env") or []
        target["env"] = [*own, *(one for one in env if one not in own)]
    chosen.at("image").unneeded("The workers' image runs the program.")
    if chosen.at("image").value != target.get("image"):
        chosen.note(f"The program runs in the workers' image ({target.get('image')}).")
    for name, one in chosen.fields():
        if name not in ("command", "args", "workingDir", "env", "image"):
            one.unneeded(_NO_LAUNCHER)
    for one in containers:
        if one is not chosen:
            one.dropped(_NO_LAUNCHER)
    for name, one in source.at("template", "spec").fields():
        if name != "containers":
            _compare(name, one, draft)
    source.at("template", "metadata").unneeded(_NO_LAUNCHER)


def _compare(name: str, one: Field, draft: Draft) -> None:
    """Say what becomes of a field of the launcher's pod."""
    if one.value == draft.spec["template"]["spec"].get(name) or name in (
        "restartPolicy",
        "nodeSelector",
        "affinity",
        "tolerations",
    ):
        one.unneeded(_NO_LAUNCHER)
    else:
        one.dropped(f"{_NO_LAUNCHER} The workers have their own {name}: add it there if the program needs it.")


def _take_range(draft: Draft, containers: Field) -> None:
    """Convert the range of an elastic horovodrun, and the framework of a launcher."""
    container = draft.trainer
    command = [*map(str, container.get("command") or ()), *map(str, container.get("args") or ())]
    found = launchers.recognise(command)
    if found is None:
        return
    draft.framework = _FRAMEWORKS.get(found.launcher, draft.framework)
    if found.launcher != "horovodrun" or "elasticPolicy" in draft.spec:
        return
    try:
        read = launchers.read(command, {})
    except launchers.LauncherError:
        return  # the operator's rules say why
    options = {} if read is None else read.options
    low, high = (options.get(name, ("",))[-1] for name in ("--min-np", "--max-np"))
    if high.isdecimal() and (low or "1").isdecimal():
        slots = draft.spec["processesPerWorker"]
        draft.put("elasticPolicy.minReplicas", max(1, int(low or 1) // slots))
        draft.put("elasticPolicy.maxReplicas", max(1, int(high) // slots))
        containers.note("--min-np and --max-np are spec.elasticPolicy.")
