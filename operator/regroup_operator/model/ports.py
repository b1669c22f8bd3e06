"""The ports through which the controller meets the world. kube/ implements them for a cluster, regroup_cli/local.py for
local processes. Every method may raise UnavailableError (api.errors: try again later); what else it raises
stands in its docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from regroup_operator.api import Job, RegroupError
from regroup_operator.model.records import Key, Pod


class AlreadyExists(RegroupError):
    """A pod of that name exists and is not ours or is terminating: take the next attempt number."""


class Unauthorized(RegroupError):
    """401: the text is the HTTP answer's sentence."""


class Forbidden(RegroupError):
    """403: the text is the HTTP answer's sentence."""


@dataclass(frozen=True)
class EventNote:
    """A Kubernetes event about the job. `kind` is Normal or Warning; `reason` CamelCase; `note` one sentence."""

    kind: str
    reason: str
    note: str


class JobStore(Protocol):
    async def get(self, key: Key) -> Job | None:
        """Return the job as last known, or None if it is gone, or another controller's. It is at least as new as what this process
        wrote last. It may be older than what others wrote: then a write is refused (rule PERSIST)."""
        ...

    async def confirm(self, job: Job, within_s: float) -> None:
        """Return if the job was there, as it was read, within the last `within_s` seconds. Raises ConflictError otherwise."""
        ...

    async def write_status(self, job: Job, status: dict[str, Any], *, progress_only: bool = False) -> Job:
        """Make `status` the job's whole status, if the job's resourceVersion is still the newest. Raises ConflictError.

        `progress_only`: no decision depends on what changes, and the job need not be planned again because of it."""
        ...

    async def remove(self, job: Job) -> None:
        """Delete the job and what it owns, if it is still this one at this resourceVersion. Raises ConflictError otherwise."""
        ...


class PodLookup(Protocol):
    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return a worker pod from the informer's memory. Never asks the API."""
        ...


class Workers(PodLookup, Protocol):
    def list(self, key: Key, job_uid: str) -> tuple[Pod, ...]:
        """Return the job's worker pods that the API has, from the informer's memory, sorted by (slot, attempt)."""
        ...

    async def prepare(self, job: Job) -> None:
        """Make sure that the job's ConfigMap, and the Service if it has one, exist and are current. Cheap when nothing changed."""
        ...

    async def validate(self, job: Job) -> None:
        """Dry-run the worker pod with strict field validation. Raises SpecError with one sentence."""
        ...

    async def create(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> bool:
        """Create a worker pod. Returns False if this job has one of that name already. Raises AlreadyExists, SpecError."""
        ...

    def roles(self, key: Key, job_uid: str) -> tuple[Pod, ...]:
        """Return the pods of the job's roles that the API has, from the informer's memory, sorted."""
        ...

    async def create_role(self, job: Job, role: str, index: int, attempt: int) -> bool:
        """Create the pod of a role. Returns and raises as `create`."""
        ...

    async def delete(self, pod: Pod) -> None:
        """Delete a pod with its UID as precondition and its own grace. A pod that is gone is no error."""
        ...

    def on_change(self, callback: Callable[[Key], None]) -> None:
        """Have `callback(key)` called whenever a pod of that job appears, changes or vanishes."""
        ...


class Authenticator(Protocol):
    async def authenticate(self, token: str, namespace: str, pod_name: str) -> Pod:
        """Return the pod that the token is bound to. Raises Unauthorized, Forbidden, UnavailableError."""
        ...

    def known(self, pod: Pod) -> Pod:
        """Return a pod that was authenticated as it is now: for each report on its stream. Never asks the API. Raises Forbidden: it
        is a worker no more."""
        ...


class Recorder(Protocol):
    def record(self, job: Job, note: EventNote) -> None:
        """Publish an event; never blocks, may lose it."""
        ...
