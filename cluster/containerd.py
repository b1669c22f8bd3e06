"""A client of one containerd, by `ctr`: lists its images, and loads the blobs that it does not hold yet."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster import oci
from cluster.errors import ClusterError

_NAMESPACE = "k8s.io"


class Client:
    """A containerd behind a command prefix: `ctr --address ...`, or one that enters a node first."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [*command, "--namespace", _NAMESPACE]

    def answers(self) -> bool:
        """Return whether containerd serves requests."""
        return subprocess.run([*self._command, "version"], capture_output=True).returncode == 0

    def run(self, *arguments: str) -> str:
        """Return what ctr printed."""
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            raise ClusterError(f"ctr {' '.join(arguments[:2])} failed: {done.stderr.strip()[-300:]}")
        return done.stdout

    def images(self) -> dict[str, str]:
        """Return the held images: name to manifest digest."""
        rows = (line.split() for line in self.run("images", "ls").splitlines()[1:])
        return {row[0]: row[2] for row in rows if len(row) > 2}

    def contents(self) -> set[str]:
        """Return the digests of all held blobs."""
        return set(self.run("content", "ls", "--quiet").split())

    def importer(self) -> "subprocess.Popen[bytes]":
        """Start an import whose archive is to be written to the process's standard input."""
        return subprocess.Popen(
            [*self._command, "images", "import", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )


def load(client: Client, layout: Path, image: oci.Image) -> int:
    """Import `image` unless containerd holds it under that name; return the bytes of blobs that it lacked."""
    held = client.images()
    if held.get(image.name) == image.id:
        return 0
    previous = f"{image.name}-previous"
    if image.name in held:
        # The name moves before the new image is unpacked; without this the collector may take torch's layer in between.
        client.run("images", "tag", "--force", image.name, previous)
    size_bytes = _import(client, layout, image)
    if image.name in held:
        client.run("images", "rm", previous)
    return size_bytes


def _import(client: Client, layout: Path, image: oci.Image) -> int:
    present = client.contents()
    process = client.importer()
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        size_bytes = oci.write_archive(layout, image, present, process.stdin)
        process.stdin.close()
    except BrokenPipeError:
        size_bytes = 0
    complaint = process.stderr.read().decode(errors="replace")
    if process.wait() != 0:
        raise ClusterError(f"containerd did not take the image {image.name}: {complaint.strip()[-300:]}")
    return size_bytes
