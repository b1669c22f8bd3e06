"""What `bench.scale` measures: one system that makes the pods of a job, seen through one small interface.

`peers` has JobSet, Kubeflow Trainer and the plain Job; `operator` has Regroup. `load` drives each of them in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from bench.scale.plane import Plane

NAMESPACE = "default"
"""Where all measured jobs are."""


@dataclass(frozen=True)
class Submission:
    """One object to create: POST `body` to the collection `path`, such as /apis/batch/v1/namespaces/default/jobs."""

    path: str
    body: Mapping[str, Any]


class System(Protocol):
    """One system on one fresh control plane. Calls come in the order in which the methods stand here, from one thread."""

    @property
    def name(self) -> str:
        """Its key in scale.json: regroup, jobset, trainer or job."""

    @property
    def title(self) -> str:
        """Its name in the table, with its version."""

    @property
    def changed(self) -> str:
        """One sentence: what differs from an installation in a cluster; empty where nothing does."""

    @property
    def kinds(self) -> Collection[str]:
        """Plurals of its custom resources that own pods, or what makes the pods."""

    def start(self, plane: Plane) -> None:
        """Install definitions and rights, start the processes, and return once the first job may be submitted."""

    def submit(self, i: int, num_pods: int) -> Submission:
        """Return job number `i` with `num_pods` pods. Pure: the caller sends it. All have the same `path`.

        Every pod that is made for it is in NAMESPACE.
        """

    def is_running(self, resource: Mapping[str, Any]) -> bool:
        """Return whether the job's own status says that all its pods run. `resource` is the object as last watched."""

    def pids(self) -> Mapping[str, int]:
        """Return the processes whose CPU time and memory count as its own, by a name for the report."""

    def users(self) -> Collection[str]:
        """Return the API users whose requests count as its own, without the controller manager's service accounts."""

    def details(self) -> Mapping[str, Any]:
        """Return what else it tells of itself for the report, right after the measurement; may be empty.

        `reconcile_ms`: {"p50": ..., "p99": ...}, where it has a histogram of its reconciles.
        """

    def stop(self) -> None:
        """End its processes and wait for them. Called also when `start` raised."""
