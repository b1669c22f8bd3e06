"""Layers out of buildah's storage: the very tar that was committed, or an error."""

import base64
import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from cluster import oci, storage

CONTENT = b"hello" * 100


def tar_of_one_file() -> tuple[bytes, int]:
    """Return a tar with etc/greeting, and where the file's content begins in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("etc/greeting")
        info.size = len(CONTENT)
        archive.addfile(info, io.BytesIO(CONTENT))
    return buffer.getvalue(), buffer.getvalue().index(CONTENT)


def storage_with_one_layer(root: Path) -> tuple[str, str]:
    """Lay out a storage as buildah does; return the image's configuration and the layer's digest."""
    tar, start = tar_of_one_file()
    digest = "sha256:" + hashlib.sha256(tar).hexdigest()
    file = root / "overlay" / "id" / "diff" / "etc" / "greeting"
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    record = [
        {"type": 2, "payload": base64.b64encode(tar[:start]).decode()},
        {"type": 1, "name": "etc/greeting", "size": len(CONTENT), "payload": "AAAA"},
        {"type": 2, "payload": base64.b64encode(tar[start + len(CONTENT) :]).decode()},
    ]
    layers = root / "overlay-layers"
    layers.mkdir()
    (layers / "layers.json").write_text(json.dumps([{"id": "id", "diff-digest": digest}]))
    with gzip.open(layers / "id.tar-split.gz", "wt") as out:
        out.write("".join(json.dumps(entry) + "\n" for entry in record))
    return json.dumps({"rootfs": {"type": "layers", "diff_ids": [digest]}}), digest


def test_layer_is_put_together_bit_for_bit(tmp_path: Path) -> None:
    config, digest = storage_with_one_layer(tmp_path)
    storage.export_config(config, tmp_path, "localhost/x:1", tmp_path / "layout")
    image = oci.find(tmp_path / "layout", "localhost/x:1")
    assert image is not None
    assert image.digests[1:] == (digest,)
    assert oci.blob(tmp_path / "layout", digest).read_bytes() == tar_of_one_file()[0]


def test_layer_whose_files_changed_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    config, _ = storage_with_one_layer(tmp_path)
    (tmp_path / "overlay" / "id" / "diff" / "etc" / "greeting").write_bytes(CONTENT.upper())
    with pytest.raises(storage.UnexpectedStorageError, match="layer id is not sha256:"):
        storage.export_config(config, tmp_path, "localhost/x:1", tmp_path / "layout")
    assert [file for file in (tmp_path / "layout").rglob("*") if file.is_file()] == []


def test_storage_of_another_kind_is_refused(tmp_path: Path) -> None:
    config, _ = storage_with_one_layer(tmp_path)
    (tmp_path / "overlay-layers" / "id.tar-split.gz").unlink()
    with pytest.raises(storage.UnexpectedStorageError, match="FileNotFoundError"):
        storage.export_config(config, tmp_path, "localhost/x:1", tmp_path / "layout")
