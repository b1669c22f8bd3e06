"""Hear that a job's Service or ConfigMap is gone: without them pods that start find no names, or wait for a volume in silence.

Two watches for all jobs, slim; nothing is asked for by job. An operator without the right to watch them (of an earlier chart) looks
at them every few minutes all the same (ClusterWorkers.prepare).
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
    """What is kept of an object: whose it is."""

    key: Key
    job_uid: str


def owned(item: Mapping[str, Any], _: Owned | None = None) -> Owned | None:
    """Return whose the object is, None: no job's."""
    owner = controller_of(item)
    return None if owner is None else Owned((item["metadata"]["namespace"], owner["name"]), owner["uid"])


class PreparedObjects:
    """The Services and ConfigMaps of all jobs."""

    def __init__(self, client: Client, namespaces: Sequence[str], on_lost: Callable[[Key, str], None]) -> None:
        """`namespaces` empty: all. `on_lost(key of the job, its UID)`: an object of it has vanished, or is its no more; of a job
        that was deleted, too."""

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
