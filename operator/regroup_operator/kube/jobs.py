"""Jobs in the cluster: a live read, and a status write that only the newest reader wins.

Implements model.ports.JobStore. How often a status may be written is the controller's business.
"""

from __future__ import annotations

from typing import Any

from regroup_operator.api import GROUP, KIND, PLURAL, VERSION, Job, NotFoundError, parse_job
from regroup_operator.kube.client import Client, Resource
from regroup_operator.model.records import Key

JOBS = Resource(GROUP, VERSION, PLURAL)


class ClusterJobStore:
    """Reads and writes DistributedTrainingJobs by the API."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def get(self, key: Key) -> Job | None:
        """Return the job as it is now, or None if it is gone. Raises SpecError, StatusError (api.parse_job), UnavailableError."""
        try:
            raw = await self._client.get(JOBS, *key)
        except NotFoundError:
            return None
        return parse_job(raw)

    async def write_status(self, job: Job, status: dict[str, Any]) -> Job:
        """Make `status` the job's whole status and return the job as stored.

        A PUT with resourceVersion and UID, hence a compare-and-swap and no merge: keys that are not in `status` are gone.
        Raises ConflictError when the job has changed since it was read, NotFoundError when it is gone.
        """
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
                "resourceVersion": job.resource_version,
            },
            # Only the status is taken from a write to /status, but the schema wants a whole object.
            "spec": job.raw["spec"],
            "status": status,
        }
        stored = await self._client.replace(JOBS, job.namespace, job.name, body, subresource="status")
        return parse_job(stored)
