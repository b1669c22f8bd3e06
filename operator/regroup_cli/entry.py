"""Where the command `regroup` begins. It is installed with `kubectl regroup`, too, where its packages are missing."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; one sentence and exit code 2 where it cannot run."""
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
