"""Fetches Debian's Prometheus, once: tests load the chart's alerts into it, and ask it the queries of the dashboards."""

import fcntl
import shutil
import subprocess
import tempfile
from pathlib import Path

from cluster import paths, progress
from cluster.errors import ClusterError


def ensure() -> Path:
    """Return a directory with `prometheus` and `promtool`: of PATH, else of Debian's package, which needs no installation.

    A second process waits for the first one's download. Raises ClusterError where there is no apt-get, or no network.
    """
    found = shutil.which("promtool")
    if found and shutil.which("prometheus"):
        return Path(found).parent
    target = paths.cache() / "prometheus"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "prometheus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with progress.step("Prometheus", "download", expected_s=5):
                _fetch(target)
    return target / "usr" / "bin"


def _fetch(target: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise ClusterError(
            "prometheus and promtool are not on PATH, and there is no apt-get to fetch them: install them."
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        if not _succeeds(["apt-get", "-qq", "download", "prometheus"], directory):
            _succeeds(["apt-get", "-qq", "update"], directory)  # a new machine has no lists yet
            if not _succeeds(["apt-get", "-qq", "download", "prometheus"], directory):
                raise ClusterError(
                    "The package prometheus cannot be fetched by apt-get: check the network, or install it."
                )
        (package,) = Path(directory).glob("*.deb")
        unpacked = Path(directory) / "unpacked"
        if not _succeeds(["dpkg-deb", "-x", str(package), str(unpacked)], directory):
            raise ClusterError(f"{package.name} cannot be unpacked.")
        unpacked.rename(target)


def _succeeds(command: list[str], directory: str) -> bool:
    return subprocess.run(command, cwd=directory, capture_output=True, check=False).returncode == 0
