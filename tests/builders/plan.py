"""What the policies are fed: pods, sessions, workers and the newest generation, each with everything irrelevant defaulted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from regroup.protocol.document import FORCED, OlderGeneration
from regroup.protocol.state import Condition, Phase, Seal, StatePair
from regroup.protocol.wire import Fault, Progress
from regroup_operator.api import Job, JobStatus, parse_job, parse_status
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Counted, JobMemory, SlotMemory, WorkerMemory
from regroup_operator.model.records import AgentSession, Pod
from regroup_operator.model.worker import Bounds, Current, Standing, Worker
from regroup_operator.plan.failures.exits import Seen
from tests.builders.jobs import Manifest, stored_job

JOB_UID = "1f4a-uid"
LONG_AGO_S = -1000.0


MEMBERSHIP = {"generation": 1, "uid": "g1", "kind": FORCED, "digest": "ab12", "worldSize": 1, "members": "0"}
CONDITION = {"status": "True", "reason": "Any", "lastTransitionTime": "2026-01-01T00:00:00Z"}
INCIDENT = {"at": "2026-01-01T00:00:00Z", "decision": "Any."}


def make_status(given: Mapping[str, Any]) -> JobStatus:
    """Return a status with these fields. What their parts must have besides is defaulted."""
    raw = dict(given)
    if raw.get("membership") is not None:
        raw["membership"] = MEMBERSHIP | raw["membership"]
    for name, default in (("conditions", CONDITION), ("incidents", INCIDENT)):
        raw[name] = [default | one for one in raw.get(name, ())]
    return parse_status({"status": raw})


def uid_of(slot: int, attempt: int = 0) -> str:
    """Return the UID that the builders give a pod."""
    return f"uid-{slot}.{attempt}"


def remembered(
    workers: Mapping[str, WorkerMemory] | None = None, slots: Mapping[int, SlotMemory] | None = None, **changes: Any
) -> JobMemory:
    """Return the memory of an operator that has looked at the job before."""
    return JobMemory(**{"workers": workers or {}, "slots": slots or {}, "has_looked": True, **changes})


def counted(slot: int = 0, **changes: Any) -> dict[str, WorkerMemory]:
    """Return the memory of one pod, of whose ends these were counted."""
    return {uid_of(slot): WorkerMemory(Counted(**changes))}


def after(seen: Seen) -> JobMemory:
    """Return the memory after a plan that saw nothing but these failures."""
    slots = seen.nodes.last.keys() | seen.nodes.bad.keys()
    return remembered(
        {uid: WorkerMemory(each) for uid, each in seen.counted.items()},
        {n: SlotMemory(failed_on=seen.nodes.last.get(n), bad_node=seen.nodes.bad.get(n)) for n in slots},
        script=seen.script,
    )


def make_pod(slot: int = 0, attempt: int = 0, **changes: Any) -> Pod:
    """Return a running worker pod of the job `digits`."""
    values: dict[str, Any] = {
        "namespace": "default",
        "name": f"digits-worker-{slot}-{attempt}",
        "uid": uid_of(slot, attempt),
        "job": "digits",
        "job_uid": JOB_UID,
        "slot": slot,
        "attempt": attempt,
        "phase": "Running",
        "ip": f"10.0.{attempt}.{slot}",
        "node": f"node-{slot}",
        "running_since_s": LONG_AGO_S,
    }
    return Pod(**values | changes)


def make_condition(phase: str = Phase.READY, generation: int = 0, **changes: Any) -> Condition:
    """Return a session's condition; in a group it has heard, entered and (training) adopted its generation."""
    adopted = phase in (Phase.TRAINING, Phase.BROKEN, Phase.FINISHED, Phase.FINISHING, Phase.DONE)
    inside = adopted or phase in (Phase.FORMING, Phase.ADOPTING)
    values: dict[str, Any] = {
        "incarnation": 1,
        "generation": generation,
        "phase": phase,
        "heard": generation if inside else 0,
        "entered": generation if inside else 0,
        "adopted": generation if adopted else 0,
        "session": True,
    }
    return Condition(**values | changes)


def make_session(
    slot: int = 0, phase: str = Phase.READY, generation: int = 0, attempt: int = 0, **changes: Any
) -> AgentSession:
    """Return the connected session of a worker's agent. Fields of the condition may be given by name, too."""
    of_condition = ("incarnation", "heard", "entered", "adopted_to", "session", "step", "cause", "group", "busy")
    given = {k: changes.pop(k) for k in of_condition if k in changes}
    if "adopted_to" in given:
        given["adopted"] = given.pop("adopted_to")
    values: dict[str, Any] = {
        "pod_uid": uid_of(slot, attempt),
        "boot": "boot",
        "connected": True,
        "heard_at_s": 100.0,
        "condition": make_condition(phase, generation, **given),
        "condition_at_s": LONG_AGO_S,
        "store_port": 4000 + slot,
    }
    return AgentSession(**values | changes)


def make_seal(
    left: int,
    state: tuple[int, int] | None = None,
    *,
    adopted: int = 0,
    state_adopted: int = 0,
    is_backup: bool = False,
) -> Seal:
    """Return a seal; `state` is (generation, step)."""
    return Seal(left, StatePair(*state) if state else None, adopted, state_adopted, is_backup)


def make_fault(cause: str = "collective", **changes: Any) -> Fault:
    return Fault(cause, **changes)


def make_progress(step: int, **changes: Any) -> Progress:
    return Progress(step, **changes)


def make_worker(slot: int = 0, standing: str = Standing.TRAINING, attempt: int = 0, **changes: Any) -> Worker:
    """Return a worker with a pod and a connected session; available unless its standing says that it cannot be."""
    out = (Standing.LOST, Standing.SILENT, Standing.STARTING, Standing.DIED)
    if standing == Standing.OUTSIDE:
        session = make_session(slot, attempt=attempt)
    else:
        session = make_session(slot, Phase.TRAINING, 1, attempt)
    values: dict[str, Any] = {
        "id": MemberId(slot, attempt),
        "pod": make_pod(slot, attempt),
        "session": session,
        "standing": standing,
        "available": standing not in out,
        "since_s": 0.0,
    }
    return Worker(**values | changes)


def make_current(members: Iterable[int | tuple[int, int]] = (0, 1, 2), **changes: Any) -> Current:
    """Return generation 1, adopted by these members (slots, or (slot, attempt))."""
    ids = tuple(MemberId(m, 0) if isinstance(m, int) else MemberId(*m) for m in members)
    values: dict[str, Any] = {
        "number": 1,
        "uid": "g1",
        "kind": FORCED,
        "members": ids,
        "adopted": True,
        "announced_at_s": 0.0,
        "incarnations": {uid_of(*m): 1 for m in ids},
    }
    values |= changes
    if not values["adopted"]:
        values.setdefault("attempts", 1)
    return Current(**values)


def make_older(number: int, *uids: str) -> OlderGeneration:
    return OlderGeneration(number, f"g{number}", tuple(uids))


def make_bounds(replicas: int = 3, minimum: int = 2, **changes: Any) -> Bounds:
    return Bounds(**{"replicas": replicas, "minimum": minimum, "elastic": True} | changes)


class JobBuilder:
    """`make_job().with_replicas(4).elastic(2, 5).build()`."""

    def __init__(self) -> None:
        self._spec: dict[str, Any] = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 8}}
        self._status: Manifest | None = None
        self._metadata: dict[str, Any] = {}

    def with_replicas(self, replicas: int) -> JobBuilder:
        self._spec["replicas"] = replicas
        return self

    def elastic(self, low: int, high: int) -> JobBuilder:
        self._spec["elasticPolicy"] = {"minReplicas": low, "maxReplicas": high}
        return self

    def fixed(self) -> JobBuilder:
        self._spec["elasticPolicy"] = None
        return self

    def with_recovery(self, **recovery: Any) -> JobBuilder:
        self._spec["recovery"] = recovery
        return self

    def with_spec(self, **spec: Any) -> JobBuilder:
        self._spec.update(spec)
        return self

    def with_status(self, status: Mapping[str, Any]) -> JobBuilder:
        self._status = dict(status)
        return self

    def with_created(self, at: str) -> JobBuilder:
        self._metadata["creationTimestamp"] = at
        return self

    def manifest(self) -> Manifest:
        """Return the object as the API server would hold it."""
        raw = stored_job(status=self._status, **{k: v for k, v in self._spec.items() if v is not None})
        if self._spec["elasticPolicy"] is None:
            del raw["spec"]["elasticPolicy"]
        raw["metadata"] |= self._metadata
        return raw

    def build(self) -> Job:
        return parse_job(self.manifest())


def make_job() -> JobBuilder:
    """Return the builder of a job of 3 workers, elastic from 1 to 8."""
    return JobBuilder()
