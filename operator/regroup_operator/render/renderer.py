"""All of a job's objects: the `Rendering` that kube/cluster_workers.py asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regroup_operator.api import Job
from regroup_operator.render.objects import config_map, service
from regroup_operator.render.pod import RenderSettings, dry_run_pod, worker_pod
from regroup_operator.render.role import role_pod


@dataclass(frozen=True)
class Renderer:
    """Renders with the operator's settings and the CA bundle of the moment."""

    settings: RenderSettings

    ca_bundle: Callable[[], str]
    """Returns the CA certificates that agents shall trust now, PEM, old and new."""

    def pod(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> dict[str, Any]:
        """Return the worker's pod. Raises SpecError."""
        return worker_pod(job, slot, attempt, settings=self.settings, avoid_nodes=avoid_nodes)

    def trial_pod(self, job: Job) -> dict[str, Any]:
        """Return a pod for a dry run, with generateName. Raises SpecError."""
        return dry_run_pod(job, settings=self.settings)

    def role_pod(self, job: Job, role: str, index: int, attempt: int) -> dict[str, Any]:
        """Return the pod of a role."""
        return role_pod(job, role, index, attempt)

    def service(self, job: Job) -> dict[str, Any] | None:
        """Return the headless Service; None: the job wants no names for its pods."""
        return service(job)

    def config_map(self, job: Job) -> dict[str, Any]:
        """Return the ConfigMap with the CA bundle of now."""
        return config_map(job, self.ca_bundle())
