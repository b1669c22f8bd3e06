"""The rules for a TrainJob of trainer.kubeflow.org/v1alpha1, together with the runtime that it names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from regroup.protocol import launchers
from regroup_cli.convert.draft import NO_GANG, Draft, keep_marks, take_metadata
from regroup_cli.convert.findings import Field, Ledger
from regroup_cli.convert.jobset import take_job, take_retries, take_set
from regroup_cli.convert.kubeflow import take_manager
from regroup_cli.convert.launch import take_launch
from regroup_cli.convert.pod import check_container, check_program, take_env, take_pod
from regroup_cli.convert.runtimes import FRAMEWORK, STEP, WELL_KNOWN
from regroup_operator.api import SpecError

RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
_CONTAINER = "node"
_FRAMEWORKS = {"jax": "JAX", "xgboost": "XGBoost", "deepspeed": "DeepSpeed", "tensorflow": "TensorFlow"}
"""spec.framework by the label of the runtime, else PyTorch."""
_KEYS = {"volumeMounts": "mountPath"}
"""The field by which items of a list are the same, where it is not the name."""


def convert(document: Field, draft: Draft) -> None:
    """Convert a TrainJob."""
    take_metadata(document, draft)
    spec = document.at("spec")
    raw = _runtime_of(spec.at("runtimeRef"), draft)
    ledger = Ledger(f"{raw['kind']} {raw['metadata']['name']}: ")
    runtime = Field(raw, ledger)
    draft.framework = _FRAMEWORKS.get(runtime.at("metadata", "labels", FRAMEWORK).text(), draft.framework)
    jobs = list(runtime.at("spec", "template", "spec", "replicatedJobs").items())
    node = _step(jobs, "trainer") or next((one for one in jobs if one.at("name").value == _CONTAINER), None)
    if node is None:
        raise SpecError(
            f"{runtime}spec.template.spec.replicatedJobs has none that trains. Give it the label {STEP}: trainer."
        )
    _take_runtime(runtime, jobs, node, draft)
    _take_nodes(spec.at("trainer"), runtime.at("spec", "mlPolicy"), draft)
    patched = draft.spec["template"]
    _take_trainer(spec.at("trainer"), draft)
    _take_patches(spec, node.at("name").text(), patched, draft)
    spec.at("initializer").dropped(
        "Regroup prepares no data and no model. Run the initializer as a Job before this one, or as an init container of "
        "spec.template."
    )
    draft.take(spec.at("suspend"), "runPolicy.suspend")
    draft.take(spec.at("activeDeadlineSeconds"), "runPolicy.activeDeadlineSeconds")
    take_manager(spec.at("managedBy"), draft)
    _take_processes(spec.at("trainer"), runtime.at("spec", "mlPolicy"), draft)
    take_launch(draft, spec.at("trainer", "command"))
    draft.more += ledger.findings(raw)


def _runtime_of(reference: Field, draft: Draft) -> dict[str, Any]:
    name, kind = reference.at("name").text(), reference.at("kind").text() or "ClusterTrainingRuntime"
    reference.unneeded("The job has what the runtime says, so that it does not change with it.")
    for one in draft.beside:
        if one.get("kind") == kind and Field(one, Ledger(f"{kind} {name}: ")).at("metadata", "name").value == name:
            return dict(one)
    if kind == "ClusterTrainingRuntime" and name in WELL_KNOWN:
        return copy.deepcopy(WELL_KNOWN[name])
    raise SpecError(
        f"spec.runtimeRef names {kind} {name}, which is in no file. Give its manifest as another FILE: kubectl get "
        f"{kind.lower()} {name} -o yaml."
    )


def _step(jobs: list[Field], step: str) -> Field | None:
    return next((one for one in jobs if one.at("template", "metadata", "labels", STEP).value == step), None)


def _take_runtime(runtime: Field, jobs: list[Field], node: Field, draft: Draft) -> None:
    """Convert the runtime but for what the TrainJob says itself."""
    for name in ("apiVersion", "kind", "status"):
        runtime.at(name).known()
    runtime.at("metadata").unneeded("They are the runtime's own.")
    policy = runtime.at("spec", "podGroupPolicy")
    policy.dropped(NO_GANG)
    template = runtime.at("spec", "template")
    for kind in ("labels", "annotations"):
        for name, value in keep_marks(template.at("metadata", kind), f"metadata.{kind}").items():
            draft.metadata.setdefault(kind, {}).setdefault(name, value)
    node.at("name").unneeded("It is the replicated job that trains: its pods are the job's workers.")
    node.at("groupName").unneeded("It groups replicated jobs for policies.")
    node.at("dependsOn").unneeded("What it waits for is not part of the job.")
    take_retries(template.at("spec", "failurePolicy"), node.at("template", "spec"), draft)
    take_job(node, draft)
    draft.spec["template"] = take_pod(node.at("template", "spec", "template"), draft, (_CONTAINER,))
    for one in jobs:
        if one is node:
            continue
        step = one.at("template", "metadata", "labels", STEP).text()
        if step.endswith("-initializer"):
            one.dropped(
                "Regroup prepares no data and no model. Run it as a Job before this one, or as an init container."
            )
        elif runtime.at("spec", "mlPolicy", "mpi"):
            one.unneeded("Regroup starts the program in each worker, without ssh.")
        else:
            one.dropped("Only the replicated job that trains is converted. Write it as one of spec.roles.")
    take_set(template.at("spec"), draft, num_jobs=1)


def _take_nodes(trainer: Field, policy: Field, draft: Draft) -> None:
    nodes = trainer.at("numNodes")
    draft.put("replicas", nodes.count(policy.at("numNodes").count(1)))
    nodes.mapped("spec.replicas")
    if nodes:
        policy.at("numNodes").unneeded("The TrainJob says the number of nodes.")
    else:
        policy.at("numNodes").mapped("spec.replicas")
    for name in ("torch", "jax", "xgboost"):
        policy.at(name, "envInjection").unneeded("Regroup sets the variables in the container that trains.")
    elastic = policy.at("torch", "elasticPolicy")
    if elastic:
        draft.put("elasticPolicy.minReplicas", elastic.at("minNodes").count(1))
        draft.put("elasticPolicy.maxReplicas", elastic.at("maxNodes").count(1))
        elastic.at("minNodes").mapped("spec.elasticPolicy.minReplicas")
        elastic.at("maxNodes").mapped("spec.elasticPolicy.maxReplicas")
        elastic.at("maxRestarts").changed(
            "It is spec.recovery.maxRestarts. torchrun counts in each pod, Regroup in the job."
        )
        draft.put("recovery.maxRestarts", elastic.at("maxRestarts").value)
    for name in ("mpiImplementation", "sshAuthMountPath", "runLauncherAsNode"):
        policy.at("mpi", name).unneeded("Regroup starts the program in each worker, without ssh and MPI.")
    policy.at("flux").dropped("Regroup does not start Flux. The program finds its peers by torchrun's variables.")


def _take_processes(trainer: Field, policy: Field, draft: Draft) -> None:
    """Convert the number of processes. A command that is no launcher runs once in each pod, whatever the number."""
    container = draft.trainer
    command = [*map(str, container.get("command") or ()), *map(str, container.get("args") or ())]
    has_launcher = launchers.recognise(command) is not None or launchers.hidden(command) is not None
    given = trainer.at("numProcPerNode")
    sources = [given, *(policy.at(kind, "numProcPerNode") for kind in ("torch", "mpi", "flux"))]
    first = next(filter(None, sources), None)
    for one in filter(None, sources):
        if one is not first or not one.text().isdecimal():
            one.unneeded("The TrainJob, the command or the container's limit of GPUs says the number of processes.")
        elif has_launcher or one.value == 1:
            one.mapped("spec.processesPerWorker")
            if has_launcher:
                draft.put("processesPerWorker", one.count(1))
        else:
            one.changed("The command is no launcher and ran once in each pod. Regroup runs it once, too.")


def _take_trainer(trainer: Field, draft: Draft) -> None:
    """Write what the TrainJob says of its container over what the runtime says."""
    to = "spec.template.spec.containers[0]"
    container = draft.trainer
    check_program(trainer)
    trainer.at("resourcesPerNode", "limits").known_mapping()
    for name in ("image", "command", "args"):
        value = trainer.at(name).mapped(f"{to}.{name}")
        if value is not None:
            container[name] = copy.deepcopy(value)
    resources = trainer.at("resourcesPerNode").mapped(f"{to}.resources")
    if resources is not None:
        container["resources"] = copy.deepcopy(resources)
    env = take_env(trainer.at("env"), draft, f"{to}.env")
    if env:
        container["env"] = merged(container.get("env") or [], env)


def _take_patches(spec: Field, node: str, template: dict[str, Any], draft: Draft) -> None:
    """Apply the TrainJob's patches of the runtime, in their form of today and in the two of earlier versions."""
    for patch in spec.at("runtimePatches").items():
        patch.at("manager").unneeded("It says who wrote the patch.")
        patch.at("time").unneeded("It says when the patch was written.")
        of_set = patch.at("trainingRuntimeSpec", "template")
        _take_marks(of_set.at("metadata"), draft.metadata, "metadata")
        for one in of_set.at("spec", "replicatedJobs").items():
            one.at("name").known()
            if one.at("name").value not in (node, _CONTAINER):
                one.dropped("It patches a replicated job that does not train.")
                continue
            _take_marks(one.at("template", "metadata"), draft.metadata, "metadata")
            pod = one.at("template", "spec", "template")
            _take_marks(pod.at("metadata"), template.setdefault("metadata", {}), "spec.template.metadata")
            _patch_pod(pod.at("spec").fields(), template["spec"], draft)
    for kind in ("podTemplateOverrides", "podSpecOverrides"):
        for one in spec.at(kind).items():
            names = [target.at("name").value for target in one.at("targetJobs").items()]
            one.at("targetJobs").known()
            if node not in names and _CONTAINER not in names:
                one.dropped("It patches a replicated job that does not train.")
                continue
            _take_marks(one.at("metadata"), template.setdefault("metadata", {}), "spec.template.metadata")
            fields = one.at("spec").fields() if kind == "podTemplateOverrides" else one.fields()
            _patch_pod(
                ((name, field) for name, field in fields if name not in ("targetJobs", "metadata")),
                template["spec"],
                draft,
            )
    if template.get("metadata") == {}:
        del template["metadata"]


def _take_marks(metadata: Field, target: dict[str, Any], to: str) -> None:
    for kind in ("labels", "annotations"):
        if kept := keep_marks(metadata.at(kind), f"{to}.{kind}"):
            target[kind] = {**target.get(kind, {}), **kept}


def _patch_pod(fields: Iterator[tuple[str, Field]], pod: dict[str, Any], draft: Draft) -> None:
    trainer = draft.trainer["name"]
    for name, one in fields:
        if name == "containers":
            for container in one.items():
                check_container(container)
                if not container:
                    continue
                value = copy.deepcopy(container.mapped(f"spec.template.spec.containers[{container.at('name').text()}]"))
                if "env" in value:
                    value["env"] = take_env(container.at("env"), draft, "spec.template.spec.containers[].env")
                if value.get("name") == _CONTAINER:
                    value["name"] = trainer
                pod["containers"] = merged(pod["containers"], [value])
        elif name == "schedulingGates":
            one.dropped("Regroup's pods have no gates. spec.runPolicy.suspend holds the job back.")
        else:
            pod[name] = merged(pod.get(name), one.mapped(f"spec.template.spec.{name}"))


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """Return a value with a patch, as Kubernetes merges them: mappings by key, lists of named items by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merged(base.get(key), value, key) for key, value in patch.items()}}
    key = _KEYS.get(name, "name")
    if (
        isinstance(base, list)
        and isinstance(patch, list)
        and all(isinstance(one, dict) and isinstance(one.get(key), str) for one in [*base, *patch])
    ):
        out = {one[key]: one for one in base}
        for one in patch:
            # of an env entry the patch's value takes the place of a valueFrom
            out[one[key]] = one if "value" in one or "valueFrom" in one else merged(out.get(one[key]), one)
        return list(out.values())
    return copy.deepcopy(patch)
