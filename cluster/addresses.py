"""The cluster's address plan. Pure: names and numbers only.

One bridge joins the machine and its nodes; each node routes its own range of pods. kube-proxy serves the services.
"""

import re
from dataclasses import dataclass

from cluster.errors import ClusterError

BRIDGE = "regroup0"
HOST_ADDRESS = "10.99.0.1"
BRIDGE_MAC = "0a:52:67:00:00:01"
"""Locally administered."""
NODE_NETWORK = "10.99.0.0/24"
POD_NETWORK = "10.98.0.0/16"
API_PORT = 6443
MAX_NODES = 100


@dataclass(frozen=True)
class Node:
    """One node: n1 is number 1. Every name that the node leaves on the machine is derived here."""

    number: int

    @property
    def name(self) -> str:
        """Kubernetes' name of the node."""
        return f"n{self.number}"

    @property
    def address(self) -> str:
        """The node's own address on the bridge."""
        return f"10.99.0.{10 + self.number}"

    @property
    def pod_range(self) -> str:
        """The addresses of the node's pods."""
        return f"10.98.{self.number}.0/24"

    @property
    def network_namespace(self) -> str:
        """The name under /run/netns."""
        return f"regroup-{self.name}"

    @property
    def link(self) -> str:
        """The machine's end of the node's cable (at most 15 characters)."""
        return f"regroup-{self.name}"

    @property
    def cgroup(self) -> str:
        """The node's cgroup, below the root of each hierarchy."""
        return f"regroup-{self.name}"


def nodes(count: int) -> list[Node]:
    """Return n1..n`count`; raise ClusterError when that many have no addresses."""
    if not 1 <= count <= MAX_NODES:
        raise ClusterError(f"--nodes is {count}; choose between 1 and {MAX_NODES}.")
    return [Node(number) for number in range(1, count + 1)]


def parse_node(name: str) -> Node:
    """Return the node of a name such as n2."""
    match = re.fullmatch(r"n([1-9]\d{0,2})", name)
    if not match or int(match[1]) > MAX_NODES:
        raise ClusterError(f"{name!r} is no node's name; nodes are called n1, n2, n3.")
    return Node(int(match[1]))
