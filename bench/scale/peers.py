"""The systems beside which Regroup is measured: Kubernetes' own Job, JobSet, and Kubeflow Trainer on top of it.

Each job is N pods of one template that train one thing together: an Indexed Job, a JobSet of one such Job, a TrainJob of N nodes
under the delivered `torch-distributed` runtime. Requests and CPU time of the Job controller belong to all three.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import yaml

from bench.scale import builds
from bench.scale.histogram import milliseconds
from bench.scale.install import Controller, Installed, install, metrics_page
from bench.scale.plane import Plane
from bench.scale.system import NAMESPACE, Submission
from cluster import binaries
from cluster.kubectl import Kubectl

IMAGE = "registry.k8s.io/pause:3.10"
RUNTIME = "torch-distributed"

JOBSET = Controller(
    name="jobset",
    build=builds.JOBSET,
    program="jobset",
    module="sigs.k8s.io/jobset",
    manifests="config",
    resources=["default"],
    config="components/manager/controller_manager_config.yaml",
    certificates="internalCertManagement",
    namespace="jobset-system",
    account="jobset-controller-manager",
)
TRAINER = Controller(
    name="trainer",
    build=builds.TRAINER,
    program="trainer-controller-manager",
    module="github.com/kubeflow/trainer/v2",
    manifests="manifests",
    resources=["overlays/manager/namespace.yaml", "base/crds", "base/rbac", "base/webhook"],
    config="base/manager/controller_manager_config.yaml",
    certificates="certManagement",
    namespace="kubeflow-system",
    account="kubeflow-trainer-controller-manager",
)
_CHANGED = (
    "It runs on the machine and not in a pod: its webhooks are called at 127.0.0.1 with a given certificate, "
    "and its own making of certificates is off."
)


class Job:
    """Kubernetes' Job by itself."""

    name, title, changed = "job", "Job 1.36", ""
    kinds: Collection[str] = ()

    def start(self, plane: Plane) -> None:
        """Keep the plane, which has the controller already."""
        self._plane = plane

    def submit(self, i: int, num_pods: int) -> Submission:
        """Return one Indexed Job."""
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": _name(i)}, "spec": job_spec(num_pods)}
        return Submission(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs", body)

    def is_running(self, resource: Mapping[str, Any]) -> bool:
        """All pods are ready."""
        return bool(resource.get("status", {}).get("ready") == resource["spec"]["parallelism"])

    def pids(self) -> Mapping[str, int]:
        """Return nothing of its own: the Job controller is the plane's, and `load` counts it for all systems."""
        return {}

    def users(self) -> Collection[str]:
        """As for `pids`."""
        return ()

    def details(self) -> Mapping[str, Any]:
        """Return how long its syncs took."""
        page = metrics_page(self._plane, self._plane.job_metrics) or ""
        found = milliseconds(page, "job_controller_job_sync_duration_seconds")
        return {} if found is None else {"reconcile_ms": found}

    def stop(self) -> None:
        """Do nothing: the plane ends it."""


class JobSet:
    """JobSet and its webhooks. `pod_names`: it makes a headless Service, as it does by default."""

    name, title, changed = "jobset", "JobSet 0.12", _CHANGED
    kinds: Collection[str] = ("jobsets",)

    def __init__(self, *, pod_names: bool = True) -> None:
        self._pod_names = pod_names
        if not pod_names:
            self.name, self.title = "jobset_by_ip", "JobSet 0.12, enableDNSHostnames: false"

    def start(self, plane: Plane) -> None:
        """Install it and wait until it is ready."""
        self._plane = plane
        self._jobset = install(plane, JOBSET)

    def submit(self, i: int, num_pods: int) -> Submission:
        """Return a JobSet of one replicated Job."""
        replicated = {"name": "worker", "replicas": 1, "template": {"spec": job_spec(num_pods)}}
        body = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": _name(i)},
            "spec": {"replicatedJobs": [replicated], "network": {"enableDNSHostnames": self._pod_names}},
        }
        return Submission(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets", body)

    def is_running(self, resource: Mapping[str, Any]) -> bool:
        """Its one Job is ready."""
        return _ready_jobs(resource.get("status", {}).get("replicatedJobsStatus")) == 1

    def pids(self) -> Mapping[str, int]:
        """Its one process."""
        return {"jobset": self._jobset.pid}

    def users(self) -> Collection[str]:
        """Its service account."""
        return (self._jobset.user,)

    def details(self) -> Mapping[str, Any]:
        """Return how long its reconciles of JobSets took."""
        return _reconciles(self._plane, self._jobset, "jobset")

    def stop(self) -> None:
        """End it."""
        self._plane.stop("jobset")


class Trainer(JobSet):
    """Kubeflow Trainer, which makes JobSets."""

    name, title = "trainer", "Trainer 2.3"
    kinds = ("jobsets", "trainjobs")

    def start(self, plane: Plane) -> None:
        """Install JobSet first, then Trainer and its torch runtime."""
        super().start(plane)
        self._trainer = install(plane, TRAINER)
        source = binaries.module_directory(TRAINER.build, TRAINER.module)
        runtime = (source / "manifests" / "base" / "runtimes" / "torch_distributed.yaml").read_text()
        Kubectl(plane.kubeconfig).apply(yaml.safe_load(runtime))

    def submit(self, i: int, num_pods: int) -> Submission:
        """Return a TrainJob of that many nodes."""
        trainer = {"image": IMAGE, "numNodes": num_pods, "resourcesPerNode": {"requests": {"cpu": "1"}}}
        body = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": _name(i)},
            "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": trainer},
        }
        return Submission(f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs", body)

    def is_running(self, resource: Mapping[str, Any]) -> bool:
        """Its one Job is ready."""
        return _ready_jobs(resource.get("status", {}).get("jobsStatus")) == 1

    def pids(self) -> Mapping[str, int]:
        """Return its own process and JobSet's."""
        return {"trainer": self._trainer.pid, **super().pids()}

    def users(self) -> Collection[str]:
        """Return its own service account and JobSet's."""
        return (self._trainer.user, *super().users())

    def details(self) -> Mapping[str, Any]:
        """Return how long its reconciles of TrainJobs took."""
        return _reconciles(self._plane, self._trainer, "trainjob_controller")

    def stop(self) -> None:
        """End both."""
        self._plane.stop("trainer")
        super().stop()


def job_spec(num_pods: int) -> dict[str, Any]:
    """Return the spec of an Indexed Job of that many pods that never end."""
    container = {"name": "worker", "image": IMAGE, "resources": {"requests": {"cpu": "1"}}}
    return {
        "completionMode": "Indexed",
        "parallelism": num_pods,
        "completions": num_pods,
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
    }


def _reconciles(plane: Plane, installed: Installed, controller: str) -> dict[str, Any]:
    page = metrics_page(plane, installed.metrics) or ""
    found = milliseconds(page, "controller_runtime_reconcile_time_seconds", controller=controller)
    return {} if found is None else {"reconcile_ms": found}


def _ready_jobs(statuses: Any) -> int:
    return sum(one.get("ready") or 0 for one in statuses or ())


def _name(i: int) -> str:
    return f"job-{i}"
