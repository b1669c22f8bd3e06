"""Jobs of a cluster, with the rights of the user."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from regroup_client import log_streams, views
from regroup_client.api import EVENTS, JOBS, PODS, Api, Kind, Object
from regroup_client.errors import ApiError, JobError, LostError
from regroup_client.jobs import Verb, Wanted
from regroup_client.log_streams import Patience
from regroup_client.pod_logs import PodLogs

RETRY_S = 2.0
"""Time between two attempts to watch a job again."""
WATCH_S = 240
"""Length of one watch. The next one begins with the job as it is, so that a lost connection is noticed."""
END_S = 60.0
"""Longest wait for the end of a job that is deleted."""
POLL_S = 0.2


class ClusterJobs:
    """Implements Jobs for the namespace of an Api."""

    def __init__(self, api: Api, *, everywhere: bool = False) -> None:
        """`everywhere`: jobs of all namespaces are listed."""
        self._api, self._everywhere = api, everywhere

    def all(self) -> list[views.JobView]:
        return list(map(views.job_view, self._api.list(JOBS, everywhere=self._everywhere)))

    def look(self, job: str) -> views.JobView:
        found, unread = self.read(job), list[str]()
        pods = self._permitted(PODS, unread, {"labelSelector": f"regroup.dev/job-name={job}"})
        events = self._permitted(EVENTS, unread, {"fieldSelector": f"involvedObject.name={job}"})
        return views.job_view(found, pods, events, unread=unread)

    def _permitted(self, kind: Kind, unread: list[str], query: Mapping[str, str]) -> list[Object]:
        """Return the objects of a kind; if the user may not read them, none, and a sentence in `unread`."""
        try:
            return self._api.list(kind, everywhere=False, **query)
        except ApiError as error:
            if error.status != 403:
                raise
            unread.append(f"You may not read the {kind.plural} of the job, so they are not shown.")
            return []

    def read(self, job: str) -> views.Object:
        return self._api.get(JOBS, job)

    def changes(self, job: str) -> Iterator[views.Object]:
        patience: Patience | None = None  # none before the first answer: an error may be the user's
        while True:
            try:
                yield self.read(job)
                patience = Patience()
                for event in self._api.watch(JOBS, fieldSelector=f"metadata.name={job}", timeoutSeconds=str(WATCH_S)):
                    if event["type"] == "DELETED":
                        raise ApiError(404, "NotFound", f"The job {job} was deleted.")
                    yield event["object"]
            except ApiError as error:
                if patience is None or error.is_final:
                    raise
                if patience.ends(time.monotonic()):
                    raise LostError(f"{error} It has been so for {log_streams.PATIENCE_S:.0f} s.") from None
                time.sleep(RETRY_S)

    def change(self, job: str, verb: Verb, patch: Mapping[str, Any]) -> None:
        # Who may only resize has rights on this part of the object, as for `kubectl scale`.
        self._api.patch(JOBS, job, {"spec": dict(patch)}, subresource="scale" if verb == "scale" else "")

    def delete(self, job: str) -> str:
        uid = self.read(job)["metadata"]["uid"]
        self._api.delete(JOBS, job, uid=uid)
        deadline_s = time.monotonic() + END_S
        while (found := self._api.find(JOBS, job)) is not None and found["metadata"]["uid"] == uid:
            if time.monotonic() > deadline_s:
                raise JobError(
                    f"The job {job} is being deleted, and is still there after {END_S:.0f} s. See its metadata.finalizers."
                )
            time.sleep(POLL_S)
        return f"{job} was deleted; its checkpoints stay"

    def logs(self, job: str, wanted: Wanted, since_s: int | None = None) -> PodLogs:
        return PodLogs(self._api, job, wanted, since_s)
