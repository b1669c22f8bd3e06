"""The decision log: one JSON line for each plan that decided something, with all that it was made from.

A plan is a pure function, so that a line can be run again: `regroup replay FILE` does, on any machine, and says where this version
would decide otherwise. A line holds no secret: of the job's object only what the plan reads is kept, and no template's commands,
arguments, variables, images or volumes are among that. docs/runbook.md says how to switch it on.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from regroup_operator.api import Job, RegroupError, worker_digest
from regroup_operator.api.job import parse_stored, role_digest
from regroup_operator.api.names import TRAINER_CONTAINER
from regroup_operator.model.plan import Clock, JobPlan, Memory, Urgency, Verdict
from regroup_operator.model.records import Observation, Pod, Settings
from regroup_operator.plan.job import plan_job

VERSION = 1
NUM_FILES = 5
_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")


class DecisionLogError(RegroupError):
    """A line cannot be read."""


@dataclass(frozen=True)
class PlanInputs:
    """What a plan was made from. `job`: its object, without what the plan does not read."""

    job: dict[str, Any]
    observation: Observation
    memory: Memory
    clock: Clock
    fresh_uid: str
    settings: Settings
    endpoint: str
    agent_image: str
    refusal: Verdict | None
    logs: str


@dataclass(frozen=True)
class Line:
    """One decision that was read back."""

    inputs: PlanInputs
    decision: dict[str, Any]


class DecisionLog:
    """Writes lines to a file, and to a new one when it is full: NUM_FILES files of `max_bytes` at most."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError if the file cannot be opened."""
        self._handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=max_bytes, backupCount=NUM_FILES - 1, encoding="utf-8"
        )

    def write(self, inputs: PlanInputs, plan: JobPlan) -> None:
        """Append a line. A full disk costs the line, never the job: the handler reports it on stderr."""
        record = logging.LogRecord("", logging.INFO, "", 0, to_line(inputs, plan), None, None)
        self._handler.handle(record)

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


def has_decided(plan: JobPlan, *, written: bool) -> bool:
    """Return whether a plan is worth a line: it was written for more than progress, or asks for something."""
    return (written and plan.urgency == Urgency.NOW) or bool(
        plan.tell or plan.create or plan.create_roles or plan.delete
    )


def record_inputs(
    job: Job,
    observation: Observation,
    memory: Memory,
    clock: Clock,
    *,
    fresh_uid: str,
    settings: Settings,
    endpoint: str,
    agent_image: str,
    refusal: Verdict | None,
    logs: str,
) -> PlanInputs:
    """Return the arguments of `plan_job` in the form that a line keeps. The digests of templates, which the plan compares with
    those of pods, become the digests of what is kept of them."""
    raw = _reduced(job.raw)
    kept = replace(job, raw=raw)
    digests = {worker_digest(job): worker_digest(kept)}
    digests |= {role_digest(job, role.name): role_digest(kept, role.name) for role in job.spec.roles}

    def pods(given: tuple[Pod, ...]) -> tuple[Pod, ...]:
        return tuple(replace(p, spec_digest=digests.get(p.spec_digest, p.spec_digest)) for p in given)

    observation = replace(observation, pods=pods(observation.pods), roles=pods(observation.roles))
    return PlanInputs(raw, observation, memory, clock, fresh_uid, settings, endpoint, agent_image, refusal, logs)


def to_line(inputs: PlanInputs, plan: JobPlan) -> str:
    """Return the JSON of a line."""
    body = {"version": VERSION, "inputs": _adapter().dump_python(inputs, mode="json"), "decision": decision_of(plan)}
    return json.dumps(body, separators=(",", ":"))


def from_line(text: str) -> Line:
    """Return the line. Raises DecisionLogError with one sentence."""
    try:
        body = json.loads(text)
        if body["version"] != VERSION:
            raise DecisionLogError(
                f"The line is of version {body['version']}; this program reads {VERSION}. Use the operator's release."
            )
        return Line(_adapter().validate_python(body["inputs"]), body["decision"])
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        first = str(error).split("\n")[0]
        raise DecisionLogError(
            f"The line is no decision of this release: {first}. Use the operator's release."
        ) from None


def replay(inputs: PlanInputs) -> JobPlan:
    """Return the plan that this version makes from the same inputs."""
    return plan_job(
        parse_stored(inputs.job),
        inputs.observation,
        inputs.memory,
        inputs.clock,
        fresh_uid=inputs.fresh_uid,
        settings=inputs.settings,
        endpoint=inputs.endpoint,
        agent_image=inputs.agent_image,
        refusal=inputs.refusal,
        logs=inputs.logs,
    )


def decision_of(plan: JobPlan) -> dict[str, Any]:
    """Return what a plan decides, as JSON has it."""
    plain: dict[str, Any] = TypeAdapter(JobPlan).dump_python(plan, mode="json", exclude={"memory", "delete"})
    plain["delete"] = [pod.name for pod in plan.delete]
    plain["urgency"] = plan.urgency.name
    decision: dict[str, Any] = json.loads(json.dumps(plain))
    return decision


def difference(recorded: Mapping[str, Any], replayed: Mapping[str, Any], at: str = "") -> tuple[str, Any, Any] | None:
    """Return the first place where two decisions differ, and both values; None: they are the same."""
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
def _adapter() -> TypeAdapter[PlanInputs]:
    return TypeAdapter(PlanInputs)


def _reduced(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's object with what the plan reads, and nothing that a user may have hidden in it."""
    spec = dict(raw["spec"])
    spec["template"] = {"spec": {"containers": [_trainer(raw["spec"]["template"]["spec"]["containers"])]}}
    checkpoint = spec.get("checkpoint") or {}
    if "path" in checkpoint:
        spec["template"]["spec"]["containers"][0]["volumeMounts"] = [{"name": "kept", "mountPath": checkpoint["path"]}]
    if spec.get("roles"):
        spec["roles"] = [{**role, "template": {"spec": _role(role["template"]["spec"])}} for role in spec["roles"]]
    metadata = {name: raw["metadata"][name] for name in _METADATA if name in raw["metadata"]}
    kept: dict[str, Any] = {"metadata": metadata, "spec": spec}
    return kept | ({"status": raw["status"]} if "status" in raw else {})


def _trainer(containers: list[Mapping[str, Any]]) -> dict[str, Any]:
    trainer = next(c for c in containers if c["name"] == TRAINER_CONTAINER)
    limits = (trainer.get("resources") or {}).get("limits")
    kept: dict[str, Any] = {"name": TRAINER_CONTAINER, "command": ["python"]}
    return kept | ({"resources": {"limits": limits}} if limits else {})


def _role(spec: Mapping[str, Any]) -> dict[str, Any]:
    policy = {"restartPolicy": spec["restartPolicy"]} if "restartPolicy" in spec else {}
    return {"containers": [{"name": "main"}], **policy}
