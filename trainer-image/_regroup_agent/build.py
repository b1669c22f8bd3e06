"""Makes the zipapp of the agent: `python -m _regroup_agent.build OUT.pyz`. Equal sources give equal bytes.

The library is in it, too, for the processes that the agent starts (library.py). The agent itself imports `regroup.protocol` only.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

MAIN = """\
try:
    from _regroup_agent.main import main
    main()
except KeyboardInterrupt:  # SIGINT before it listens for signals: `regroup run` ends
    raise SystemExit(130) from None
"""
_ROOT = Path(__file__).resolve().parent.parent
_EPOCH = (1980, 1, 1, 0, 0, 0)


def sources() -> dict[str, Path]:
    """Return the files of the zipapp by their names in it."""
    files = sorted((_ROOT / "regroup").rglob("*.py"))
    files += sorted(path for path in (_ROOT / "_regroup_agent").rglob("*.py") if path.name != "build.py")
    return {str(path.relative_to(_ROOT)): path for path in files}


def build(target: Path) -> None:
    """Write the zipapp to `target`. An older file there is replaced atomically."""
    aside = target.with_suffix(".new")
    with aside.open("wb") as file:
        file.write(b"#!/usr/bin/env -S python3 -I\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), MAIN)
            for name, path in sources().items():
                info = zipfile.ZipInfo(name, _EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, path.read_bytes())
    aside.chmod(0o755)
    aside.replace(target)


def main() -> None:
    """Build the zipapp whose path the command line names."""
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m _regroup_agent.build OUT.pyz")
    build(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
