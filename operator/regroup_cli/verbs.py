"""Commands that `regroup` and `kubectl regroup` have in common, with the same words, options and exit codes.

`Jobs` of regroup_client finds jobs and changes them: those of a cluster or of this machine. This module parses the options and
prints. Texts of a job may quote its output, so `say` takes out what could steer a terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from regroup_cli import explain, screen
from regroup_client import views
from regroup_client.jobs import Jobs, change, last_hang
from regroup_client.log_lines import clean
from regroup_client.views import JobView, counted

EXIT_CODES = (
    "Exit code: 0 if it succeeds, 1 if the cluster or the job's state does not let it, 2 if the arguments are wrong, 3 if what is "
    "followed has been out of reach for 60 s, 130 after Ctrl-C."
)


def add_parsers(commands: Any, job: str, job_help: str) -> dict[str, argparse.ArgumentParser]:
    """Add the commands to those of a parser, and return them. `job` is the metavar of the argument that names a job."""
    made: dict[str, argparse.ArgumentParser] = {}

    def add(name: str, summary: str, description: str = "") -> argparse.ArgumentParser:
        said = description or f"{summary[:1].upper()}{summary[1:]}."
        made[name] = commands.add_parser(name, help=summary, description=said, epilog=EXIT_CODES, allow_abbrev=False)
        if name != "list":
            made[name].add_argument("job", metavar=job, help=job_help)
        return made[name]

    listing = add("list", "list jobs: state, members, progress, restarts, last incident")
    shown = add("status", "show a job: why it is in its state, its numbers, workers with their ranks, last incidents")
    why = add("why", "say in sentences why a job is in its state, and what to look at")
    watch = add(
        "watch",
        "follow a job until it ends",
        "Follow a job until it ends. On a terminal it is one screen that is drawn again: workers by rank, step, loss curve, "
        "throughput and the last incidents. Elsewhere a line is printed for each change of state, members or progress, and for "
        "each incident. Exit code 1 if the job fails.",
    )
    watch.add_argument("--plain", action="store_true", help="print lines on a terminal, too")
    add(
        "stacks",
        "print where each rank was when the job hung last",
        "Print where each rank was when the job hung last, as status.incidents has it. The logs have the complete stacks. Exit "
        "code 1 if no hang was seen.",
    )
    scale = add("scale", "change the number of workers")
    scale.add_argument("replicas", type=int, metavar="N", help="new number of workers")
    add("suspend", "give the workers back; the job's state is saved if it writes checkpoints")
    add("resume", "go on with a suspended job")
    add("delete", "delete a job and its workers; its checkpoints stay")
    for command in (listing, shown, why):
        command.add_argument("-o", "--output", choices=["json"], metavar="json", help="print all that is known as JSON")
    return made


def add_page(commands: Any) -> argparse.ArgumentParser:
    """Add the command `ui` to those of a parser, and return it."""
    made: argparse.ArgumentParser = commands.add_parser(
        "ui",
        help="show jobs in a browser",
        description="Serve a web page for a browser on this machine, until Ctrl-C: the jobs, and of each what `why` says, loss, "
        "throughput, a timeline of failures and sizes, workers, events and logs. It listens on 127.0.0.1 only, has your own "
        "rights, and changes nothing. The printed address works once. From another machine: ssh -L PORT:127.0.0.1:PORT HOST, "
        "with --port PORT here.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    add_port(made)
    return made


def add_port(parser: argparse.ArgumentParser) -> None:
    """Add the option --port of the page."""
    parser.add_argument("--port", type=port, default=0, metavar="PORT", help="port of the page (default: a free one)")


def port(text: str) -> int:
    """Return the number of a TCP port. argparse says what is wrong with another text."""
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 1 to 65535, or 0 for a free one")
    return int(text)


def run(jobs: Jobs, args: argparse.Namespace) -> int:
    """Run one of the commands and return its exit code."""
    return _COMMANDS[args.command](jobs, args)


def say(text: str) -> None:
    """Print text of a job, line by line, without what could steer the terminal."""
    print("\n".join(map(clean, text.split("\n"))), flush=True)


def _list(jobs: Jobs, args: argparse.Namespace) -> int:
    found = jobs.all()
    if args.output == "json":
        print(json.dumps({"items": [views.to_json(view) for view in found]}, indent=2))
        return 0
    say(
        explain.table(
            found, namespaces=getattr(args, "all_namespaces", False), directories=any(one.directory for one in found)
        )
    )
    return 0


def _show(text: Callable[[JobView], str]) -> Callable[[Jobs, argparse.Namespace], int]:
    def show(jobs: Jobs, args: argparse.Namespace) -> int:
        view = jobs.look(args.job)
        if args.output == "json":
            print(json.dumps(views.to_json(view), indent=2))
        else:
            say(text(view))
        return 0

    return show


def _watch(jobs: Jobs, args: argparse.Namespace) -> int:
    live = screen.Screen(sys.stdout) if sys.stdout.isatty() and not args.plain else None
    said, known = "", -1
    try:
        for job in jobs.changes(args.job):
            if live is not None:
                live.show(views.job_view(job))
            else:
                if known < 0:
                    known = max([0, *(one["generation"] for one in (job.get("status") or {}).get("incidents", ()))])
                incidents, known = views.news(job, known)
                now = views.line(job)
                for line in (*incidents, *([now] if now != said else [])):
                    say(f"{time.strftime('%H:%M:%S')}  {line}")
                said = now
            if views.state(job) in views.ENDED:
                return 0 if views.state(job) == views.SUCCEEDED else 1
    finally:
        if live is not None:
            live.close()
    return 1


def _stacks(jobs: Jobs, args: argparse.Namespace) -> int:
    hung = last_hang(jobs, args.job)
    say("\n".join([f"{hung['at']}, before generation {hung['generation']}: {hung['decision']}", *hung["stacks"]]))
    return 0


def _change(jobs: Jobs, args: argparse.Namespace) -> int:
    change(jobs, args.job, args.command, getattr(args, "replicas", 0))
    wanted = f"{counted(args.replicas, 'worker')} wanted" if args.command == "scale" else f"{args.command} is asked for"
    say(f"regroup: {wanted}")
    return 0


def _delete(jobs: Jobs, args: argparse.Namespace) -> int:
    say(f"regroup: {jobs.delete(args.job)}")
    return 0


_COMMANDS: dict[str, Callable[[Jobs, argparse.Namespace], int]] = {
    "list": _list,
    "status": _show(explain.status),
    "why": _show(lambda view: "\n".join(view.why)),
    "watch": _watch,
    "stacks": _stacks,
    "scale": _change,
    "suspend": _change,
    "resume": _change,
    "delete": _delete,
}
NAMES = tuple(_COMMANDS)
