"""Commands that `regroup` and `kubectl regroup` have in common, with the same words, options and exit codes.

A `Jobs` finds jobs and changes them: those of a cluster (plugin.py) or of this machine (local_jobs.py). This module parses the
options and prints. Texts of a job may quote its output, so `say` takes out what could steer a terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from regroup_cli import explain, screen
from regroup_client import views
from regroup_client.log_lines import clean
from regroup_client.views import JobView, Object

EXIT_CODES = (
    "Exit code: 0 if it succeeds, 1 if the cluster or the job's state does not let it, 2 if the arguments are wrong, 3 if what is "
    "followed has been out of reach for 60 s, 130 after Ctrl-C."
)


class Jobs(Protocol):
    """Jobs of a cluster or of this machine. Each method may raise the error that its command prints as one sentence."""

    def all(self) -> list[JobView]:
        """Return the jobs, without what their pods and events say."""

    def look(self, job: str) -> JobView:
        """Return all that is known of a job."""

    def read(self, job: str) -> Object:
        """Return the job's object."""

    def changes(self, job: str) -> Iterator[Object]:
        """Yield the job's object as it is, and after each change. It ends only where the job was deleted or is out of reach."""

    def change(self, job: str, verb: str, patch: Mapping[str, Any]) -> int:
        """Merge a patch into the job's spec, and return the exit code. `verb` is for sentences, such as "suspend"."""

    def delete(self, job: str) -> int:
        """Delete a job of a cluster, or end one of this machine. Return the exit code."""

    def refuse(self, sentence: str) -> Exception:
        """Return the error that is printed as one sentence."""


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
    incidents = (jobs.read(args.job).get("status") or {}).get("incidents") or ()
    hung = next((one for one in reversed(incidents) if one.get("stacks")), None)
    if hung is None:
        raise jobs.refuse(f"No hang of the job {args.job} is among its last incidents. `why` says what it waits for.")
    say("\n".join([f"{hung['at']}, before generation {hung['generation']}: {hung['decision']}", *hung["stacks"]]))
    return 0


def _change(jobs: Jobs, args: argparse.Namespace) -> int:
    state = views.state(jobs.read(args.job))
    if state in (*views.ENDED, "Killed"):
        word = {"scale": "resized", "suspend": "suspended", "resume": "resumed"}[args.command]
        raise jobs.refuse(f"The job {args.job} has ended ({state}): it cannot be {word}. Start it again.")
    if args.command == "scale":
        return jobs.change(args.job, "scale", {"replicas": args.replicas})
    return jobs.change(args.job, args.command, {"runPolicy": {"suspend": args.command == "suspend"}})


_COMMANDS: dict[str, Callable[[Jobs, argparse.Namespace], int]] = {
    "list": _list,
    "status": _show(explain.status),
    "why": _show(lambda view: "\n".join(view.why)),
    "watch": _watch,
    "stacks": _stacks,
    "scale": _change,
    "suspend": _change,
    "resume": _change,
    "delete": lambda jobs, args: jobs.delete(args.job),
}
NAMES = tuple(_COMMANDS)
