"""Entry point of the command `regroup`. It is also installed with `kubectl regroup`, where its packages may be missing."""

from __future__ import annotations

import sys

from regroup_cli.streams import guarded


def main() -> int:
    """Run the command line. If it cannot run, print one sentence and return 2."""
    return guarded("regroup", _run)


def _run() -> int:
    try:
        from regroup_cli.__main__ import main as run
    except ModuleNotFoundError as error:
        print(
            f"regroup: the package {error.name} is missing. Install regroup-training with the extra cli, or run make venv in a "
            "checkout of Regroup and use .venv/bin/regroup there. kubectl regroup needs no further packages.",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
