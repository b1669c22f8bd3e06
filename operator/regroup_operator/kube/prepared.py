"""Watches the Services and ConfigMaps of jobs, and reports those that are gone.

Without them pods that start find no names, or wait for a volume in silence. Two slim watches serve all jobs. An
operator whose chart gives no right to watch them looks at them every few minutes all the same (ClusterWorkers.prepare).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from regroup_operator.api.names import LABEL_JOB_NAME
from regroup_operator.kube.client import CONFIG_MAPS, SERVICES, Client
from regroup_operator.kube.informer import Informer
from regroup_operator.kube.pods import controller_of
from regroup_operator.model.records import Key


class Owned(NamedTuple):
    """The job that an object belongs to."""

    key: Key
    job_uid: str


def owned(item: Mapping[str, Any], _: Owned | None = None) -> Owned | None:
    """Return the job that an object belongs to, or None."""
    owner = controller_of(item)
    return None if owner is None else Owned((item["metadata"]["namespace"], owner["name"]), owner["uid"])


class PreparedObjects:
    """The Services and ConfigMaps of all jobs."""

    def __init__(self, client: Client, namespaces: Sequence[str], on_lost: Callable[[Key, str], None]) -> None:
        """Watch some namespaces; none means all.

        `on_lost(key, UID of the job)` is called when an object of the job has vanished, or does not belong to it any
        more. It is also called for a job that was deleted.
        """

        def changed(old: Owned | None, new: Owned | None) -> None:
            if old is not None and new != old:
                on_lost(*old)

        self.informers = [
            Informer[Owned](client, resource, owned, changed, namespace=namespace, label_selector=LABEL_JOB_NAME)
            for resource in (SERVICES, CONFIG_MAPS)
            for namespace in (namespaces or (None,))
        ]

    async def run(self) -> None:
        """Run the watches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self.informers:
                tasks.create_task(informer.run())
