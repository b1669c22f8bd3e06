"""The methods that jobs of a cluster and of this machine have in common, and the rules of changes.

The commands and the Python client call the same methods, so that both refuse the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from regroup_client import views
from regroup_client.errors import JobError
from regroup_client.log_streams import LogsError, Reader
from regroup_client.views import JobView, Object

Verb = Literal["scale", "suspend", "resume"]
_PARTICIPLES = {"scale": "resized", "suspend": "suspended", "resume": "resumed"}


@dataclass(frozen=True)
class Wanted:
    """The logs of a job that are read."""

    slot: int | None = None
    rank: int | None = None
    all_attempts: bool = False
    previous: bool = False


class Jobs(Protocol):
    """Jobs of a cluster or of this machine. Each method raises ClientError with one sentence."""

    def all(self) -> list[JobView]:
        """Return the jobs, without what their pods and events say."""

    def look(self, job: str) -> JobView:
        """Return all that is known of a job."""

    def read(self, job: str) -> Object:
        """Return the job's object."""

    def changes(self, job: str) -> Iterator[Object]:
        """Yield the job's object as it is, and after each change. It ends only where the job was deleted or is out of reach."""

    def change(self, job: str, verb: Verb, patch: Mapping[str, Any]) -> None:
        """Merge a patch into the job's spec. `verb` is for sentences."""

    def delete(self, job: str) -> str:
        """Delete a job of a cluster, or end one of this machine. Return a sentence on what is left."""

    def logs(self, job: str, wanted: Wanted, since_s: int | None = None) -> Reader:
        """Return the logs of a job. `since_s`: lines that are older than this many seconds need not be read."""


def change(jobs: Jobs, job: str, verb: Verb, replicas: int = 0) -> None:
    """Resize, suspend or resume a job. Raises JobError for a job that has ended, since nothing would come of it."""
    found = jobs.read(job)
    state, name = views.state(found), found["metadata"]["name"]
    if state in views.OVER:
        raise JobError(f"The job {name} has ended ({state}): it cannot be {_PARTICIPLES[verb]}. Start it again.")
    patch = {"replicas": replicas} if verb == "scale" else {"runPolicy": {"suspend": verb == "suspend"}}
    jobs.change(job, verb, patch)


def last_hang(jobs: Jobs, job: str) -> Object:
    """Return the incident with the stacks of the job's last hang. Raises JobError if there was none."""
    found = jobs.read(job)
    incidents = (found.get("status") or {}).get("incidents") or ()
    hung: Object | None = next((one for one in reversed(incidents) if one.get("stacks")), None)
    if hung is None:
        raise JobError(
            f"No hang of the job {found['metadata']['name']} is among its last incidents. `why` says what it waits for."
        )
    return hung


def slot_of(job: Object, wanted: Wanted, there: Iterable[int]) -> int | None:
    """Return the slot whose logs are wanted, or None for all. `there` are the slots that have a log.

    Raises LogsError for a rank or slot that the job does not have. A slot of a resizable job may have no pod yet.
    """
    ranks = views.ranks(job)
    if wanted.rank is not None:
        for member, of_it in ranks.items():
            if wanted.rank in of_it:
                return member.slot
        raise LogsError(_missing_rank(wanted.rank, job, sum(map(len, ranks.values()))))
    if wanted.slot is not None:
        spec = job.get("spec") or {}
        sizes = (spec.get("replicas"), (spec.get("elasticPolicy") or {}).get("maxReplicas"))
        last = max([0, *there, *(member.slot for member in ranks), *(size - 1 for size in sizes if size)])
        if not 0 <= wanted.slot <= last:
            name = job["metadata"]["name"]
            raise LogsError(
                f"Slot {wanted.slot} is not in the job {name}, whose slots are 0 to {last}. Give one of them."
            )
    return wanted.slot


def _missing_rank(rank: int, job: Object, num_ranks: int) -> str:
    if not num_ranks:
        return f"The job {job['metadata']['name']} has no ranks yet: its first generation has not formed. Use --slot N."
    return f"Rank {rank} is not in the newest generation, whose ranks are 0 to {num_ranks - 1}. Give one of them, or use --slot N."
