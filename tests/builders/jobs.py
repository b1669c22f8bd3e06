"""A small valid job, and the specs that must be refused with the sentence each must get.

`BAD_SPECS` and `BAD_CHANGES` are used twice: against `parse_job` and `check_change` (tests/unit/api), and against a real
API server (tests/api), so that the two answers stay one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Manifest = dict[str, Any]


def make_job(name: str = "digits", **spec: Any) -> Manifest:
    """Return an elastic job of 3 workers (2 to 5) as a user would write it; `spec` replaces whole fields."""
    return {
        "apiVersion": "regroup.dev/v1alpha1",
        "kind": "DistributedTrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": 3,
            "elasticPolicy": {"minReplicas": 2, "maxReplicas": 5},
            "template": {
                "spec": {
                    "containers": [{"name": "trainer", "image": "example/trainer:1", "command": ["python", "train.py"]}]
                }
            },
            **copy.deepcopy(spec),
        },
    }


def stored_job(name: str = "digits", status: Manifest | None = None, **spec: Any) -> Manifest:
    """Return the job as the API server would hold it: with uid, versions and status."""
    job = make_job(name, **spec)
    job["metadata"].update(uid="1f4a-uid", resourceVersion="7", generation=2)
    if status is not None:
        job["status"] = status
    return job


def trainer(job: Manifest) -> Manifest:
    """Return the trainer container of `job`, to be changed in place."""
    containers: list[Manifest] = job["spec"]["template"]["spec"]["containers"]
    return containers[0]


Change = Callable[[Manifest], Any]


def role(name: str = "board", **spec: Any) -> Manifest:
    """Return a role of one pod with a container that sleeps."""
    container = {"name": "main", "image": "localhost/regroup-trainer:dev", "command": ["sleep", "1000"]}
    return {"name": name, "template": {"spec": {"containers": [container], **spec}}}


def with_spec(**fields: Any) -> Change:
    """Return a change that sets fields of spec."""
    return lambda job: job["spec"].update(copy.deepcopy(fields))


def with_trainer(**fields: Any) -> Change:
    """Return a change that sets fields of the trainer container."""
    return lambda job: trainer(job).update(copy.deepcopy(fields))


def with_pod(**fields: Any) -> Change:
    """Return a change that sets fields of spec.template.spec."""
    return lambda job: job["spec"]["template"]["spec"].update(copy.deepcopy(fields))


def with_name(name: str) -> Change:
    """Return a change of metadata.name."""
    return lambda job: job["metadata"].update(name=name)


_NO_COMMAND = (
    "container trainer has no command, and Regroup has to know it to start processes. "
    "Write it out, for example command: [python, train.py]."
)


def _reserved(name: str) -> str:
    return f"env name {name} is reserved, because Regroup sets it for every process. Remove it from spec.template."


BAD_SPECS: dict[str, tuple[Change, str]] = {
    "minReplicas above maxReplicas": (
        with_spec(elasticPolicy={"minReplicas": 6, "maxReplicas": 4}),
        "spec.elasticPolicy.minReplicas (6) is greater than spec.elasticPolicy.maxReplicas (4). "
        "Lower minReplicas or raise maxReplicas.",
    ),
    "a rule of onExit without a matcher": (
        with_spec(recovery={"onExit": [{"action": "Ignore"}]}),
        "A rule of spec.recovery.onExit (action Ignore) has none of exitCodes, signals and reasons. "
        "Give each rule exactly one of them, and write several rules for several.",
    ),
    "a rule of onExit with two matchers": (
        with_spec(
            recovery={
                "onExit": [{"action": "Fail", "signals": ["SIGKILL"], "exitCodes": {"operator": "In", "values": [2]}}]
            }
        ),
        "A rule of spec.recovery.onExit (action Fail) has several of exitCodes, signals and reasons. "
        "Give each rule exactly one of them, and write several rules for several.",
    ),
    "sizes and sizeMultipleOf": (
        with_spec(elasticPolicy={"minReplicas": 2, "maxReplicas": 5, "sizes": [2, 4], "sizeMultipleOf": 2}),
        "spec.elasticPolicy has both sizes and sizeMultipleOf. Keep the one that says with how many workers the script trains.",
    ),
    "minReplicas that is no size": (
        with_spec(elasticPolicy={"minReplicas": 1, "maxReplicas": 5, "sizes": [4, 2]}),
        "spec.elasticPolicy.minReplicas (1) is not one of spec.elasticPolicy.sizes ([4, 2]). Choose one of them.",
    ),
    "minReplicas that is no multiple": (
        with_spec(elasticPolicy={"minReplicas": 1, "maxReplicas": 5, "sizeMultipleOf": 2}),
        "spec.elasticPolicy.minReplicas (1) is not a multiple of spec.elasticPolicy.sizeMultipleOf (2). Choose a multiple.",
    ),
    "sizes of no whole groups": (
        with_spec(workersPerGroup=2, replicas=2, elasticPolicy={"minReplicas": 2, "maxReplicas": 4, "sizes": [2, 3]}),
        "spec.elasticPolicy.sizes ([2, 3]) has a number that is not a multiple of spec.workersPerGroup (2). "
        "Choose multiples of workersPerGroup.",
    ),
    "sizeMultipleOf of no whole groups": (
        with_spec(
            workersPerGroup=2, replicas=6, elasticPolicy={"minReplicas": 6, "maxReplicas": 6, "sizeMultipleOf": 3}
        ),
        "spec.elasticPolicy.sizeMultipleOf (3) is not a multiple of spec.workersPerGroup (2). "
        "Choose a multiple of workersPerGroup.",
    ),
    "growth at a checkpoint without one": (
        with_spec(elasticPolicy={"minReplicas": 2, "maxReplicas": 5, "growAt": "Checkpoint"}),
        "spec.elasticPolicy.growAt is Checkpoint, but spec.checkpoint is missing. Set spec.checkpoint to the directory where the "
        "script saves, or growAt to Now.",
    ),
    "replicas above maxReplicas": (
        with_spec(replicas=9),
        "spec.replicas (9) is outside spec.elasticPolicy (2 to 5). "
        "Choose a number inside, or change minReplicas or maxReplicas.",
    ),
    "replicas below minReplicas": (
        with_spec(replicas=1),
        "spec.replicas (1) is outside spec.elasticPolicy (2 to 5). "
        "Choose a number inside, or change minReplicas or maxReplicas.",
    ),
    "replicas of no whole groups": (
        with_spec(workersPerGroup=2, elasticPolicy={"minReplicas": 2, "maxReplicas": 4}),
        "spec.replicas (3) is not a multiple of spec.workersPerGroup (2). Choose a multiple of workersPerGroup.",
    ),
    "minReplicas of no whole groups": (
        with_spec(workersPerGroup=3, elasticPolicy={"minReplicas": 2, "maxReplicas": 6}),
        "spec.elasticPolicy.minReplicas (2) is not a multiple of spec.workersPerGroup (3). "
        "Choose a multiple of workersPerGroup.",
    ),
    "maxReplicas of no whole groups": (
        with_spec(workersPerGroup=3, elasticPolicy={"minReplicas": 3, "maxReplicas": 5}),
        "spec.elasticPolicy.maxReplicas (5) is not a multiple of spec.workersPerGroup (3). "
        "Choose a multiple of workersPerGroup.",
    ),
    "too many workers for a list of all": (
        with_spec(framework="TensorFlow", replicas=300, elasticPolicy={"minReplicas": 2, "maxReplicas": 300}),
        "spec.replicas (300) is more than the 256 workers that spec.framework TensorFlow allows, since each process is told of "
        "all others. Lower it to 256 or less.",
    ),
    "too many workers later for a list of all": (
        with_spec(framework="TensorFlow", elasticPolicy={"minReplicas": 2, "maxReplicas": 257}),
        "spec.elasticPolicy.maxReplicas (257) is more than the 256 workers that spec.framework TensorFlow allows, since each "
        "process is told of all others. Lower it to 256 or less.",
    ),
    "parameter servers of TensorFlow": (
        with_spec(framework="TensorFlow", roles=[role("board"), role("ps")]),
        "spec.roles has ps, but in spec.framework TensorFlow the first worker is the chief, and there are no parameter servers. "
        "Remove the role, or choose another name.",
    ),
    "several containers and no trainer": (
        with_pod(containers=[{"name": "main", "command": ["python"]}, {"name": "proxy"}]),
        'spec.template.spec.containers (["main", "proxy"]) has several containers and none named trainer. '
        "Name the container that runs the training script trainer.",
    ),
    "only container without command": (
        lambda job: (trainer(job).pop("command"), trainer(job).update(name="main")),
        _NO_COMMAND.replace("trainer", "main", 1),
    ),
    "trainer without command": (lambda job: trainer(job).pop("command"), _NO_COMMAND),
    "trainer with an empty command": (with_trainer(command=[]), _NO_COMMAND),
    "reserved environment name": (with_trainer(env=[{"name": "RANK", "value": "0"}]), _reserved("RANK")),
    "reserved environment prefix": (
        with_trainer(env=[{"name": "A", "value": "1"}, {"name": "TORCHELASTIC_RUN_ID", "value": "x"}]),
        _reserved("TORCHELASTIC_RUN_ID"),
    ),
    "environment of Regroup's own": (with_trainer(env=[{"name": "REGROUP_SOCKET"}]), _reserved("REGROUP_SOCKET")),
    "restartPolicy": (
        with_pod(restartPolicy="Never"),
        "spec.template.spec.restartPolicy (Never) must be OnFailure, because workers recover in place. "
        "Remove the field or set OnFailure.",
    ),
    "spares that are no whole groups": (
        with_spec(
            workersPerGroup=2, replicas=2, elasticPolicy={"minReplicas": 2, "maxReplicas": 4}, recovery={"spares": 1}
        ),
        "spec.recovery.spares (1) is not a multiple of spec.workersPerGroup (2). Choose a multiple of workersPerGroup.",
    ),
    "role that is called worker": (
        with_spec(roles=[role("worker")]),
        "spec.roles has the name worker, which is not allowed. Use at most 12 characters of a-z and 0-9, first a letter, and "
        "another word than worker.",
    ),
    "role with a hyphen": (
        with_spec(roles=[role("a-b")]),
        "spec.roles has the name a-b, which is not allowed. Use at most 12 characters of a-z and 0-9, first a letter, and "
        "another word than worker.",
    ),
    "role that never completes and is required to": (
        with_spec(roles=[role("eval", restartPolicy="Always") | {"requiredForCompletion": True}]),
        "spec.roles has eval with requiredForCompletion and restartPolicy Always, so that its pods never complete. "
        "Use OnFailure or Never, or remove requiredForCompletion.",
    ),
    "role whose pods a deadline ends again and again": (
        with_spec(roles=[role("eval", activeDeadlineSeconds=60)]),
        "activeDeadlineSeconds in a template of spec.roles must be absent, because it would end the role's pods again and again. "
        "Set spec.runPolicy.activeDeadlineSeconds, which ends the job, or restartPolicy Never.",
    ),
    "checkpoint in two places": (
        with_spec(checkpoint={"volumeClaim": "ckpt", "path": "/ckpt"}),
        "spec.checkpoint needs exactly one of volumeClaim and path. Keep the one that says where checkpoints go.",
    ),
    "checkpoint in no place": (
        with_spec(checkpoint={"keep": 2}),
        "spec.checkpoint needs exactly one of volumeClaim and path. Keep the one that says where checkpoints go.",
    ),
    "snapshot without a size": (
        with_spec(memorySnapshot={"sizeLimit": "much"}),
        "spec.memorySnapshot.sizeLimit (much) is not a size. Write a whole number with a unit, such as 20Gi.",
    ),
    "managed by no name": (
        with_spec(runPolicy={"managedBy": "kueue"}),
        "spec.runPolicy.managedBy (kueue) is no name of a controller. Write a domain, a slash and a name, such as "
        "kueue.x-k8s.io/multikueue.",
    ),
    "checkpoint path not absolute": (
        with_spec(checkpoint={"path": "ckpt"}),
        "spec.checkpoint.path (ckpt) is not absolute. Give a directory that starts with /.",
    ),
    "directory instead of a checkpoint to begin with": (
        with_spec(checkpoint={"volumeClaim": "ckpt", "resumeFrom": "/regroup/checkpoint"}),
        "spec.checkpoint.resumeFrom (/regroup/checkpoint) is no checkpoint. Give what status.checkpoint.directory of the earlier "
        "job says, or the absolute path of such a directory.",
    ),
    "relative path instead of a checkpoint to begin with": (
        with_spec(checkpoint={"volumeClaim": "ckpt", "resumeFrom": "../other/step-7.g1-ab"}),
        "spec.checkpoint.resumeFrom (../other/step-7.g1-ab) is no checkpoint. Give what status.checkpoint.directory of the earlier "
        "job says, or the absolute path of such a directory.",
    ),
    "deadline of each worker's pod": (
        with_pod(activeDeadlineSeconds=60),
        "spec.template.spec.activeDeadlineSeconds must be absent, because it would end each worker's pod again and again. "
        "Set spec.runPolicy.activeDeadlineSeconds, which ends the job.",
    ),
    "name of 46 characters": (
        with_name("a" * 46),
        f"metadata.name ({'a' * 46}) must have at most 45 characters, start with a letter and contain only a-z, 0-9 "
        "and -. Choose another name.",
    ),
    "name that starts with a digit": (
        with_name("1digits"),
        "metadata.name (1digits) must have at most 45 characters, start with a letter and contain only a-z, 0-9 "
        "and -. Choose another name.",
    ),
}
"""What both the API server and `parse_job` answer with this very sentence."""


def without_policy(job: Manifest) -> None:
    """Make `job` one of fixed size."""
    job["spec"].pop("elasticPolicy")


def _once(what: str) -> str:
    return f"{what} once the job has started (status.startTime is set). Change it back, or delete the job and create it anew."


ELASTIC: Change = with_spec()
BAD_CHANGES: dict[str, tuple[Change, Change, str]] = {
    "roles": (ELASTIC, with_spec(roles=[role()]), _once("spec.roles cannot change")),
    "template": (
        ELASTIC,
        lambda job: job["spec"]["template"]["spec"].update(nodeSelector={"a": "b"}),
        _once("spec.template cannot change"),
    ),
    "processesPerWorker": (ELASTIC, with_spec(processesPerWorker=2), _once("spec.processesPerWorker cannot change")),
    "processesPerWorker removed": (
        with_spec(processesPerWorker=2),
        lambda job: job["spec"].pop("processesPerWorker"),
        _once("spec.processesPerWorker cannot change"),
    ),
    "workersPerGroup": (
        with_spec(replicas=4, elasticPolicy={"minReplicas": 2, "maxReplicas": 4}),
        with_spec(workersPerGroup=2),
        _once("spec.workersPerGroup cannot change"),
    ),
    "framework": (ELASTIC, with_spec(framework="JAX"), _once("spec.framework cannot change")),
    "checkpoint": (ELASTIC, with_spec(checkpoint={"volumeClaim": "ckpt"}), _once("spec.checkpoint cannot change")),
    "names of pods": (ELASTIC, with_spec(network={"podNames": False}), _once("spec.network.podNames cannot change")),
    "memory snapshot": (
        with_spec(memorySnapshot={"sizeLimit": "1Gi"}),
        lambda job: job["spec"]["memorySnapshot"].update(sizeLimit="2Gi"),
        _once("spec.memorySnapshot cannot change"),
    ),
    "pattern of the progress": (
        with_spec(progress={"log": "(?P<step>[0-9]+)"}),
        lambda job: job["spec"].pop("progress"),
        _once("spec.progress cannot change"),
    ),
    "checkpoint to begin with": (
        with_spec(checkpoint={"volumeClaim": "ckpt", "resumeFrom": "step-7.g1-ab"}),
        lambda job: job["spec"]["checkpoint"].update(resumeFrom="step-8.g1-ab"),
        _once("spec.checkpoint cannot change"),
    ),
    "checkpoint's interval": (
        with_spec(checkpoint={"volumeClaim": "ckpt"}),
        lambda job: job["spec"]["checkpoint"].update(everySeconds=7),
        _once("spec.checkpoint cannot change"),
    ),
    "maxReplicas raised": (
        ELASTIC,
        with_spec(replicas=8, elasticPolicy={"minReplicas": 2, "maxReplicas": 8}),
        _once("spec.elasticPolicy.maxReplicas (8) cannot change from 5"),
    ),
    "maxReplicas lowered": (
        ELASTIC,
        with_spec(elasticPolicy={"minReplicas": 2, "maxReplicas": 4}),
        _once("spec.elasticPolicy.maxReplicas (4) cannot change from 5"),
    ),
    "elasticPolicy removed": (ELASTIC, without_policy, _once("spec.elasticPolicy cannot be added or removed")),
    "elasticPolicy added": (
        without_policy,
        with_spec(replicas=4, elasticPolicy={"minReplicas": 2, "maxReplicas": 5}),
        _once("spec.elasticPolicy cannot be added or removed"),
    ),
    "replicas of a job of fixed size": (
        without_policy,
        with_spec(replicas=4),
        "spec.replicas (4) of a started job of fixed size cannot change from 3. Change it back, or delete the job and "
        "create it anew with spec.elasticPolicy.",
    ),
}
"""The job as it was, a change of it once it has started, and what both the API server and `check_change` answer."""


def _swapped(gone: str, come: str, value: Any, at: Callable[[Manifest], Manifest]) -> Change:
    def change(job: Manifest) -> None:
        found = at(job)
        del found[gone]
        found[come] = value

    return change


SWAPS: dict[str, tuple[Change, Change, str]] = {
    "of the pod": (
        with_pod(nodeSelector={"a": "b"}),
        _swapped("nodeSelector", "hostNetwork", True, lambda job: job["spec"]["template"]["spec"]),
        _once("spec.template cannot change"),
    ),
    "of a container": (
        with_trainer(workingDir="/x"),
        _swapped("workingDir", "securityContext", {"privileged": True}, trainer),
        _once("spec.template cannot change"),
    ),
    "of a variable": (
        with_trainer(env=[{"name": "MODE", "value": "safe"}]),
        _swapped(
            "value", "valueFrom", {"fieldRef": {"fieldPath": "metadata.name"}}, lambda job: trainer(job)["env"][0]
        ),
        _once("spec.template cannot change"),
    ),
    "of a role": (
        with_spec(roles=[role(nodeSelector={"a": "b"})]),
        _swapped("nodeSelector", "hostNetwork", True, lambda job: job["spec"]["roles"][0]["template"]["spec"]),
        _once("spec.roles cannot change"),
    ),
}
"""The same for a field of a template that takes the place of another, which the resource's own rules overlook (adr/0069)."""

BAD_FROM_THE_BEGINNING: dict[str, tuple[Change, Change, str]] = {
    "managedBy": (
        with_spec(runPolicy={"managedBy": "a.example/x"}),
        with_spec(runPolicy={"managedBy": "a.example/y"}),
        "spec.runPolicy.managedBy cannot change. Delete the job and create it anew.",
    ),
    "managedBy removed": (
        with_spec(runPolicy={"managedBy": "a.example/x", "suspend": True}),
        with_spec(runPolicy={"suspend": True}),
        "spec.runPolicy.managedBy cannot change. Delete the job and create it anew.",
    ),
}
"""The same for what cannot change before the start either."""

GOOD_CHANGES: dict[str, Change] = {
    "replicas inside the bounds": with_spec(replicas=5),
    "minReplicas": with_spec(elasticPolicy={"minReplicas": 1, "maxReplicas": 5}),
    "sizes": with_spec(elasticPolicy={"minReplicas": 2, "maxReplicas": 5, "sizes": [2, 4]}),
    "sizeMultipleOf": with_spec(elasticPolicy={"minReplicas": 2, "maxReplicas": 5, "sizeMultipleOf": 2}),
    "run policy": with_spec(runPolicy={"suspend": True, "activeDeadlineSeconds": 60, "cleanPodPolicy": "All"}),
    "recovery": with_spec(recovery={"disconnectSeconds": 9}),
    "nothing": with_spec(),
}
"""What may change while the job runs."""
