"""The objects of a submitted job: a pure function of the user's choices and of the files that travel.

A pod gets the files from an immutable ConfigMap. An init container copies them to CODE_DIR, where the script runs, because
scripts write beside themselves, and a ConfigMap's volume is read-only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regroup_client import packages
from regroup_client.errors import SubmitError
from regroup_client.packages import Packages

Object = dict[str, Any]
Files = Mapping[str, bytes]
"""Path below the directory that travels, with slashes -> content."""
CODE_DIR, SOURCE_DIR = "/code", "/submitted"
LABEL_CODE_OF = "regroup.dev/code-of"
"""Label of the ConfigMap with the files of a job: the job's name. The job becomes its owner when it is submitted."""
API_VERSION, KIND = "regroup.dev/v1alpha1", "DistributedTrainingJob"
NEW_CLAIM = "new:"
LARGEST = 1000 << 10
"""Bytes of files and hashes that travel. A ConfigMap holds 1 MiB, names and the like included."""
_PACKAGES = {".lock.json": "lock.json", ".install.py": "install.py"}
"""Keys of what installs packages in the ConfigMap, and names in the pod. The key of a file never begins with a dot."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,43}[a-z0-9])?")
_SIZE = re.compile(r"[1-9][0-9]*(k|M|G|T|Ki|Mi|Gi|Ti)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
# copytree would copy modes, too, which only the owner of a volume may set. Links of a ConfigMap's volume begin with two dots.
COPY = f"""\
import os, shutil
for top, folders, files in os.walk("{SOURCE_DIR}", followlinks=True):
    folders[:] = [name for name in folders if not name.startswith("..")]
    there = os.path.join("{CODE_DIR}", os.path.relpath(top, "{SOURCE_DIR}"))
    os.makedirs(there, exist_ok=True)
    for name in files:
        shutil.copyfile(os.path.join(top, name), os.path.join(there, name))
"""


@dataclass(frozen=True)
class Choices:
    """The choices of a user for one job."""

    name: str
    image: str

    script: str
    """Path of the script below the directory that travels."""

    arguments: Sequence[str] = ()
    workers: int = 1

    least: int | None = None
    """Fewest workers to train with. With `most`, 1 is the default."""

    most: int | None = None
    """Most workers. None: the job keeps its size, unless `least` is set."""

    gpus: int = 0
    """GPUs of each worker. Each of them gets a process."""

    cpu: str = ""
    memory: str = ""
    framework: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    env_from: Sequence[str] = ()
    """Names of Secrets whose entries become variables."""

    data: Sequence[str] = ()
    """Volumes to mount: CLAIM:PATH, or CLAIM:PATH:ro."""

    checkpoint: str = ""
    """A claim for checkpoints, or new:SIZE."""

    user: int | None = None
    """User id of the pods, which then fit the Pod Security standard restricted. None: the image's user."""

    namespace: str = ""

    packages: Packages | None = None
    """Packages that are installed when a pod starts. None: those of the image are all."""


@dataclass(frozen=True)
class Objects:
    """A job, and what it needs."""

    job: Object

    code: tuple[Object, ...] = ()
    """ConfigMaps that the job will own."""

    others: tuple[Object, ...] = ()
    """Claims and ConfigMaps that outlive the job."""

    new_claim: str = ""
    """The one of these claims that must not be there before the job. It would hold the checkpoints of another job."""

    def all(self) -> list[Object]:
        """Return all of them, the job last."""
        return [*self.code, *self.others, self.job]


def objects(choices: Choices, files: Files) -> Objects:
    """Return the objects of a job. Raises SubmitError for a choice that cannot be."""
    _check(choices, files)
    keys = _keys(files)
    code = _config_map(choices, files, keys)
    claim = _new_claim(choices)
    job = _job(choices, code["metadata"]["name"], keys)
    return Objects(job, (code,), () if claim is None else (claim,), "" if claim is None else claim["metadata"]["name"])


def job_name(text: str) -> str:
    """Return a job's name for a script of this name: lower case, a-z, 0-9 and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:45].strip("-")
    return name if _NAME.fullmatch(name) else f"job-{name}"[:45].strip("-")


def _check(choices: Choices, files: Files) -> None:
    """Raise SubmitError if choices contradict each other. The sentences name the options that the user wrote."""
    check_name(choices.name)
    if not choices.image:
        raise SubmitError("--image is missing. Give an image with python3 and what the script imports, such as torch.")
    if choices.script not in files:
        raise SubmitError(
            f"The script {choices.script} does not travel, because .gitignore names it. Take it out of .gitignore."
        )
    check_sizes(choices.workers, choices.least, choices.most)
    if choices.gpus < 0:
        raise SubmitError(f"--gpus ({choices.gpus}) is less than 0. Give the number of GPUs of each worker.")


def check_name(name: str) -> None:
    """Raise SubmitError for a name that no job can have."""
    if not _NAME.fullmatch(name):
        raise SubmitError(
            f"--name ({name}) is no name for a job. Use at most 45 characters of a-z, 0-9 and hyphens, first a letter."
        )


def check_sizes(workers: int, least: int | None, most: int | None) -> None:
    """Raise SubmitError for numbers of workers that cannot be. None: the user gave no such option."""
    for option, number in (("--workers", workers), ("--min", least), ("--max", most)):
        if number is not None and number < 1:
            raise SubmitError(f"{option} ({number}) is less than 1. Give at least 1.")
    if least is not None and most is not None and least > most:
        raise SubmitError(f"--min ({least}) is more than --max ({most}). Lower --min, or raise --max.")
    if most is not None and workers > most:
        raise SubmitError(f"--workers ({workers}) is more than --max ({most}). Lower --workers, or raise --max.")
    if least is not None and workers < least:
        raise SubmitError(f"--workers ({workers}) is less than --min ({least}). Raise --workers, or lower --min.")


def _config_map(choices: Choices, files: Files, keys: Mapping[str, str]) -> Object:
    """Return the ConfigMap with the files. Its name has a digest of them, so that other files mean another template."""
    content: Object = {}
    for key, path in keys.items():
        try:
            content.setdefault("data", {})[key] = _text(files[path])
        except ValueError:
            content.setdefault("binaryData", {})[key] = base64.b64encode(files[path]).decode()
    if choices.packages is not None:
        content.setdefault("data", {}).update(zip(_PACKAGES, (choices.packages.lock, packages.PROGRAM), strict=True))
        size = len(choices.packages.lock.encode()) + sum(map(len, files.values()))
        if size > LARGEST:
            raise SubmitError(
                f"The files and the hashes of --pip have {size:,} bytes, and {LARGEST:,} may travel. Name fewer packages, or build "
                "an image that has them."
            )
    digest = hashlib.sha256(json.dumps([content, keys], sort_keys=True).encode()).hexdigest()[:10]
    metadata = _metadata(choices, f"{choices.name}-code-{digest}") | {"labels": {LABEL_CODE_OF: choices.name}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, **content}


def _text(content: bytes) -> str:
    """Return a file as text. Raises ValueError if YAML and JSON would not give it back as it is."""
    text = content.decode()
    if not all(letter.isprintable() or letter in "\n\t" for letter in text):
        raise ValueError
    return text


def _keys(files: Files) -> dict[str, str]:
    """Return the path of each file by its key in the ConfigMap. Keys have no slashes, and few other characters."""
    keys: dict[str, str] = {}
    for path in sorted(files):
        key = name = re.sub(r"[^-._a-zA-Z0-9]", "_", path.replace("/", "__"))[-200:].lstrip(".") or "_"
        number = 0
        while key in keys:
            number += 1
            key = f"{number}-{name}"
        keys[key] = path
    return keys


def _new_claim(choices: Choices) -> Object | None:
    """Return the claim of --checkpoint new:SIZE. No job owns it, because the model must outlive the job."""
    if not choices.checkpoint.startswith(NEW_CLAIM):
        return None
    size = choices.checkpoint.removeprefix(NEW_CLAIM)
    if not _SIZE.fullmatch(size):
        raise SubmitError(
            f"--checkpoint ({choices.checkpoint}) has no size after new:. Write a number with a unit: new:5Gi"
        )
    alone = max(choices.workers, choices.most or 1) == 1
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(choices, _checkpoint_claim(choices)),
        "spec": {
            "accessModes": ["ReadWriteOnce" if alone else "ReadWriteMany"],  # workers of several nodes write to it
            "resources": {"requests": {"storage": size}},
        },
    }


def _checkpoint_claim(choices: Choices) -> str:
    if choices.checkpoint.startswith(NEW_CLAIM):
        return f"{choices.name}-checkpoints"
    if not _CLAIM.fullmatch(choices.checkpoint):
        raise SubmitError(
            f"--checkpoint ({choices.checkpoint}) is neither the name of a claim nor new:SIZE. Give one, such as new:5Gi."
        )
    return choices.checkpoint


def _job(choices: Choices, code: str, keys: Mapping[str, str]) -> Object:
    spec: Object = {"replicas": choices.workers}
    if choices.least is not None or choices.most is not None:
        spec["elasticPolicy"] = {"minReplicas": choices.least or 1, "maxReplicas": choices.most or choices.workers}
    if choices.framework:
        spec["framework"] = choices.framework
    if choices.checkpoint:
        spec["checkpoint"] = {"volumeClaim": _checkpoint_claim(choices)}
    spec["template"] = {"spec": _pod(choices, code, keys)}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": _metadata(choices, choices.name), "spec": spec}


def _pod(choices: Choices, code: str, keys: Mapping[str, str]) -> Object:
    data_volumes, data_mounts = _data(choices)
    items = [{"key": key, "path": path} for key, path in keys.items()]
    there = {"name": "code", "mountPath": CODE_DIR}
    trainer: Object = {
        "name": "trainer",
        "image": choices.image,
        "command": ["python3", "-u", _literal(choices.script)],
        "workingDir": CODE_DIR,
        "volumeMounts": [there, *data_mounts],
    }
    if choices.arguments:
        trainer["args"] = [_literal(one) for one in choices.arguments]
    environment = dict(choices.env)
    if choices.packages is not None:
        environment["PYTHONPATH"] = ":".join(filter(None, (packages.DIR, environment.get("PYTHONPATH"))))
        trainer["volumeMounts"].append({"name": "packages", "mountPath": packages.DIR, "readOnly": True})
    if environment:
        trainer["env"] = [{"name": _variable(name), "value": _literal(value)} for name, value in environment.items()]
    if choices.env_from:
        trainer["envFrom"] = [{"secretRef": {"name": name}} for name in choices.env_from]
    if resources := _resources(choices):
        trainer["resources"] = resources
    pod: Object = {
        "initContainers": [_copier(choices, there)],
        "containers": [trainer],
        "volumes": [
            {"name": "submitted", "configMap": {"name": code, "items": items}},
            {"name": "code", "emptyDir": {}},
            *data_volumes,
        ],
    }
    if choices.packages is not None:
        pod["initContainers"].append(_installer(choices, choices.packages))
        source = {"name": code, "items": [{"key": key, "path": path} for key, path in _PACKAGES.items()]}
        pod["volumes"] += [{"name": "packages", "emptyDir": {}}, {"name": "packages-lock", "configMap": source}]
    return pod if choices.user is None else _restricted(pod, choices.user)


def _copier(choices: Choices, there: Object) -> Object:
    """Return the init container that copies the files. It runs in the job's image, and its last words become a condition."""
    mounts = [{"name": "submitted", "mountPath": SOURCE_DIR, "readOnly": True}, there]
    return _init_container(choices, "copy-code", ["python3", "-I", "-c", COPY], mounts)


def _installer(choices: Choices, wanted: Packages) -> Object:
    """Return the init container that installs packages. Without -I it sees the packages that the script will see."""
    mounts: list[Object] = [
        {"name": "packages-lock", "mountPath": packages.LOCK_DIR, "readOnly": True},
        {"name": "packages", "mountPath": packages.DIR},
    ]
    command = ["python3", f"{packages.LOCK_DIR}/install.py", packages.LOCK_DIR, packages.DIR]
    container = _init_container(choices, "install-packages", command, mounts)
    environment = {"HOME": "/tmp", **wanted.env, **({"PIP_INDEX_URL": wanted.index_url} if wanted.index_url else {})}
    container["env"] = [{"name": name, "value": _literal(value)} for name, value in environment.items()]
    if choices.env_from:  # a Secret may have the index with its password
        container["envFrom"] = [{"secretRef": {"name": name}} for name in choices.env_from]
    return container


def _init_container(choices: Choices, name: str, command: list[str], mounts: list[Object]) -> Object:
    container: Object = {
        "name": name,
        "image": choices.image,
        "command": command,
        "workingDir": "/",
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if resources := _resources(choices, gpus=False):  # a quota may want them of each container
        container["resources"] = resources
    return container


def _resources(choices: Choices, *, gpus: bool = True) -> dict[str, dict[str, Any]]:
    limits: dict[str, Any] = {"nvidia.com/gpu": choices.gpus} if choices.gpus and gpus else {}
    limits |= {"memory": choices.memory} if choices.memory else {}
    requests = {"cpu": choices.cpu} if choices.cpu else {}
    return {kind: amounts for kind, amounts in (("requests", requests), ("limits", limits)) if amounts}


def _restricted(pod: Object, user: int) -> Object:
    """Add what the Pod Security standard restricted asks for. Volumes then belong to the user's group."""
    for container in (*pod["initContainers"], *pod["containers"]):
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    ids = {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {"securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **ids}, **pod}


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise SubmitError(f"--env ({name}) is no name of a variable. Write NAME=VALUE.")
    return name


def _literal(text: str) -> str:
    """Return a text that the kubelet leaves as it is: $(NAME) is a variable for it, and $$ is a dollar."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _data(choices: Choices) -> tuple[list[Object], list[Object]]:
    """Return the volumes and mounts of --data. A claim that is mounted twice is one volume."""
    volumes: dict[str, Object] = {}
    mounts: list[Object] = []
    for given in choices.data:
        claim, _, rest = given.partition(":")
        path, _, mode = rest.partition(":")
        if not _CLAIM.fullmatch(claim) or not path.startswith("/") or mode not in ("", "ro"):
            raise SubmitError(
                f"--data ({given}) is not CLAIM:PATH. Write a claim and an absolute path: images:/data, or images:/data:ro"
            )
        if any(f"{path.rstrip('/')}/".startswith(f"{ours}/") for ours in (CODE_DIR, SOURCE_DIR)):
            raise SubmitError(f"--data ({given}) mounts {path}, where the submitted files are. Choose another path.")
        name = f"data-{list(volumes).index(claim) if claim in volumes else len(volumes)}"
        volumes[claim] = {"name": name, "persistentVolumeClaim": {"claimName": claim}}
        mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if mode else {})})
    return list(volumes.values()), mounts


def _metadata(choices: Choices, name: str) -> Object:
    return {"name": name, **({"namespace": choices.namespace} if choices.namespace else {})}
