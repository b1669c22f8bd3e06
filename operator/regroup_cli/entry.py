"""Where the command `regroup` begins. It is installed with `kubectl regroup`, too, where its packages are missing."""

from __future__ import annotations

import sys

from regroup_cli.streams import guarded


def main() -> int:
    """Run the command line; one sentence and exit code 2 where it cannot run."""
    return guarded("regroup", _run)


def _run() -> int:
    try:
        from regroup_cli.__main__ import main as run
    except ModuleNotFoundError as error:
        print(
            f"regroup: the package {error.name} is missing. Run make venv in a checkout of Regroup, and use .venv/bin/regroup "
            "there. kubectl regroup needs no further packages.",
            file=sys.stderr,
        )
        return 2
    return run()
