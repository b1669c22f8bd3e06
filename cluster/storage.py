"""Reads an image out of buildah's storage layer by layer. So a changed line costs one thin layer, not all of them.

`buildah push` into a layout writes and compresses every layer each time (a minute for torch's). The storage has the
files of each layer and the record of its tar headers (tar-split). `export` makes the tar from them bit for bit, and
checks its digest. If something is not as expected, the caller uses `buildah push`.
"""

import base64
import gzip
import hashlib
import json
import subprocess
from pathlib import Path
from typing import IO, Any

from cluster import oci

_KIND = "application/vnd.oci.image."
_CHUNK_BYTES = 1 << 20


class UnexpectedStorageError(Exception):
    """The storage does not have the layout that this module expects."""


def export(buildah: list[str], root: Path, name: str, layout: Path) -> None:
    """Put the image `name` of the storage at `root` into the layout, uncompressed. Blobs in the layout are kept.

    Raises UnexpectedStorageError. The layout is then unchanged but for complete blobs.
    """
    inspected = subprocess.run([*buildah, "inspect", "--type=image", name], capture_output=True)
    try:
        config = json.loads(inspected.stdout)["Config"]
    except (KeyError, ValueError) as error:
        raise UnexpectedStorageError(f"buildah inspect {name} shows no Config") from error
    export_config(config, root, name, layout)


def export_config(config: str, root: Path, name: str, layout: Path) -> None:
    """Do what `export` does, for an image whose configuration (JSON) is known."""
    try:
        known = json.loads((root / "overlay-layers" / "layers.json").read_text())
        layers = {layer["diff-digest"]: layer for layer in known if "diff-digest" in layer}
        descriptors = []
        for digest in json.loads(config)["rootfs"]["diff_ids"]:
            file = oci.blob(layout, digest)
            if not file.exists():
                _assemble(root, layers[digest]["id"], digest, file)
            descriptors.append({"mediaType": f"{_KIND}layer.v1.tar", "digest": digest, "size": file.stat().st_size})
    except (KeyError, ValueError, OSError) as error:
        raise UnexpectedStorageError(f"{type(error).__name__}: {error}") from error
    oci.put_image(layout, name, config.encode(), descriptors)


def _assemble(root: Path, layer: str, digest: str, target: Path) -> None:
    """Write a layer's tar to `target` if it has the digest. It is written to a file beside it first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(".new")
    hasher = hashlib.sha256()
    try:
        with aside.open("wb") as out, gzip.open(root / "overlay-layers" / f"{layer}.tar-split.gz") as record:
            for line in record:
                _append(json.loads(line), root / "overlay" / layer / "diff", out, hasher)
        if f"sha256:{hasher.hexdigest()}" != digest:
            raise ValueError(f"layer {layer} is not {digest}")
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)


def _append(entry: dict[str, Any], files: Path, out: IO[bytes], hasher: Any) -> None:
    """Append one entry of the record: raw bytes of the tar (type 2), or the content of a file (type 1)."""
    if entry["type"] == 2:
        raw = base64.b64decode(entry["payload"])
        out.write(raw)
        hasher.update(raw)
    elif entry.get("size"):
        with (files / entry["name"]).open("rb") as content:
            while chunk := content.read(_CHUNK_BYTES):
                out.write(chunk)
                hasher.update(chunk)
