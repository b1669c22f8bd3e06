"""Checks that the machine can run nodes, and installs missing Debian packages.

Each fault is one ClusterError sentence with its remedy. Nothing but Debian packages is installed.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Literal

from cluster import addresses, paths, progress
from cluster.errors import ClusterError

PACKAGES: Mapping[str, str] = {
    # program -> Debian package
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}
BUILDER_PACKAGES: Mapping[str, str] = {"buildah": "buildah"}
REQUIRED_FREE_BYTES = 15 * 1024**3
V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")
_SEARCH_PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"

CgroupMode = Literal["v1", "v2"]


def check() -> None:
    """Raise ClusterError for the first requirement of nodes that this machine does not meet. Install missing packages."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise ClusterError(
            f"The cluster's nodes need Linux on x86-64 or arm64, this is {platform.system()} on {platform.machine()}: "
            "use an existing cluster with REGROUP_CONTEXT=<context>."
        )
    if os.geteuid() != 0:
        raise ClusterError(
            "The cluster's nodes need root (network and mount namespaces): run this with `sudo -E`, or name an "
            "existing cluster with REGROUP_CONTEXT=<context>."
        )
    cache = paths.cache()
    cache.mkdir(parents=True, exist_ok=True)
    sentence = disk_sentence(shutil.disk_usage(cache).free, cache, has_images=paths.images().exists())
    if sentence:
        raise ClusterError(sentence)
    cgroup_mode()
    ensure_packages(PACKAGES)
    _check_overlay(cache)
    _check_addresses()


def disk_sentence(free_bytes: int, where: Path, *, has_images: bool) -> str | None:
    """Return a sentence about too little free space at `where`, or None if it is enough."""
    needed = REQUIRED_FREE_BYTES // 5 if has_images else REQUIRED_FREE_BYTES
    if free_bytes >= needed:
        return None
    return (
        f"{where} has {free_bytes / 1024**3:.0f} GiB free and the cluster needs {needed / 1024**3:.0f}: free some "
        "space, or set REGROUP_CLUSTER_DIR to a directory on a larger disk."
    )


def cgroup_mode() -> CgroupMode:
    """Return which cgroup hierarchy the nodes use; raise ClusterError when neither is usable."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        missing = {"cpu", "memory", "pids"} - set((root / "cgroup.controllers").read_text().split())
        mode: CgroupMode = "v2"
    else:
        missing = {c for c in V1_CONTROLLERS if not (root / c / "cgroup.procs").exists()}
        mode = "v1"
    if missing:
        raise ClusterError(
            f"The cgroup controllers {', '.join(sorted(missing))} are not at {root}: run outside of this container, "
            "or name an existing cluster with REGROUP_CONTEXT=<context>."
        )
    return mode


def missing_packages(wanted: Mapping[str, str]) -> list[str]:
    """Return the Debian packages whose programs are not on this machine."""
    return sorted({package for program, package in wanted.items() if not shutil.which(program, path=_SEARCH_PATH)})


def ensure_packages(wanted: Mapping[str, str]) -> None:
    """Install the missing packages with apt-get. Raise ClusterError with their names if that is impossible."""
    missing = missing_packages(wanted)
    if not missing:
        return
    names = " ".join(missing)
    if not shutil.which("apt-get"):
        raise ClusterError(f"These are missing and there is no apt-get to install them: {names}. Install them.")
    if os.geteuid() != 0:
        raise ClusterError(f"These packages are missing: `sudo apt-get install {names}`.")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with progress.step(f"Debian packages: {names}", "download", expected_s=30):
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", *missing],
        ):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise ClusterError(f"`apt-get install {names}` failed: {' '.join(done.stderr.split())[-400:]}")


def _check_overlay(cache: Path) -> None:
    """Raise ClusterError if the cache directory cannot carry overlays, as when it is on one. Containers' files are overlays."""
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        directories = {name: Path(scratch) / name for name in ("lower", "upper", "work", "merged")}
        for directory in directories.values():
            directory.mkdir()
        options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**directories)
        mounted = subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, str(directories["merged"])], capture_output=True
        )
        if mounted.returncode != 0:
            raise ClusterError(
                f"{cache} is on a file system that cannot carry overlays: set REGROUP_CLUSTER_DIR to a directory on "
                "ext4 or xfs, or give this container the right to mount."
            )
        subprocess.run(["umount", str(directories["merged"])], check=True)


def _check_addresses() -> None:
    """Raise ClusterError if the machine has a route into the cluster's address ranges."""
    shown = subprocess.run(["ip", "-o", "route", "show"], capture_output=True, text=True).stdout
    ours = [ip_network(n) for n in (addresses.NODE_NETWORK, addresses.POD_NETWORK)]
    for line in shown.splitlines():
        destination, _, rest = line.partition(" ")
        if destination == "default" or f"dev {addresses.BRIDGE}" in rest:
            continue
        try:
            network = ip_network(destination, strict=False)
        except ValueError:
            continue
        if any(network.overlaps(own) for own in ours):
            raise ClusterError(
                f"This machine has a route to {destination}, inside the cluster's own 10.98.0.0/15: remove that "
                "route, or name an existing cluster with REGROUP_CONTEXT=<context>."
            )
