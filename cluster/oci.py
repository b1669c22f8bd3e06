"""Reads an OCI image layout on disk, and writes the part of an image that a containerd does not hold yet.

Layers are named by their content. So a changed line of Python travels as kilobytes, and torch's layer travels once.
"""

import hashlib
import io
import json
import platform
import re
import tarfile
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cluster.errors import ClusterError

_REFERENCE = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME = "io.containerd.image.name"


@dataclass(frozen=True)
class Image:
    """One image of a layout: its manifest's descriptor, and the digests (sha256:...) of its config and layers."""

    name: str
    manifest: dict[str, Any]
    digests: tuple[str, ...]

    @property
    def id(self) -> str:
        """Digest of the manifest. Two images with the same id are the same image."""
        digest: str = self.manifest["digest"]
        return digest


def blob(layout: Path, digest: str) -> Path:
    """Return the file of a blob."""
    return layout / "blobs" / Path(*digest.split(":"))


def find(layout: Path, name: str) -> Image | None:
    """Return the image with the reference `name` in the layout, or None."""
    for descriptor in _descriptors(layout):
        manifest_file = blob(layout, descriptor["digest"])
        if descriptor.get("annotations", {}).get(_REFERENCE) == name and manifest_file.exists():
            manifest = json.loads(manifest_file.read_text())
            digests = [manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]
            return Image(name, descriptor, tuple(dict.fromkeys(digests)))
    return None


def images(layout: Path) -> list[Image]:
    """Return every image of the layout that has a name."""
    names = (d.get("annotations", {}).get(_REFERENCE) for d in _descriptors(layout))
    return [image for name in names if name and (image := find(layout, name))]


def saved_name(other: Path) -> str | None:
    """Return the name that an unpacked image archive gives its image, or None if it gives none.

    `docker save` writes the whole name twice. buildah and skopeo write the reference that they were given.
    """
    index = json.loads((other / "index.json").read_text())
    annotations: dict[str, str] = (index.get("manifests") or [{}])[0].get("annotations") or {}
    if _CONTAINERD_NAME in annotations:
        return annotations[_CONTAINERD_NAME]
    listed = other / "manifest.json"
    tags = (json.loads(listed.read_text())[0].get("RepoTags") or []) if listed.exists() else []
    reference = annotations.get(_REFERENCE, "")
    # A reference without a name before the colon is a tag alone.
    return str(tags[0]) if tags else reference if re.search(r"[/:]", reference) else None


def full_name(name: str) -> str:
    """Return an image's name as the kubelet writes it: with registry and tag."""
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif not ("." in first or ":" in first or first == "localhost"):
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def write_archive(layout: Path, image: Image, present: Set[str], out: IO[bytes]) -> int:
    """Write `image` as an OCI archive without the blobs in `present`; return the bytes of blobs written."""
    descriptor = {
        **{k: v for k, v in image.manifest.items() if k != "annotations"},
        "annotations": {_CONTAINERD_NAME: image.name, _REFERENCE: image.name},
    }
    index = {"schemaVersion": 2, "manifests": [descriptor]}
    size_bytes = 0
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        _add_bytes(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add_bytes(archive, "index.json", json.dumps(index).encode())
        # Layers first: containerd reads the manifest's children once everything is in.
        for digest in (*reversed(image.digests), image.id):
            if digest not in present or digest == image.id:
                file = blob(layout, digest)
                archive.add(file, str(file.relative_to(layout)), recursive=False)
                size_bytes += file.stat().st_size
    return size_bytes


def prune(layout: Path) -> int:
    """Delete the blobs that no image of the layout needs. Return their number."""
    needed = set()
    for descriptor in _descriptors(layout):
        image = find(layout, descriptor.get("annotations", {}).get(_REFERENCE, ""))
        needed.update([descriptor["digest"], *(image.digests if image else ())])
    unneeded = [f for f in (layout / "blobs").glob("*/*") if f"{f.parent.name}:{f.name}" not in needed]
    for file in unneeded:
        file.unlink()
    return len(unneeded)


def _descriptors(layout: Path) -> list[dict[str, Any]]:
    try:
        index = json.loads((layout / "index.json").read_text())
    except FileNotFoundError:
        return []
    except ValueError:
        raise ClusterError(f"{layout}/index.json is damaged: remove {layout} and build the images again.") from None
    descriptors: list[dict[str, Any]] = index.get("manifests", [])
    return descriptors


def _add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def add_single_file(layout: Path, name: str, program: Path, inside: str) -> Image:
    """Put an image of one static program into the layout. The program is its entry point."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo(inside.lstrip("/"))
        info.size, info.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            archive.addfile(info, content)
    layer = buffer.getvalue()
    kind = "application/vnd.oci.image."
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Entrypoint": [inside], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    return put_image(layout, name, json.dumps(config).encode(), [_add_blob(layout, f"{kind}layer.v1.tar", layer)])


def put_image(layout: Path, name: str, config: bytes, layers: list[dict[str, Any]]) -> Image:
    """Give a name to an image of layers that are in the layout, and return it. The name's old image is dropped."""
    kind = "application/vnd.oci.image."
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}manifest.v1+json",
        "config": _add_blob(layout, f"{kind}config.v1+json", config),
        "layers": layers,
    }
    descriptor = _add_blob(layout, f"{kind}manifest.v1+json", json.dumps(manifest).encode())
    _put_descriptor(layout, name, descriptor)
    image = find(layout, name)
    assert image is not None
    return image


def adopt(layout: Path, other: Path, name: str) -> None:
    """Move the image of another layout into this one, under `name`. If it has several platforms, take this machine's."""
    descriptors = _descriptors(other)
    while descriptors and _is_index(descriptors[0]):
        descriptors = json.loads(blob(other, descriptors[0]["digest"]).read_text())["manifests"]
    here = _architecture()
    descriptors = [d for d in descriptors if (d.get("platform") or {}).get("architecture", here) == here]
    if not descriptors:
        raise ClusterError(f"The archive for {name} has no image for {here}: build it for linux/{here}.")
    for file in (other / "blobs").glob("*/*"):
        target = layout / file.relative_to(other)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            file.replace(target)
    _put_descriptor(layout, name, {k: v for k, v in descriptors[0].items() if k != "annotations"})


def _is_index(descriptor: dict[str, Any]) -> bool:
    kind = descriptor.get("mediaType", "")
    return "index" in kind or "manifest.list" in kind


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _put_descriptor(layout: Path, name: str, descriptor: dict[str, Any]) -> None:
    others = [d for d in _descriptors(layout) if d.get("annotations", {}).get(_REFERENCE) != name]
    manifests = [*others, {**descriptor, "annotations": {_REFERENCE: name}}]
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    aside = layout / "index.json.new"
    aside.write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
    aside.rename(layout / "index.json")


def _add_blob(layout: Path, media_type: str, data: bytes) -> dict[str, Any]:
    digest = _digest(data)
    file = blob(layout, digest)
    if not file.exists():
        # An existing one may be a hard link into a containerd's store.
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return {"mediaType": media_type, "digest": digest, "size": len(data)}


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
