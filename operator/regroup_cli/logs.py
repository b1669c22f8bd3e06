"""`logs` of both commands: its options, and what it prints. The logs come from Jobs of a cluster or of this machine."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable

from regroup_client.jobs import Jobs, Wanted
from regroup_client.log_lines import duration, shown
from regroup_client.log_streams import REFRESH_S, Choice, Follower, read

TAIL = 20
DESCRIPTION = (
    "Print the logs of a job's workers, by time on the clocks of their nodes. [slot.rank] in front says who wrote a line: the "
    "slot of the worker, and the rank of the process if it is known. A progress bar is shown in its last state, escape sequences "
    "are removed, and long lines are cut."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that logs of pods and of local workers have in common."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--rank", type=_at_least_0, metavar="N", help="of the process with this rank only, as the ranks are now"
    )
    which.add_argument("--slot", type=_at_least_0, metavar="N", help="of the worker in this slot only")
    parser.add_argument(
        "--since", type=_duration, metavar="TIME", help="not older than this, such as 90s, 10m or 1h30m"
    )
    parser.add_argument(
        "--grep", type=_pattern, metavar="PATTERN", help="only lines in which a regular expression is found"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on printing what is written, until the job ends"
    )
    parser.add_argument(
        "--all-attempts", action="store_true", help="also of the earlier pods of each slot, as far as they are kept"
    )
    parser.add_argument(
        "--tail",
        type=_at_least_0,
        metavar="LINES",
        help=f"last lines of each worker (default: {TAIL}; all with --rank, --slot, --since, --grep, --previous, --all-attempts)",
    )
    parser.add_argument("--timestamps", action="store_true", help="print the time of each line (UTC)")


def tail_of(args: argparse.Namespace) -> int | None:
    """Return how many lines of each worker are read, or None for all."""
    if args.tail is not None:
        return int(args.tail)
    narrow = (args.rank, args.slot, args.since, args.grep)
    whole = args.all_attempts or getattr(args, "previous", False) or any(one is not None for one in narrow)
    return None if whole else TAIL


def show(jobs: Jobs, args: argparse.Namespace, warn: Callable[[str], None], refresh_s: float = REFRESH_S) -> int:
    """Print the lines and return the exit code. Raises ClientError.

    `refresh_s`: time between two looks at which workers there are.
    """
    since_s = None if args.since is None else int(args.since.total_seconds())
    wanted = Wanted(args.slot, args.rank, args.all_attempts, getattr(args, "previous", False))
    reader = jobs.logs(args.job, wanted, since_s)
    since_ns = 0 if args.since is None else time.time_ns() - int(args.since.total_seconds() * 10**9)
    choice = Choice(args.rank, since_ns, args.grep)
    tail = tail_of(args)
    found = Follower(reader, choice, tail, warn, refresh_s).lines() if args.follow else read(reader, choice, tail)
    in_colour = has_colour(sys.stdout.isatty(), os.environ.get("NO_COLOR"), os.environ.get("TERM"))
    for line in found:
        print(shown(line, colour=in_colour, time=args.timestamps), flush=args.follow)
    return 0


def has_colour(is_terminal: bool, no_color: str | None, term: str | None) -> bool:
    """Return whether output is coloured: only on a terminal that has colours, and not if NO_COLOR is set (https://no-color.org)."""
    return is_terminal and not no_color and term != "dumb"


def _at_least_0(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _duration(text: str) -> object:
    try:
        return duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression ({error})") from None


__all__ = ["DESCRIPTION", "add_arguments", "has_colour", "show", "tail_of"]
