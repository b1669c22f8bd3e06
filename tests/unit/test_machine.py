"""What the end-to-end tests look for on the machine after `cluster down`: what is the cluster's, and nothing else."""

from __future__ import annotations

import pytest

from cluster import paths
from tests.e2e.machine import ours


@pytest.mark.parametrize(
    "mount",
    [
        pytest.param(f"overlay {paths.cache().resolve()}/storage/overlay overlay", id="the image builder's storage"),
        pytest.param("/dev/vda /run/netns ext4", id="the directory of network namespaces"),
        pytest.param("nsfs /run/netns/regroup-n1 nsfs", id="a node's network"),
        pytest.param("tmpfs /var/lib/kubelet/pods/1/volumes/secret tmpfs", id="a pod's secret"),
        pytest.param("/dev/vda /etc/cni/net.d ext4", id="a directory of a node"),
        pytest.param("cgroup2 /sys/fs/cgroup/unified cgroup2", id="a hierarchy of control groups"),
    ],
)
def test_mount_that_a_cluster_could_leave_is_looked_at(mount: str) -> None:
    assert list(ours(f"{mount} rw,relatime 0 0\n")) == [mount]


@pytest.mark.parametrize(
    "mount",
    [
        pytest.param("tmpfs /tmp/chaos-7-x/checkpoints tmpfs", id="the small disk of a local chaos job"),
        pytest.param("/dev/vda /etc/cni/net.d-old ext4", id="a neighbour with a longer name"),
        pytest.param("fuse /home/somebody/remote fuse.sshfs", id="somebody's own"),
    ],
)
def test_mount_of_another_program_is_none_of_its_business(mount: str) -> None:
    assert list(ours(f"{mount} rw,relatime 0 0\n")) == []
