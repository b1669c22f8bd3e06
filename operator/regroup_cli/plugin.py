"""`kubectl regroup`: looks at training jobs in a cluster, and steers them. Standard library only.

It reads and writes through a proxy of the user's own kubectl, so that contexts and logins are those of every other command. It
decides nothing: regroup_client/views.py makes the sentences, and the API server checks each patch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from regroup_cli import logs, verbs
from regroup_cli.streams import guarded
from regroup_client.access import Target, connect
from regroup_client.api import Api
from regroup_client.cluster_jobs import ClusterJobs
from regroup_client.errors import ClientError, JobError, LostError

UNREACHABLE = 3
"""Exit code of `watch` and `logs --follow` if the cluster has been out of reach for too long."""


def parser() -> argparse.ArgumentParser:
    """Return the parser. Its help is part of the product."""
    top = argparse.ArgumentParser(
        prog="kubectl regroup",
        description="Look at training jobs in a cluster, and steer them, with your own kubectl.",
        epilog="example: kubectl regroup why digits --namespace team-a",
        allow_abbrev=False,
    )
    add_where(top)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = verbs.add_parsers(commands, "JOB", "name of the job")
    page = verbs.add_page(commands)
    for command in (made["list"], page):
        command.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
    log = commands.add_parser(
        "logs",
        help="print the logs of a job's workers",
        description=logs.DESCRIPTION,
        epilog=verbs.EXIT_CODES,
        allow_abbrev=False,
    )
    logs.add_arguments(log)
    log.add_argument("--previous", action="store_true", help="of the containers before their last restart")
    log.add_argument("job", metavar="JOB", help="name of the job")
    for command in commands.choices.values():
        add_where(command, default=argparse.SUPPRESS)  # what stands before the command stays
    return top


def add_where(parser: argparse.ArgumentParser, **given: Any) -> None:
    """Add the options that name a cluster and a namespace."""
    parser.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: that of your context)", **given)
    parser.add_argument("--context", metavar="NAME", help="context of your kubeconfig", **given)
    parser.add_argument("--kubeconfig", metavar="FILE", help="another kubeconfig", **given)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A refusal of the cluster is one sentence and exit code 1."""
    return guarded("kubectl regroup", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    try:
        with connect(target(args)) as api:
            if args.command == "ui":
                return _page(api, args)
            jobs = ClusterJobs(api, everywhere=getattr(args, "all_namespaces", False))
            if args.command == "logs":
                return logs.show(jobs, args, lambda said: print(f"kubectl regroup: {said}", file=sys.stderr))
            return verbs.run(jobs, args)
    except ClientError as error:
        print(f"kubectl regroup: {error}", file=sys.stderr)
        return UNREACHABLE if isinstance(error, LostError) else 1


def _page(api: Api, args: argparse.Namespace) -> int:
    """Serve the page. It alone needs packages, which a machine that has only this plugin may lack."""
    try:
        from regroup_cli.page import command, sources
    except ModuleNotFoundError as error:
        raise JobError(
            f"The page needs the package {error.name}, which is missing. Install regroup-training with the extra cli."
        ) from None
    source = sources.Cluster(api, everywhere=args.all_namespaces)
    return command.run(source, args, lambda said: print(f"kubectl regroup: {said}", flush=True))


def target(args: argparse.Namespace) -> Target:
    """Return the cluster and namespace that the options of `add_where` name."""
    return Target(args.namespace, args.context, args.kubeconfig)


if __name__ == "__main__":
    sys.exit(main())
