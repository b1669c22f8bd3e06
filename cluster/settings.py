"""The options of `up`, kept in the cluster's state so that later commands use the same ones."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster import paths


@dataclass(frozen=True)
class Settings:
    """The options of one cluster. They are fixed while it is up, except for the number of nodes, which may grow."""

    num_nodes: int = 3
    num_gpus: int = 0
    """Fake `nvidia.com/gpu` capacity of each node; 0 is none."""
    node_grace_s: int = 10
    """Silence after which a node is NotReady, in seconds. Kubernetes' default is 50."""
    toleration_s: int = 300
    """Time for which pods stay bound to a NotReady node. It is Kubernetes' default, so that Regroup reacts first."""

    def save(self) -> None:
        """Write the settings into the cluster's state."""
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_text(json.dumps(asdict(self)))


def load() -> Settings | None:
    """Return the settings of the cluster that is up here, or None if there is none."""
    try:
        return Settings(**json.loads(_file().read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _file() -> Path:
    return paths.state() / "settings.json"
