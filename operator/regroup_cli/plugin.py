"""`kubectl regroup`: looks at training jobs in a cluster, and steers them. Standard library only.

It reads and writes through the user's own kubectl, so that contexts, logins and proxies are those of every other
command. It decides nothing: regroup_client/views.py makes the sentences, and the API server checks each patch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from regroup_cli import explain, logs
from regroup_cli.pod_logs import PodLogs, Wanted
from regroup_cli.streams import guarded
from regroup_client import views
from regroup_client.log_streams import LogsError

RESOURCE = "distributedtrainingjobs.regroup.dev"


class KubectlFailed(Exception):
    """kubectl refused. The message is its own sentence."""


def parser() -> argparse.ArgumentParser:
    """Return the parser. Its help is part of the product."""
    top = argparse.ArgumentParser(
        prog="kubectl regroup",
        description="Look at training jobs in a cluster, and steer them, with your own kubectl.",
        epilog="example: kubectl regroup why digits --namespace team-a",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list jobs: state, members, progress, restarts, last incident")
    listing.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
    watch = commands.add_parser(
        "watch",
        help="follow a job until it ends",
        description="Print a line whenever the job's state, members or progress change, and each incident. Exit code 0 if it "
        "succeeds, 1 if it fails.",
    )
    log = commands.add_parser("logs", help="print the logs of a job's workers", description=logs.DESCRIPTION)
    logs.add_arguments(log)
    log.add_argument("--previous", action="store_true", help="of the containers before their last restart")
    scale = commands.add_parser("scale", help="change the number of workers")
    why = commands.add_parser("why", help="say in sentences why a job is in its state, and what to look at")
    suspend = commands.add_parser(
        "suspend", help="give the job's pods back; its state is saved if spec.checkpoint is set"
    )
    resume = commands.add_parser("resume", help="go on with a suspended job")
    for command in (watch, log, scale, why, suspend, resume):
        command.add_argument("job", metavar="JOB", help="name of the job")
    scale.add_argument("replicas", type=int, metavar="N", help="new number of workers")
    for command in commands.choices.values():
        command.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: that of your context)")
        command.add_argument("--context", metavar="NAME", help="context of your kubeconfig")
        command.add_argument("--kubeconfig", metavar="FILE", help="another kubeconfig")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A refusal of kubectl is one sentence and exit code 1."""
    return guarded("kubectl regroup", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    kubectl = Kubectl(args)
    try:
        return COMMANDS[args.command](kubectl, args)
    except KubectlFailed as error:
        print(f"kubectl regroup: {error}", file=sys.stderr)
        return 1


class Kubectl:
    """The user's kubectl, with the options that name cluster and namespace."""

    def __init__(self, args: argparse.Namespace) -> None:
        chosen = ((f"--{name}", getattr(args, name)) for name in ("namespace", "context", "kubeconfig"))
        self._options = [f"{option}={value}" for option, value in chosen if value]

    def command(self, *arguments: str) -> list[str]:
        return ["kubectl", *arguments, *self._options]

    def run(self, *arguments: str) -> str:
        """Return kubectl's output. Raises KubectlFailed."""
        with _starting():
            done = subprocess.run(
                self.command(*arguments), capture_output=True, text=True, errors="replace", check=False
            )
        if done.returncode != 0:
            raise KubectlFailed(done.stderr.strip().removeprefix("error: ") or f"kubectl ended with {done.returncode}.")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """Return the JSON of `kubectl get`. Raises KubectlFailed."""
        text = self.run("get", *arguments, "--output=json")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise _no_json(text) from None

    def become(self, *arguments: str) -> int:
        """Run kubectl in this terminal until it ends, and return its exit code as a shell has it. Raises KubectlFailed.

        It is for commands that go on until the user ends them.
        """
        sys.stdout.flush()
        with _starting():
            code = subprocess.call(self.command(*arguments))
        return code if code >= 0 else 128 - code

    def watch(self, *arguments: str) -> Iterator[Any]:
        """Yield {type, object}: the object as it is, and after each change, until kubectl's watch ends. Raises KubectlFailed."""
        command = self.command("get", *arguments, "--watch", "--output-watch-events", "--output=json")
        pipe = subprocess.PIPE
        with _starting():
            started = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace")
        with started as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                yield from objects(process.stdout)
            finally:
                process.terminate()
            said = process.stderr.read().strip()
        if process.returncode not in (0, -15):
            raise KubectlFailed(said.removeprefix("error: ") or f"kubectl ended with {process.returncode}.")


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Raise KubectlFailed if there is no kubectl to start."""
    try:
        yield
    except FileNotFoundError:
        raise KubectlFailed("kubectl is not on the PATH. Install it, or correct the PATH.") from None
    except OSError as error:
        raise KubectlFailed(
            f"kubectl cannot be started ({error.strerror}). Install it again, or correct the PATH."
        ) from None


def _no_json(text: str) -> KubectlFailed:
    first = (text.strip() or "nothing").splitlines()[0]
    return KubectlFailed(f"kubectl did not print JSON, but: {first[:100]}. Check which kubectl is on the PATH.")


def objects(lines: Iterable[str]) -> Iterator[Any]:
    """Yield the JSON objects of a stream. Each is on a line of its own, as in kubectl's watch events, or on many lines.

    Raises KubectlFailed.
    """
    decoder, text = json.JSONDecoder(), ""
    for line in lines:
        text += line
        if line.startswith("}") or (line.startswith("{") and line.rstrip().endswith("}")):
            text = text.lstrip()
            while text:
                try:
                    found, end = decoder.raw_decode(text)
                except (ValueError, RecursionError):
                    raise _no_json(text) from None
                text = text[end:].lstrip()
                yield found


def _list(kubectl: Kubectl, args: argparse.Namespace) -> int:
    found = kubectl.get(RESOURCE, *(["--all-namespaces"] if args.all_namespaces else []))
    print(explain.table(map(views.job_view, found["items"]), namespaces=args.all_namespaces))
    return 0


def _watch(kubectl: Kubectl, args: argparse.Namespace) -> int:
    said, known, is_there = "", -1, True
    while is_there:  # the API server ends a watch after a while
        is_there = False
        for event in kubectl.watch(RESOURCE, args.job):
            is_there, job = True, event["object"]
            if event["type"] == "DELETED":
                raise KubectlFailed(f"The job {args.job} was deleted.")
            if known < 0:
                known = max([0, *(i["generation"] for i in (job.get("status") or {}).get("incidents", ()))])
            incidents, known = views.news(job, known)
            now = views.line(job)
            for line in (*incidents, *([now] if now != said else [])):
                print(line, flush=True)
            said = now
            if views.state(job) in views.ENDED:
                return 0 if views.state(job) == views.SUCCEEDED else 1
    raise KubectlFailed("The watch ended without an answer. Try again.")


def _logs(kubectl: Kubectl, args: argparse.Namespace) -> int:
    def look() -> tuple[Any, list[Any]]:
        try:
            return kubectl.get(RESOURCE, args.job), kubectl.get("pods", _workers_of(args.job))["items"]
        except KubectlFailed as error:
            raise LogsError(str(error)) from None

    since_s = None if args.since is None else int(args.since.total_seconds())
    wanted = Wanted(args.slot, args.rank, args.all_attempts, args.previous)
    reader = PodLogs(look, kubectl.command, wanted, since_s)
    try:
        return logs.show(reader, args, lambda said: print(f"kubectl regroup: {said}", file=sys.stderr))
    except LogsError as error:
        raise KubectlFailed(str(error)) from None


def _workers_of(job: str) -> str:
    return f"--selector=regroup.dev/job-name={job},regroup.dev/role=worker"


def _scale(kubectl: Kubectl, args: argparse.Namespace) -> int:
    return kubectl.become("scale", RESOURCE, args.job, f"--replicas={args.replicas}")


def _why(kubectl: Kubectl, args: argparse.Namespace) -> int:
    job = kubectl.get(RESOURCE, args.job)
    pods = kubectl.get("pods", f"--selector=regroup.dev/job-name={args.job}")["items"]
    events = kubectl.get("events", f"--field-selector=involvedObject.name={args.job}")["items"]
    print("\n".join(views.why(job, pods, events)))
    return 0


def _suspend(kubectl: Kubectl, args: argparse.Namespace) -> int:
    patch = json.dumps({"spec": {"runPolicy": {"suspend": args.command == "suspend"}}})
    return kubectl.become("patch", RESOURCE, args.job, "--type=merge", f"--patch={patch}")


COMMANDS = {
    "list": _list,
    "watch": _watch,
    "logs": _logs,
    "scale": _scale,
    "why": _why,
    "suspend": _suspend,
    "resume": _suspend,
}


if __name__ == "__main__":
    sys.exit(main())
