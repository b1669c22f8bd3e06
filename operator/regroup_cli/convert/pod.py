"""The rules for pod templates, which all kinds of jobs share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from regroup_cli.convert.draft import Draft, keep_marks
from regroup_cli.convert.findings import Field, differences
from regroup_operator.api import SpecError
from regroup_operator.api.frameworks import RESERVED_ENV
from regroup_operator.api.job import GPU_RESOURCE
from regroup_operator.api.template import is_reserved_env

TO = "spec.template"
_RENDEZVOUS = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_", "PET_MAX_RESTARTS",
               "PET_STANDALONE", "WORKER_ADDRS", "WORKER_PORT")  # fmt: skip
SET_BY_REGROUP = "Regroup sets it for every process, anew in each generation."
AT_RUNTIME = "Workers meet at an address that Regroup chooses for each generation."
PROCESSES = "PET_NPROC_PER_NODE"


def take_pod(template: Field, draft: Draft, names: Sequence[str], to: str = TO) -> dict[str, Any]:
    """Return a pod template for the workers. `names` are the names that the source's operator has for the training container."""
    check_pod(template)
    made: dict[str, Any] = {}
    marks = {}
    for kind in ("labels", "annotations"):
        if kept := keep_marks(template.at("metadata", kind), f"{to}.metadata.{kind}"):
            marks[kind] = kept
    for name in ("name", "namespace", "creationTimestamp", "generateName"):
        template.at("metadata", name).unneeded("Regroup names the pods.")
    if marks:
        made["metadata"] = marks
    spec: dict[str, Any] = {}
    for name, one in template.at("spec").fields():
        value = _take_pod_field(name, one, draft, names, to)
        if value is not None:
            spec[name] = value
    if "containers" not in spec:
        raise SpecError(f"{template}.spec.containers is missing. Add it.")
    return {**made, "spec": spec}


def _take_pod_field(name: str, one: Field, draft: Draft, names: Sequence[str], to: str) -> Any:
    """Return the value of one field of the pod's spec, None if the pods do not get it."""
    if name == "containers":
        return _take_containers(one, draft, names, to)
    if name == "restartPolicy":
        return (
            one.unneeded("A process that fails starts again in its pod, and spec.recovery bounds how often.") and None
        )
    if name == "activeDeadlineSeconds":
        value = one.changed("It is spec.runPolicy.activeDeadlineSeconds, which ends the whole job.")
        return draft.put("runPolicy.activeDeadlineSeconds", value)
    if name in ("hostname", "subdomain"):
        return one.dropped("Each worker has a name of its own in the DNS.") and None
    if name == "schedulerName" and one.value != "default-scheduler":
        return one.changed("This scheduler places each pod by itself, because Regroup makes no pod groups.")
    return copy.deepcopy(one.mapped(f"{to}.spec.{name}"))


def _take_containers(containers: Field, draft: Draft, names: Sequence[str], to: str) -> list[dict[str, Any]]:
    found = list(containers.items())
    if not found:
        raise SpecError(f"{containers} is empty. Add the container that trains.")
    trainer = next((one for name in ("trainer", *names) for one in found if one.at("name").value == name), found[0])
    made = []
    for index, one in enumerate(found):
        renamed = one is trainer and len(found) > 1 and one.at("name").value != "trainer"
        made.append(_take_container(one, draft, f"{to}.spec.containers[{index}]", renamed=renamed))
    return made


def _take_container(container: Field, draft: Draft, to: str, *, renamed: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, one in container.fields():
        if name == "env":
            if kept := take_env(one, draft, f"{to}.env"):
                made["env"] = kept
        elif name == "name" and renamed:
            one.changed("The container that trains has the name trainer, where there are several.")
            made["name"] = "trainer"
        else:
            made[name] = copy.deepcopy(one.mapped(f"{to}.{name}"))
    return made


def take_env(env: Field, draft: Draft, to: str) -> list[dict[str, Any]]:
    """Return the variables that the container keeps."""
    kept = []
    for one in env.items():
        name = one.at("name").text()
        if name == PROCESSES:
            value = one.at("value").text()
            if value.isdecimal():
                one.mapped("spec.processesPerWorker")
                draft.put("processesPerWorker", int(value))
            else:
                one.unneeded("The container's limit of GPUs is the number of its processes.")
        elif is_reserved_env(name) or name in RESERVED_ENV.get(draft.framework, ()):  # type: ignore[call-overload]
            one.unneeded(f"{name}: {SET_BY_REGROUP}")
        elif name.startswith(_RENDEZVOUS):
            one.unneeded(f"{name}: {AT_RUNTIME}")
        else:
            kept.append(copy.deepcopy(one.mapped(f"{to}[{name}]")))
    return kept


def role_template(template: Field, to: str) -> dict[str, Any]:
    """Return a pod template for a role, whose containers Regroup leaves as they are."""
    check_pod(template)
    if not template.at("spec", "containers"):
        raise SpecError(f"{template}.spec.containers is missing. Add it.")
    made: dict[str, Any] = copy.deepcopy(template.mapped(f"{to}.template"))
    marks = {name: value for name, value in (made.get("metadata") or {}).items() if name in ("labels", "annotations")}
    return {**({"metadata": marks} if marks else {}), "spec": made["spec"]}


def check_pod(template: Field) -> None:
    """Raise SpecError if a template has not the form that the rules read."""
    template.at("spec").known_mapping()
    template.at("metadata").known_mapping()
    for one in template.at("spec", "containers").items():
        check_container(one)


def check_container(container: Field) -> None:
    """Raise SpecError if a container has not the form that the rules read."""
    if not isinstance(container.at("name").value, str | None):
        raise SpecError(f"{container.at('name')} is no text. Correct it.")
    check_program(container)
    container.at("resources", "limits").known_mapping()


def check_program(source: Field) -> None:
    """Raise SpecError if a command, its arguments or its variables have not the form that the rules read."""
    for name in ("command", "args"):
        for word in source.at(name).items():
            if isinstance(word.value, dict | list | None):
                raise SpecError(f"{word} is no text. Correct it.")
    for one in source.at("env").items():
        if not isinstance(one.at("name").value, str):
            raise SpecError(f"{one}.name is no text. Correct it.")


def num_gpus(container: dict[str, Any]) -> int | None:
    """Return the container's limit of GPUs, None if it has none."""
    limits = (container.get("resources") or {}).get("limits") or {}
    found = [str(value) for name, value in limits.items() if GPU_RESOURCE.fullmatch(name)]
    return int(found[0]) if len(found) == 1 and found[0].isdecimal() else None


def take_same(other: Field, first: Field, word: str) -> None:
    """Record what became of the template of further replicas. All workers run the template of the `first` ones.

    `word` names the first ones, such as Master.
    """
    for path in differences(other.value or {}, first.value or {}):
        if other.part(path):
            sentence = f"{word} has another value, which all workers get, because each may become rank 0."
            other.part(path).dropped(sentence)
        else:
            first.part(path).changed(f"Only {word} had it, and now all workers get it.")
    other.mapped(f"{TO}, as of {word}")
