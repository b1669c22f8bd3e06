"""The fields that a user may write in the templates of the job's pods: `spec.template` of its workers, `spec.roles` of the others.

Rules are written twice, as in spec.py. What they do not name of a pod is the API server's to judge, in a dry run.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from regroup_operator.api.base import OpenModel, SpecModel, cel, with_rules
from regroup_operator.api.names import TRAINER_CONTAINER

RESERVED_ENV = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
RESERVED_ENV_PREFIXES = ("TORCHELASTIC_", "REGROUP_")
ALLOWED_ENV = frozenset({"REGROUP_PRELOAD", "REGROUP_NCCL_ENDING"})


def is_reserved_env(name: str) -> bool:
    """Return whether Regroup sets the environment variable `name` itself."""
    return name not in ALLOWED_ENV and (name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES))


def _cel_list(words: tuple[str, ...] | list[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


class EnvVar(OpenModel):
    """One environment variable of a container."""

    model_config = with_rules(
        cel(
            f"self.name in {_cel_list(sorted(ALLOWED_ENV))} || !(self.name in {_cel_list(sorted(RESERVED_ENV))}"
            + "".join(f" || self.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES)
            + ")",
            "This env name is reserved, because Regroup sets it for every process. Remove it from spec.template.",
            "'env name ' + self.name + ' is reserved, because Regroup sets it for every process. "
            "Remove it from spec.template.'",
        )
    )

    name: str = Field(max_length=256)
    """RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_* and
    REGROUP_* (except REGROUP_PRELOAD and REGROUP_NCCL_ENDING) are set by Regroup and refused here."""

    @model_validator(mode="after")
    def _not_reserved(self) -> EnvVar:
        if is_reserved_env(self.name):
            raise ValueError(
                f"env name {self.name} is reserved, because Regroup sets it for every process. "
                "Remove it from spec.template."
            )
        return self


_NO_COMMAND = (
    "has no command, and Regroup has to know it to start processes. "
    "Write it out, for example command: [python, train.py]."
)


class Container(OpenModel):
    """A container as Kubernetes defines it; the one named `trainer`, or the only one, runs the training script."""

    model_config = with_rules(
        cel(
            f"self.name != '{TRAINER_CONTAINER}' || (has(self.command) && size(self.command) > 0)",
            f"container trainer {_NO_COMMAND}",
        ),
    )

    name: str = Field(max_length=63)
    """Name of the container, unique in the pod."""

    image: str | None = Field(default=None, max_length=1024)
    """Image with Python 3.9 or newer and the script. Regroup copies its agent, which starts the script, into each pod."""

    resources: dict[str, Any] | None = None
    """Requests and limits, as in pod.spec.containers.resources. The trainer's limit of GPUs is the
    default of processesPerWorker. Set a memory limit: without one, a process that leaks can use up its node's memory."""

    command: list[str] | None = Field(default=None, max_length=256)
    """Required for the trainer: the command of ONE training process, for example [python, train.py], which Regroup starts
    processesPerWorker times in each worker. Or a launcher's command as it is, for example [torchrun, --nproc-per-node, '2',
    train.py]: Regroup translates torchrun, accelerate launch, deepspeed, horovodrun and mpirun."""

    args: list[str] | None = Field(default=None, max_length=1024)
    """Arguments that are appended to command."""

    env: list[EnvVar] | None = Field(
        default=None, max_length=512, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Environment variables. Of two entries with one name the later wins."""

    volume_mounts: list[dict[str, Any]] | None = Field(default=None, alias="volumeMounts")
    """Volumes to mount. Paths under /regroup and /var/run/secrets/regroup are reserved."""


_POD_DEADLINE = (
    "spec.template.spec.activeDeadlineSeconds must be absent, because it would end each worker's pod again and again. "
    "Set spec.runPolicy.activeDeadlineSeconds, which ends the job."
)


class PodSpec(OpenModel):
    """A pod's spec as Kubernetes defines it. The operator validates it with a dry run before it creates any pod."""

    model_config = with_rules(
        cel(
            f"size(self.containers) == 1 || self.containers.exists(c, c.name == '{TRAINER_CONTAINER}')",
            "spec.template.spec.containers has several containers and none named trainer. "
            "Name the container that runs the training script trainer.",
            "'spec.template.spec.containers (%s) has several containers and none named trainer. "
            "Name the container that runs the training script trainer.'.format([self.containers.map(c, c.name)])",
        ),
        cel(
            f"size(self.containers) > 1 || self.containers[0].name == '{TRAINER_CONTAINER}' || "
            "(has(self.containers[0].command) && size(self.containers[0].command) > 0)",
            f"The only container {_NO_COMMAND}",
            f"'container ' + self.containers[0].name + ' {_NO_COMMAND}'",
        ),
        cel(
            "!has(self.restartPolicy) || self.restartPolicy == 'OnFailure'",
            "spec.template.spec.restartPolicy must be OnFailure, because workers recover in place. "
            "Remove the field or set OnFailure.",
            "'spec.template.spec.restartPolicy (' + self.restartPolicy + ') must be OnFailure, because workers "
            "recover in place. Remove the field or set OnFailure.'",
        ),
        cel("!has(self.activeDeadlineSeconds)", _POD_DEADLINE),
    )

    containers: list[Container] = Field(
        min_length=1,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """The container that runs the script. If there are several, that one is named `trainer`, and the others run beside it in
    every worker."""

    restart_policy: str | None = Field(default=None, alias="restartPolicy", max_length=64)
    """OnFailure or absent: a container that failed is restarted in its pod."""

    active_deadline_seconds: int | None = Field(default=None, alias="activeDeadlineSeconds")
    """Must be absent: spec.runPolicy.activeDeadlineSeconds limits the job's time."""

    init_containers: list[dict[str, Any]] | None = Field(default=None, alias="initContainers")
    """Containers that run before the trainer, after Regroup's own init container, which copies the agent."""

    volumes: list[dict[str, Any]] | None = None
    """Volumes of the pod. Names that begin with regroup are reserved."""

    image_pull_secrets: list[dict[str, Any]] | None = Field(default=None, alias="imagePullSecrets")
    """Secrets for pulling the images. The operator adds those for the agent's image."""

    affinity: dict[str, Any] | None = None
    """Affinity of the pods. If the last two pods of a slot failed on one node, the operator adds a preference for other nodes."""

    topology_spread_constraints: list[dict[str, Any]] | None = Field(default=None, alias="topologySpreadConstraints")
    """Spread constraints. If they and affinity.podAntiAffinity are absent, workers prefer different nodes."""

    @model_validator(mode="after")
    def _has_trainer(self) -> PodSpec:
        names = [container.name for container in self.containers]
        if len(names) > 1 and TRAINER_CONTAINER not in names:
            raise ValueError(
                f"spec.template.spec.containers ({json.dumps(names)}) has several containers and none named trainer. "
                "Name the container that runs the training script trainer."
            )
        for container in self.containers:
            if (len(names) == 1 or container.name == TRAINER_CONTAINER) and not container.command:
                raise ValueError(f"container {container.name} {_NO_COMMAND}")
        if self.restart_policy not in (None, "OnFailure"):
            raise ValueError(
                f"spec.template.spec.restartPolicy ({self.restart_policy}) must be OnFailure, because workers "
                "recover in place. Remove the field or set OnFailure."
            )
        if self.active_deadline_seconds is not None:
            raise ValueError(_POD_DEADLINE)
        return self


class TemplateMeta(SpecModel):
    """Labels and annotations for the pods, in addition to those that Regroup sets."""

    labels: dict[str, str] | None = Field(default=None, max_length=128)
    """Labels for the pods. Keys under regroup.dev/ are reserved and refused."""

    annotations: dict[str, str] | None = Field(default=None, max_length=128)
    """Annotations for the pods. Keys under regroup.dev/ are reserved and refused."""


class PodTemplate(SpecModel):
    """The pod template of every worker. Immutable once the job has started."""

    metadata: TemplateMeta | None = None
    """Labels and annotations for the pods."""

    spec: PodSpec
    """The pod's spec."""


_ROLE_DEADLINE = (
    "activeDeadlineSeconds in a template of spec.roles must be absent, because it would end the role's pods again and again. "
    "Set spec.runPolicy.activeDeadlineSeconds, which ends the job, or restartPolicy Never."
)


class RolePodSpec(OpenModel):
    """A pod's spec as Kubernetes defines it. The operator validates it with a dry run before it creates any pod."""

    model_config = with_rules(cel("!has(self.activeDeadlineSeconds) || self.restartPolicy == 'Never'", _ROLE_DEADLINE))

    containers: list[dict[str, Any]] = Field(min_length=1, max_length=16)
    """The pod's containers. Regroup adds nothing to them but environment variables."""

    restart_policy: Literal["Always", "OnFailure", "Never"] = Field(default="OnFailure", alias="restartPolicy")
    """Always, OnFailure: containers that end are restarted in their pod, and a pod that fails is replaced. Never: a pod that fails
    by its own exit code fails the job. A pod that succeeds is not replaced."""

    active_deadline_seconds: int | None = Field(default=None, alias="activeDeadlineSeconds")
    """Seconds after which a running pod fails the job. Only with restartPolicy Never: otherwise the pod would be replaced
    for ever."""

    @model_validator(mode="after")
    def _ends_once(self) -> RolePodSpec:
        if self.active_deadline_seconds is not None and self.restart_policy != "Never":
            raise ValueError(_ROLE_DEADLINE)
        return self


_COMPLETES = "Use OnFailure or Never, or remove requiredForCompletion."


class RoleTemplate(SpecModel):
    """The pod template of a role."""

    metadata: TemplateMeta | None = None
    """Labels and annotations for the pods."""

    spec: RolePodSpec
    """The pod's spec."""


class Role(SpecModel):
    """Further pods of the job beside its workers, such as an evaluator or TensorBoard. They are never members of a generation, and
    they end with the job."""

    model_config = with_rules(
        cel(
            "!self.requiredForCompletion || self.template.spec.restartPolicy != 'Always'",
            "A role in spec.roles has requiredForCompletion and restartPolicy Always, so that its pods never complete. "
            f"{_COMPLETES}",
            "'spec.roles has ' + self.name + ' with requiredForCompletion and restartPolicy Always, so that its pods never "
            f"complete. {_COMPLETES}'",
        )
    )

    name: str = Field(min_length=1, max_length=12)
    """Name of the role, unique in the job: a-z and 0-9, first a letter. Not worker. It is in the names of the pods."""

    replicas: int = Field(default=1, ge=1, le=64)
    """Number of pods. Each is reached as <job>-<role>-<index>.<job>."""

    required_for_completion: bool = False
    """True: the job is Complete only once its script has returned 0 in every worker and every pod of this role has succeeded. In
    between its State is Completing: the workers' pods have ended, and the pods of all roles run on. Not with restartPolicy
    Always."""

    template: RoleTemplate
    """The pod template."""

    @model_validator(mode="after")
    def _completes(self) -> Role:
        if self.required_for_completion and self.template.spec.restart_policy == "Always":
            raise ValueError(
                f"spec.roles has {self.name} with requiredForCompletion and restartPolicy Always, so that its pods never "
                f"complete. {_COMPLETES}"
            )
        return self
