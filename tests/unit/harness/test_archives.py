"""What is in an archive stays below the directory that it is extracted to, under every Python."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from harness.archives import extract


def packed(**other_has: Any) -> io.BytesIO:
    """Return an archive with a file, a link to it, and one more member with these attributes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        file = tarfile.TarInfo("layout/index.json")
        file.size = 2
        archive.addfile(file, io.BytesIO(b"{}"))
        link = tarfile.TarInfo("layout/link")
        link.type, link.linkname = tarfile.SYMTYPE, "index.json"
        archive.addfile(link)
        other = tarfile.TarInfo("layout/other")
        for name, value in other_has.items():
            setattr(other, name, value)
        archive.addfile(other)
    raw.seek(0)
    return raw


@pytest.fixture(params=["this Python", "one without filters"], autouse=True)
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one without filters":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.setattr(tarfile.TarFile, "extractall", None)


def test_files_and_links_are_extracted_from_a_stream(tmp_path: Path) -> None:
    with tarfile.open(fileobj=packed(), mode="r|") as archive:
        extract(archive, tmp_path)
    assert (tmp_path / "layout/link").read_text() == "{}"
    assert (tmp_path / "layout/other").exists()


@pytest.mark.parametrize(
    "other",
    [
        {"name": "../outside"},
        {"type": tarfile.SYMTYPE, "linkname": "../../outside"},
        {"type": tarfile.LNKTYPE, "linkname": "../outside"},
        {"type": tarfile.CHRTYPE},
    ],
    ids=["a name", "a symbolic link", "a hard link", "a device"],
)
def test_what_would_lie_elsewhere_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    (tmp_path / "outside").write_text("mine")
    inside = tmp_path / "inside"
    inside.mkdir()
    with tarfile.open(fileobj=packed(**other)) as archive, pytest.raises(tarfile.TarError):
        extract(archive, inside)
    assert (tmp_path / "outside").read_text() == "mine"
