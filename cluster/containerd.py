"""A client of one containerd, by `ctr`: lists its images, and loads the blobs that it does not hold yet."""

import subprocess
from collections.abc import Sequence, Set
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
    try:
        size_bytes = _import(client, layout, image)
    except ClusterError:
        # ctr moves the name before it unpacks the image: the next load would take a part of the image for the whole.
        restored = ("tag", "--force", previous, image.name) if image.name in held else ("rm", image.name)
        client.run("images", *restored)
        raise
    if image.name in held:
        client.run("images", "rm", previous)
    return size_bytes


def _import(client: Client, layout: Path, image: oci.Image) -> int:
    """Send an image without the blobs that containerd holds, and return the bytes of those sent.

    Its collector may take a blob of an image that was replaced while the import runs: "content digest ... not found". A second try
    sends all blobs.
    """
    size_bytes, complaint = _send(client, layout, image, client.contents())
    if "not found" in complaint:
        size_bytes, complaint = _send(client, layout, image, set())
    if complaint:
        raise ClusterError(f"containerd did not take the image {image.name}: {complaint[-300:]}")
    return size_bytes


def _send(client: Client, layout: Path, image: oci.Image, present: Set[str]) -> tuple[int, str]:
    """Import an image once, without the blobs in `present`.

    Return the bytes of the blobs that were sent, and containerd's complaint, which is empty where it took the image.
    """
    process = client.importer()
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        size_bytes = oci.write_archive(layout, image, present, process.stdin)
        process.stdin.close()
    except BrokenPipeError:
        size_bytes = 0
    complaint = process.stderr.read().decode(errors="replace").strip()
    return size_bytes, (complaint or "it gave no reason") if process.wait() != 0 else ""
