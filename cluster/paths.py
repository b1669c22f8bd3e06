"""Paths of the cluster's files. No other module spells a path below `.cache/cluster/`."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = Path(__file__).resolve().parent
GO_MODULE = SOURCES / "go"


def cache() -> Path:
    """Return the directory of everything that is built or run. REGROUP_CLUSTER_DIR moves it to another file system."""
    return Path(os.environ.get("REGROUP_CLUSTER_DIR") or REPOSITORY / ".cache" / "cluster").absolute()


def bin_dir() -> Path:
    """Return the directory of the built programs."""
    return cache() / "bin"


def state() -> Path:
    """Return the directory of the running cluster; `down` removes it."""
    return cache() / "state"


def images() -> Path:
    """Return the directory of built images in OCI layout; it outlives `down`."""
    return cache() / "images"


def kubeconfig() -> Path:
    """Return the administrator's kubeconfig of the cluster that `up` starts."""
    return state() / "pki" / "admin.kubeconfig"
