"""Extracts archives that come from elsewhere. Their members stay below the directory."""

from __future__ import annotations

import tarfile
from pathlib import Path


def extract(archive: tarfile.TarFile, directory: str | Path) -> None:
    """Extract an archive below a directory. Raises tarfile.TarError for a member that would lie elsewhere."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(directory, filter="data")
        return
    # Python 3.11 before 3.11.4, which Debian 12 has, knows no filters. One after the other: the archive may be a stream.
    root = Path(directory).resolve()
    for member in archive:
        places = [root / member.name]
        if member.issym():
            places.append((root / member.name).parent / member.linkname)
        elif member.islnk():
            places.append(root / member.linkname)
        is_known = member.isfile() or member.isdir() or member.issym() or member.islnk()
        if not is_known or not all(place.resolve().is_relative_to(root) for place in places):
            raise tarfile.ReadError(
                f"{member.name} would lie outside of the directory that the archive is extracted to"
            )
        archive.extract(member, root)
