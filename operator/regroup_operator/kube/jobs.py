"""Jobs in the cluster: a cache that the watch and our own writes fill, and a status write that only the newest reader wins.

`CachedJobStore` implements model.ports.JobStore over `JobApi`. The controller decides how often a status is written.
One verdict is given here. The API server may have accepted a job's fields by another schema than the operator's. Such a
job cannot be handed on as a Job before its start, so its reader writes the condition Accepted=False and the event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from regroup_operator.api import (
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    ConflictError,
    Job,
    NotFoundError,
    SpecError,
    UnavailableError,
    is_ours,
    parse_status,
    parse_stored,
    set_condition,
)
from regroup_operator.api.conditions import ACCEPTED
from regroup_operator.api.status import Summary
from regroup_operator.kube.client import Client, Resource
from regroup_operator.kube.events import EventRecorder, Regarding
from regroup_operator.kube.job_cache import Entry, JobCache, Listed, key_of, version_of
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Key

JOBS = Resource(GROUP, VERSION, PLURAL)


class JobApi(Protocol):
    """The requests of the store. Each may raise UnavailableError."""

    async def get(self, key: Key) -> Mapping[str, Any] | None:
        """Return the object as it is now, or None if it is gone."""
        ...

    async def put_status(self, raw: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make `status` the whole status if the object is still `raw`; return it as stored. Raises ConflictError, NotFoundError."""
        ...

    async def delete(self, job: Job) -> None:
        """Delete this job at this version. Raises ConflictError, NotFoundError."""
        ...


class ClusterJobApi:
    """JobApi by requests to the API server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def get(self, key: Key) -> Mapping[str, Any] | None:
        try:
            return slim(await self._client.get(JOBS, *key))
        except NotFoundError:
            return None

    async def put_status(self, raw: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace the status by a PUT with resourceVersion and UID: a compare-and-swap that merges nothing."""
        metadata = raw["metadata"]
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            # Only the status is taken from a write to /status, but the schema wants a whole object.
            "spec": raw["spec"],
            "status": status,
        }
        namespace, name = key_of(raw)
        return slim(await self._client.replace(JOBS, namespace, name, body, subresource="status"))

    async def delete(self, job: Job) -> None:
        await self._client.delete(JOBS, job.namespace, job.name, uid=job.uid, resource_version=job.resource_version)

    async def list_metadata(self, namespace: str | None) -> Listed:
        """Return UID and version of every job of a namespace, or of all with None."""
        found: dict[Key, tuple[str, int]] = {}
        token = ""
        while True:
            page = await self._client.list(JOBS, namespace, continue_token=token, metadata_only=True)
            for item in page.get("items") or []:
                found[key_of(item)] = item["metadata"]["uid"], version_of(item)
            token = page["metadata"].get("continue") or ""
            if not token:
                return found


def slim(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object without metadata.managedFields, which is most of it and which nothing reads."""
    metadata = {key: value for key, value in raw["metadata"].items() if key != "managedFields"}
    return {**raw, "metadata": metadata}


class CachedJobStore:
    """Reads jobs from the cache, and from the API server if the cache is in doubt; writes through the cache.

    A plan may be made from an older status: its write is then refused, which is part of rule PERSIST. The cache is in
    doubt at a term's first plan, after a refused write, and after a write without an answer.
    """

    def __init__(
        self,
        api: JobApi,
        cache: JobCache,
        *,
        look: Callable[[Key], None] = lambda _: None,
        recorder: EventRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read and write jobs by `api` and `cache`.

        `look(key)` is called after a write, so that the job is planned again without waiting for the watch. It is not
        called after a write of progress only.
        """
        self._api, self._cache, self._look, self._recorder = api, cache, look, recorder
        self._clock, self._wall_clock = clock, wall_clock

    async def get(self, key: Key) -> Job | None:
        """Return the job as last known, or None if it is gone, or another controller's.

        Raises SpecError for a job that cannot be read (`parse_stored`), after its status says so. Raises StatusError,
        UnavailableError. Raises ConflictError or NotFoundError if such a job has changed before that write. It has to
        be read again, after a back-off, since a change that the watch showed during the write was no news.
        """
        entry = self._cache.get(key)
        if entry is None or entry.confirmed_s is None:
            entry = await self._read(key)
            if entry is None:
                return None
        if not is_ours(entry.raw):
            return None
        try:
            return self._cache.parse(key, entry)
        except SpecError as error:
            await self._refuse(entry.raw, error)
            raise

    async def confirm(self, job: Job, within_s: float) -> None:
        """Return if the API server has confirmed within the last `within_s` that the job exists, else ask it.

        Raises ConflictError if the job has changed since it was read, or is gone.
        """
        entry = self._cache.get(job.key)
        if entry is None or entry.confirmed_s is None or self._clock() > entry.confirmed_s + within_s:
            entry = await self._read(job.key)
        if entry is None or entry.raw["metadata"]["uid"] != job.uid or entry.version != version_of(job.raw):
            raise ConflictError(f"{job.namespace}/{job.name} has changed since it was planned for.")

    async def write_status(self, job: Job, status: dict[str, Any], *, progress_only: bool = False) -> Job:
        """Make `status` the job's whole status and return the job as stored. Keys that are not in `status` are removed.

        Raises ConflictError if the job has changed since it was read, NotFoundError if it is gone.
        """
        stored = await self._write(job.raw, status, follows=not progress_only)
        entry = self._cache.get(job.key)
        if entry is not None and entry.raw is stored:
            return self._cache.parse(job.key, entry)
        return parse_stored(stored)

    async def remove(self, job: Job) -> None:
        """Delete the job, and by its owner references its pods, if it has not changed since it was read.

        Raises ConflictError otherwise.
        """
        try:
            await self._api.delete(job)
        except NotFoundError:
            pass
        except (ConflictError, UnavailableError):
            self._cache.doubt(job.key)
            raise
        self._cache.drop(job.key, job.uid)

    async def _read(self, key: Key) -> Entry | None:
        before = self._cache.get(key)
        raw = await self._api.get(key)
        if raw is None:
            if before is not None:
                self._cache.drop(key, before.raw["metadata"]["uid"])
            return None
        self._cache.answered(raw, before, self._clock())
        return self._cache.get(key)

    async def _write(
        self, raw: Mapping[str, Any], status: Mapping[str, Any], *, follows: bool = True
    ) -> Mapping[str, Any]:
        """Write the status and return the object as stored. With `follows` the job is planned again afterwards."""
        key = key_of(raw)
        before = self._cache.get(key)
        try:
            with self._cache.writing(key):
                stored = await self._api.put_status(raw, status)
        except NotFoundError:
            self._cache.drop(key, raw["metadata"]["uid"])
            raise
        except (ConflictError, UnavailableError):
            self._cache.doubt(key)
            raise
        self._cache.answered(stored, before, self._clock())
        newest = self._cache.get(key)
        if follows or newest is None or newest.version != version_of(stored):
            self._look(key)
        return stored

    async def _refuse(self, raw: Mapping[str, Any], error: SpecError) -> None:
        metadata = raw["metadata"]
        old = parse_status(raw)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall_clock()))
        conditions = set_condition(
            old.conditions, ACCEPTED, "False", error.reason, str(error), now, metadata["generation"]
        )
        status = old.with_fields(
            phase=old.phase or "Pending",
            observed_generation=metadata["generation"],
            conditions=conditions,
            summary=(old.summary or Summary()).with_fields(state=error.reason),
        )
        if status == old:
            return
        await self._write(raw, status.to_dict())
        if self._recorder is not None:
            about = Regarding(metadata["namespace"], metadata["name"], metadata["uid"], metadata["resourceVersion"])
            self._recorder.record(about, EventNote("Warning", error.reason, str(error)))
