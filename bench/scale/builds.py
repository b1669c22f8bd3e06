"""What is built from other people's Go modules, and where: the fake kubelet and the systems that Regroup is compared with."""

from __future__ import annotations

from pathlib import Path

from cluster import paths
from cluster.binaries import Build

_MODULES = Path(__file__).parent / "go"


def _build(name: str, title: str, package: str, expected_s: float) -> Build:
    return Build(title, _MODULES / name, (package,), paths.cache() / "peers" / name, expected_s)


KWOK = _build("kwok", "kwok 0.8.0", "sigs.k8s.io/kwok/cmd/kwok", 60.0)
JOBSET = _build("jobset", "JobSet 0.12.0", "sigs.k8s.io/jobset", 60.0)
TRAINER = _build(
    "trainer", "Kubeflow Trainer 2.3.0", "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager", 60.0
)
