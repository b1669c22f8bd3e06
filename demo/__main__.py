"""`python -m demo [--keep]`: the tour behind `make demo`. Exits 1 if a claim failed."""

from __future__ import annotations

import argparse
import subprocess
import sys

from rich.console import Console

from cluster.errors import ClusterError
from demo import tour


def main() -> int:
    """Run the command line. An error is one sentence on standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="The tour: train a job through every kind of failure on a one-machine Kubernetes (root).",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the cluster running and print kubectl commands to try"
    )
    arguments = parser.parse_args()
    try:
        console = Console(width=None if sys.stdout.isatty() else 120)
        return tour.run(console, keep=arguments.keep)
    except (ClusterError, RuntimeError, OSError, LookupError, subprocess.SubprocessError) as error:
        what = str(error) if isinstance(error, (ClusterError, RuntimeError)) else f"{type(error).__name__}: {error}"
        print(f"demo: {what}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
