"""The command line: `regroup run`, `regroup scale`, `regroup status`."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path

from regroup_operator.api import SpecError
from regroup_operator.model.records import Settings


def parser() -> argparse.ArgumentParser:
    """Return the parser; its help is part of the product."""
    top = argparse.ArgumentParser(
        prog="regroup", description="Training jobs that neither stop nor lose work.", allow_abbrev=False
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script over local processes",
        description="Run SCRIPT over local worker processes, with the operator's own plan: ranks that die are replaced while "
        "the survivors keep their processes and their state.",
        epilog="example: regroup run --workers 3 --max 5 manifests/samples/digits.py",
    )
    run.add_argument("--workers", type=int, default=1, metavar="N", help="workers wanted (default 1)")
    run.add_argument("--min", type=int, metavar="N", help="fewest workers to train with; makes the job elastic")
    run.add_argument("--max", type=int, metavar="N", help="most workers; makes the job elastic")
    run.add_argument("--processes-per-worker", type=int, default=1, metavar="P", help="processes in each (default 1)")
    run.add_argument("--checkpoint", metavar="DIR", help="directory for durable checkpoints (default: none)")
    run.add_argument(
        "--checkpoint-every", type=int, default=300, metavar="S", help="seconds between them (default 300)"
    )
    run.add_argument("--checkpoint-keep", type=int, default=3, metavar="K", help="how many are kept (default 3)")
    run.add_argument(
        "--checkpoint-wait",
        type=seconds,
        default=Settings.checkpoint_s,
        metavar="S",
        help="wait so long for the last one at most (default 1800)",
    )
    run.add_argument(
        "--max-restarts", type=int, default=10, metavar="N", help="failures an hour before the job fails (default 10)"
    )
    run.add_argument(
        "--disconnect-seconds", type=int, default=5, metavar="S", help="silence before a worker is lost (default 5)"
    )
    run.add_argument(
        "--rejoin-seconds", type=int, default=0, metavar="S", help="wait for a restart in place first (default 0)"
    )
    run.add_argument(
        "--hang-seconds", type=int, metavar="S", help="without a step for so long the job hangs (default: by its steps)"
    )
    run.add_argument(
        "--first-step-seconds",
        type=seconds,
        default=Settings.first_step_s,
        metavar="S",
        help="the first step of a process may take so long (default 1800)",
    )
    run.add_argument(
        "--first-wait", type=seconds, default=30.0, metavar="S", help="start with fewer workers after (default 30)"
    )
    run.add_argument(
        "--join-quiet", type=seconds, default=1.0, metavar="S", help="collect joiners for this long (default 1)"
    )
    run.add_argument("--name", default="local", help="the job's name (default local)")
    run.add_argument(
        "--state-dir", metavar="DIR", help="keep the job's file and the agents' files here (default: temporary)"
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name")
    run.add_argument("script", metavar="SCRIPT", help="a Python script, or any command")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    scale = commands.add_parser("scale", help="change the number of workers of a running local job")
    scale.add_argument("state_dir", metavar="DIR", help="the directory that `regroup run` printed")
    scale.add_argument("workers", type=int, metavar="N", help="workers wanted")
    status = commands.add_parser("status", help="print the status of a local job as JSON")
    status.add_argument("state_dir", metavar="DIR", help="the directory that `regroup run` printed")
    return top


def seconds(text: str) -> float:
    """Return a length of time; argparse makes a sentence of what is none."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds: give one from 0 up")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code; an error of the user's is one sentence and exit code 2."""
    args = parser().parse_args(argv)
    try:
        if args.command == "run":
            from regroup_cli.run import run

            return asyncio.run(run(args))
        return _local(args)
    except SpecError as error:
        print(f"regroup: {error}", file=sys.stderr)
        return 2


def _local(args: argparse.Namespace) -> int:
    from regroup_cli.local import FileStore

    store = FileStore(Path(args.state_dir, "job.json"))
    if not store.path.exists():
        raise SpecError(
            f"DIR ({args.state_dir}) holds no job. Give the directory that `regroup run` printed; it is removed when the job ends, "
            "unless --state-dir named it."
        )
    try:
        current = store.read().get("status", {})
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{store.path} cannot be read as a job ({error}). Give the directory that `regroup run` printed."
        ) from None
    if args.command == "status":
        print(json.dumps(current, indent=2))
        return 0
    if current.get("phase") in ("Succeeded", "Failed"):
        raise SpecError(
            f"The job in {args.state_dir} has ended ({current['phase']}): it cannot be resized. Start it again."
        )
    store.change_spec(lambda spec: spec.update(replicas=args.workers))
    print(f"regroup: {args.workers} workers wanted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
