"""The address plan: every node's names and addresses are its own."""

import pytest

from cluster import addresses
from cluster.addresses import Node
from cluster.errors import ClusterError


def test_nodes_share_neither_address_nor_range_nor_name() -> None:
    nodes = addresses.nodes(addresses.MAX_NODES)
    for attribute in ("name", "address", "pod_range", "network_namespace", "link", "cgroup"):
        assert len({getattr(node, attribute) for node in nodes}) == len(nodes), attribute


def test_no_node_has_the_machines_address_and_every_link_name_fits_the_kernel() -> None:
    nodes = addresses.nodes(addresses.MAX_NODES)
    assert addresses.HOST_ADDRESS not in {node.address for node in nodes}
    assert max(len(node.link) for node in nodes) <= 15
    assert all(0 < int(node.address.rpartition(".")[2]) < 255 for node in nodes)


@pytest.mark.parametrize("count", [0, -1, addresses.MAX_NODES + 1])
def test_count_of_nodes_outside_the_plan_is_refused(count: int) -> None:
    with pytest.raises(ClusterError, match=rf"--nodes is {count}; choose between 1 and {addresses.MAX_NODES}"):
        addresses.nodes(count)


@pytest.mark.parametrize("name", ["", "n", "n0", "n-1", "n01", "N1", "node1", "n1 ", "n101", "n9999"])
def test_name_that_is_no_nodes_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="nodes are called n1, n2, n3"):
        addresses.parse_node(name)


def test_name_of_a_node_is_read_back() -> None:
    assert [addresses.parse_node(node.name) for node in addresses.nodes(12)] == [Node(i) for i in range(1, 13)]
