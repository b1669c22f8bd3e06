"""`regroup checkpoint pull`, and `export` of a job in a cluster: reads options and prints. regroup_client/pull.py does the work."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import replace
from importlib import util
from pathlib import Path

from regroup_cli import plugin
from regroup_client.access import Target, connect
from regroup_client.errors import AccessError
from regroup_client.pull import WAIT_S, Pulled, Wanted, check, pull
from regroup_operator.api import SpecError

DESCRIPTION = (
    "Copy the newest complete checkpoint of JOB, a job in a cluster, into DIR. A short-lived pod in the job's image mounts the "
    "job's claim read-only, and is deleted at the end. Every file is compared with what was committed, and the checkpoint "
    "appears in DIR by one rename. Without checkpoints of the library, everything that the script has saved is copied."
)
EPILOG = (
    "Exit code: 0 if the files are there, 1 if they could not be copied, 2 if the arguments are wrong, 130 after Ctrl-C. Example: "
    "regroup checkpoint pull digits checkpoints"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pull` to its parser."""
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument("directory", metavar="DIR", help="directory of this machine; it is made if it is missing")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    only.add_argument(
        "--path",
        default="",
        metavar="PATH",
        help="a file or directory below the job's checkpoint directory; it becomes DIR, and nothing is compared",
    )
    add_where(parser)


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the options on the pod and the cluster to a parser."""
    parser.add_argument(
        "--user", type=int, metavar="N", help="user id of the pod that reads (default: that of the job)"
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=WAIT_S,
        metavar="S",
        help=f"longest wait for the pod that reads, in seconds (default {WAIT_S:.0f})",
    )
    plugin.add_where(parser)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds; give a number above 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Copy, and return the exit code. Raises ClientError."""
    print(_pull(args, args.job, Path(args.directory), Wanted(args.step, args.path)).sentence)
    return 0


def is_job(given: str) -> bool:
    """Return whether the argument of `export` is a job in a cluster: it has the form of a name, and is no directory here."""
    return "/" not in given and given not in (".", "..", "") and not Path(given).exists()


def export(args: argparse.Namespace) -> int:
    """Pull a job's checkpoint beside the file that is to be written, export it, and return the exit code. Raises ClientError."""
    if util.find_spec("torch") is None:
        raise SpecError(
            "The export needs the package torch. Install regroup-training with the extra trainer, or fetch the checkpoint with "
            f"`regroup checkpoint pull {args.directory} DIR`."
        )
    from regroup_cli import checkpoint

    checkpoint.check_targets(args)
    beside = Path(args.to).absolute().parent
    try:
        aside = tempfile.TemporaryDirectory(prefix=".pulling-", dir=beside)
    except OSError as error:
        raise SpecError(
            f"--to ({args.to}) cannot be written ({error.strerror}). Name a file in another directory."
        ) from None
    with aside as directory:
        try:
            pulled = _pull(args, args.directory, Path(directory) / "checkpoints", Wanted(args.step, has_commits=True))
        except AccessError as error:
            raise SpecError(
                f"{args.directory} is no directory here, and no cluster can be asked for a job. {error}"
            ) from None
        args.directory = str(pulled.path)
        return checkpoint.run(args)


def _pull(args: argparse.Namespace, job: str, into: Path, wanted: Wanted) -> Pulled:
    wanted = replace(wanted, user=args.user, wait_s=args.wait)
    check(into, wanted)
    target = Target(args.namespace, args.context, args.kubeconfig)
    with connect(target) as api:
        return pull(api, target, job, into, wanted, lambda said: print(said, file=sys.stderr, flush=True))
