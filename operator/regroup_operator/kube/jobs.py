"""Jobs in the cluster: a live read, and a status write that only the newest reader wins.

Implements model.ports.JobStore. How often a status may be written is the controller's business. One verdict is given here:
a job that the API server has taken but that breaks a rule which only Python can check cannot be handed on as a Job, so
its reader writes the condition Accepted=False and the event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from regroup_operator.api import (
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    ConflictError,
    Job,
    NotFoundError,
    SpecError,
    parse_status,
    parse_stored,
    set_condition,
)
from regroup_operator.api.conditions import ACCEPTED
from regroup_operator.kube.client import Client, Resource
from regroup_operator.kube.events import EventRecorder, Regarding
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Key

JOBS = Resource(GROUP, VERSION, PLURAL)


class ClusterJobStore:
    """Reads and writes DistributedTrainingJobs by the API."""

    def __init__(
        self, client: Client, recorder: EventRecorder | None = None, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._wall_clock = wall_clock

    async def get(self, key: Key) -> Job | None:
        """Return the job as it is now, or None if it is gone.

        Raises SpecError for one that breaks a rule (its status says so by then), StatusError, UnavailableError.
        """
        try:
            raw = await self._client.get(JOBS, *key)
        except NotFoundError:
            return None
        try:
            return parse_stored(raw)
        except SpecError as error:
            await self._refuse(raw, error)
            raise

    async def write_status(self, job: Job, status: dict[str, Any]) -> Job:
        """Make `status` the job's whole status and return the job as stored.

        A PUT with resourceVersion and UID, hence a compare-and-swap and no merge: keys that are not in `status` are gone.
        Raises ConflictError when the job has changed since it was read, NotFoundError when it is gone.
        """
        stored = await self._put(job.raw, status)
        return parse_stored(stored)

    async def remove(self, job: Job) -> None:
        """Delete the job, and by its owner references its pods, if it has not changed since it was read.

        Raises ConflictError otherwise.
        """
        try:
            await self._client.delete(JOBS, job.namespace, job.name, uid=job.uid, resource_version=job.resource_version)
        except NotFoundError:
            return

    async def _put(self, raw: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        metadata = raw["metadata"]
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            # Only the status is taken from a write to /status, but the schema wants a whole object.
            "spec": raw["spec"],
            "status": status,
        }
        return await self._client.replace(JOBS, metadata["namespace"], metadata["name"], body, subresource="status")

    async def _refuse(self, raw: Mapping[str, Any], error: SpecError) -> None:
        metadata = raw["metadata"]
        old = parse_status(raw).to_dict()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall_clock()))
        conditions = set_condition(
            old.get("conditions", ()), ACCEPTED, "False", error.reason, str(error), now, metadata["generation"]
        )
        summary = {**old.get("summary", {}), "state": error.reason}
        status = {
            "phase": "Pending",
            **old,
            "observedGeneration": metadata["generation"],
            "conditions": conditions,
            "summary": summary,
        }
        if status == old:
            return
        try:
            await self._put(raw, status)
        except (ConflictError, NotFoundError):
            return  # It has changed already, and that change leads here again.
        if self._recorder is not None:
            about = Regarding(metadata["namespace"], metadata["name"], metadata["uid"], metadata["resourceVersion"])
            self._recorder.record(about, EventNote("Warning", error.reason, str(error)))
