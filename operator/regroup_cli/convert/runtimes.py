"""Kubeflow's own runtimes for TrainJobs, in the short form of what Trainer installs (manifests/base/runtimes).

An installation may have others under these names, so a runtime in the files comes first.
"""

from __future__ import annotations

from typing import Any

STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK = "trainer.kubeflow.org/framework"


def _job(name: str, image: str, step: str = "") -> dict[str, Any]:
    template: dict[str, Any] = {"spec": {"template": {"spec": {"containers": [{"name": "node", "image": image}]}}}}
    if step:
        template = {"metadata": {"labels": {STEP: step}}, **template}
    return {"name": name, "template": template}


def _runtime(name: str, framework: str, policy: dict[str, Any], *jobs: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": {FRAMEWORK: framework}},
        "spec": {"mlPolicy": {"numNodes": 1, **policy}, "template": {"spec": {"replicatedJobs": list(jobs)}}},
    }


_DEEPSPEED = "ghcr.io/kubeflow/trainer/deepspeed-runtime"
_MPI = {"mpi": {"numProcPerNode": 1, "mpiImplementation": "OpenMPI", "runLauncherAsNode": True}}
WELL_KNOWN: dict[str, dict[str, Any]] = {
    one["metadata"]["name"]: one
    for one in (
        _runtime(
            "torch-distributed",
            "torch",
            {"torch": {}},
            _job("node", "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime", "trainer"),
        ),
        _runtime("jax-distributed", "jax", {"jax": {}}, _job("node", "nvcr.io/nvidia/jax:25.10-py3", "trainer")),
        _runtime(
            "xgboost-distributed",
            "xgboost",
            {"xgboost": {}},
            _job("node", "ghcr.io/kubeflow/trainer/xgboost-runtime", "trainer"),
        ),
        _runtime(
            "deepspeed-distributed",
            "deepspeed",
            _MPI,
            _job("node", _DEEPSPEED),
            _job("launcher", _DEEPSPEED, "trainer"),
        ),
    )
}
