"""The template: a containerd root with every loaded image. New nodes are copies of it, made of hard links.

torch is imported once, not once for each node. Layers and snapshots are shared on disk, so the nodes must lie on the
same file system. Only containerd's two databases are written in place later. They are copied for real.
"""

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import containerd, oci, paths
from cluster.errors import ClusterError
from harness.polling import until

_DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")


def root() -> Path:
    """Return the template's containerd root."""
    return paths.images() / "template"


def load(layout: Path, image: oci.Image) -> int:
    """Import an image into the template unless it is there; return the bytes that were missing.

    Blobs that layout and template both hold become one file.
    """
    with _locked(), _running() as client:
        size_bytes = containerd.load(client, layout, image)
    contents = root() / "io.containerd.content.v1.content"
    for digest in image.digests:
        ours, theirs = oci.blob(layout, digest), oci.blob(contents, digest)
        if theirs.exists() and not ours.samefile(theirs):
            ours.unlink()
            ours.hardlink_to(theirs)
    return size_bytes


def copy_to(target: Path) -> None:
    """Make `target` a containerd root with all images of the template, in under a second. An existing one is kept."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked():
        copied = subprocess.run(["cp", "-al", str(root()), str(target)], capture_output=True, text=True)
        if copied.returncode != 0:
            shutil.rmtree(target, ignore_errors=True)
            raise ClusterError(f"{root()} could not be hard-linked to {target}: {copied.stderr.strip()[-300:]}")
        for database in _DATABASES:
            (target / database).unlink()
            shutil.copy2(root() / database, target / database)


@contextmanager
def _running() -> Iterator[containerd.Client]:
    """Run a containerd on the template, without its Kubernetes side, until the `with` block ends."""
    root().mkdir(parents=True, exist_ok=True)
    # The cache directory may be too deep: a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="regroup-", dir="/run") as run, open(f"{run}/log", "wb") as log:
        client = containerd.Client(["ctr", "--address", f"{run}/s"])
        command = ["containerd", "--config", str(paths.SOURCES / "conf" / "template.toml")]
        process = subprocess.Popen(
            [*command, "--root", str(root()), "--state", f"{run}/state", "--address", f"{run}/s"],
            stdout=log,
            stderr=log,
        )
        try:

            def tail() -> str:
                return Path(run, "log").read_text(errors="replace")[-400:]

            def answers() -> bool:
                if process.poll() is not None:
                    raise ClusterError(f"containerd did not start on {root()}: {tail()}")
                return client.answers()

            until(
                answers, f"containerd answers on {root()}", timeout_s=20, every_s=0.05, details=tail, error=ClusterError
            )
            yield client
        finally:
            process.terminate()
            process.wait()


@contextmanager
def _locked() -> Iterator[None]:
    file = paths.images() / "template.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
