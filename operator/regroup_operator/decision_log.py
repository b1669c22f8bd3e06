"""The decision log: one JSON line for each plan that decided something, with all of its inputs.

A plan is a pure function, so a line can be planned again. `regroup replay FILE` does that on any machine, and shows
where this version decides otherwise.

The log keeps only the fields of the job that the plan reads. It has none of a template's commands, arguments,
variables, images or volumes. It has, as the status does, the last line of a process and the end of its stderr (500 and
1500 characters). The plan tells crashes apart by them, and quotes them. So a secret that a script prints there is in
the log, and docs/how-to/runbook.md warns of that.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from regroup_operator.api import RegroupError, SpecError, StatusError, worker_digest
from regroup_operator.api.job import parse_stored, role_digest, template_digest
from regroup_operator.api.launcher import launcher_counts, trainer_of
from regroup_operator.api.names import TRAINER_CONTAINER
from regroup_operator.model.plan import JobPlan, Urgency
from regroup_operator.model.records import Pod
from regroup_operator.plan.facts.facts import Inputs

VERSION = 1
NUM_FILES = 5
_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")


class DecisionLogError(RegroupError):
    """The log cannot be written, or a line of it cannot be read."""


@dataclass(frozen=True)
class Line:
    """One decision, read from its line."""

    inputs: Inputs
    decision: dict[str, Any]


class DecisionLog:
    """Writes lines to a file, and begins a new file when it is full. There are at most NUM_FILES files of `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open the file. Raises DecisionLogError with one sentence if that fails."""
        try:
            self._handler = logging.handlers.RotatingFileHandler(
                path, maxBytes=max_bytes, backupCount=NUM_FILES - 1, encoding="utf-8"
            )
        except OSError as error:
            raise DecisionLogError(
                f"The decision log {path} cannot be written ({error.strerror}). Name a file in a directory that is there."
            ) from None

    def write(self, inputs: Inputs, plan: JobPlan) -> None:
        """Append a line. A full disk costs the line, never the job: the handler reports it on stderr."""
        record = logging.LogRecord("", logging.INFO, "", 0, to_line(inputs, plan), None, None)
        self._handler.handle(record)

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


def has_decided(plan: JobPlan, *, written: bool) -> bool:
    """Return whether a plan is worth a line: it was written for more than progress, or it makes, deletes or tells something."""
    return (written and plan.urgency == Urgency.NOW) or bool(
        plan.tell or plan.create or plan.create_roles or plan.delete
    )


def to_line(inputs: Inputs, plan: JobPlan) -> str:
    """Return the JSON of a line.

    The plan compares digests of templates with those of pods. Both become digests of the reduced templates that the
    line keeps.
    """
    job, raw = inputs.job, _reduced(inputs.job.raw)
    kept = replace(job, raw=raw)
    decision = decision_of(plan)
    if not job.template_changed:
        for status in (raw.get("status", {}), decision["status"]):
            status |= {"templateDigest": template_digest(raw)} if "templateDigest" in status else {}
    digests = {worker_digest(job): worker_digest(kept)}
    digests |= {role_digest(job, role.name): role_digest(kept, role.name) for role in job.spec.roles}

    def pods(given: tuple[Pod, ...]) -> tuple[Pod, ...]:
        return tuple(replace(p, spec_digest=digests.get(p.spec_digest, p.spec_digest)) for p in given)

    inputs = replace(inputs, obs=replace(inputs.obs, pods=pods(inputs.obs.pods), roles=pods(inputs.obs.roles)))
    parts = {name: part.dump_python(getattr(inputs, name), mode="json") for name, part in _parts().items()}
    body = {"version": VERSION, "inputs": {"job": raw, **parts}, "decision": decision}
    return json.dumps(body, separators=(",", ":"))


def from_line(text: str) -> Line:
    """Return the decision in a line. Raises DecisionLogError with one sentence."""
    with reading():
        body = json.loads(text)
        if body["version"] != VERSION:
            raise DecisionLogError(
                f"The line is of version {body['version']}; this program reads {VERSION}. Use the operator's release."
            )
        parts = {name: part.validate_python(body["inputs"][name]) for name, part in _parts().items()}
        return Line(Inputs(job=parse_stored(body["inputs"]["job"]), **parts), dict(body["decision"]))


@contextmanager
def reading() -> Iterator[None]:
    """Raise DecisionLogError with one sentence for each error that a line from another program can cause in this block."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        SpecError,
        StatusError,
    ) as error:
        first = str(error).split("\n")[0]
        raise DecisionLogError(
            f"The line is no decision of this release: {first}. Use the operator's release."
        ) from None


def decision_of(plan: JobPlan) -> dict[str, Any]:
    """Return the decisions of a plan as JSON."""
    plain: dict[str, Any] = TypeAdapter(JobPlan).dump_python(plan, mode="json", exclude={"memory", "delete", "status"})
    plain["status"] = plan.written
    plain["delete"] = [pod.name for pod in plan.delete]
    plain["urgency"] = plan.urgency.name
    decision: dict[str, Any] = json.loads(json.dumps(plain))
    return decision


def difference(recorded: Mapping[str, Any], replayed: Mapping[str, Any], at: str = "") -> tuple[str, Any, Any] | None:
    """Return the first place where two decisions differ, and both values, or None if they are equal."""
    for name in sorted({*recorded, *replayed}):
        here = f"{at}.{name}" if at else name
        one, other = recorded.get(name), replayed.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found = difference(one, other, here)
            if found is not None:
                return found
        elif one != other:
            return here, one, other
    return None


@cache
def _parts() -> dict[str, TypeAdapter[Any]]:
    """Return for each input except the job the adapter that writes and reads it."""
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(Inputs).items() if name != "job"}


def _reduced(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's object with only the fields that the plan reads, and so without any that may hold a user's secret."""
    spec = dict(raw["spec"])
    spec["template"] = {"spec": {"containers": [_trainer(raw["spec"]["template"]["spec"]["containers"])]}}
    checkpoint = spec.get("checkpoint") or {}
    if "path" in checkpoint:
        spec["template"]["spec"]["containers"][0]["volumeMounts"] = [{"name": "kept", "mountPath": checkpoint["path"]}]
    if spec.get("roles"):
        spec["roles"] = [{**role, "template": {"spec": _role(role["template"]["spec"])}} for role in spec["roles"]]
    metadata = {name: raw["metadata"][name] for name in _METADATA if name in raw["metadata"]}
    kept: dict[str, Any] = {"metadata": metadata, "spec": spec}
    return kept | ({"status": dict(raw["status"])} if "status" in raw else {})


def _trainer(containers: list[Mapping[str, Any]]) -> dict[str, Any]:
    trainer = trainer_of(containers)
    limits = (trainer.get("resources") or {}).get("limits")
    kept: dict[str, Any] = {"name": TRAINER_CONTAINER, "command": launcher_counts(trainer)}
    return kept | ({"resources": {"limits": limits}} if limits else {})


def _role(spec: Mapping[str, Any]) -> dict[str, Any]:
    policy = {"restartPolicy": spec["restartPolicy"]} if "restartPolicy" in spec else {}
    return {"containers": [{"name": "main"}], **policy}
