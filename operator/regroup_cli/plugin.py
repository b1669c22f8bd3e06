"""`kubectl regroup`: looks at training jobs in a cluster, and steers them. Standard library only.

It reads and writes through the user's own kubectl, so that contexts, logins and proxies are those of every other
command. It decides nothing: regroup_client/views.py makes the sentences, and the API server checks each patch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from regroup_cli import logs, verbs
from regroup_cli.pod_logs import PodLogs, Wanted
from regroup_cli.streams import guarded
from regroup_client import log_streams, views
from regroup_client.log_streams import LogsError, LostError, Patience

RESOURCE = "distributedtrainingjobs.regroup.dev"


UNREACHABLE = 3
"""Exit code of `watch` and `logs --follow` if the cluster has been out of reach for too long."""
RETRY_S = 2.0
"""Time between two attempts to watch a job again."""
_FINAL = re.compile(r"\((NotFound|Forbidden|Unauthorized)\)")
"""Answers of an API server that another attempt would not change."""


class KubectlFailed(Exception):
    """kubectl refused. The message is its own sentence."""

    code = 1
    """Exit code of the command."""

    def __init__(self, said: str, *, is_final: bool = False) -> None:
        """`is_final`: another attempt would fail, too."""
        super().__init__(said)
        self.is_final = is_final or _FINAL.search(said) is not None


class Unreachable(KubectlFailed):
    """A command that follows a job gave up. So its exit code is not that of a job that failed."""

    code = UNREACHABLE


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
    made["list"].add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
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
    """Run one command and return the exit code. A refusal of kubectl is one sentence and exit code 1."""
    return guarded("kubectl regroup", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    kubectl = Kubectl(args)
    try:
        if args.command == "logs":
            return _logs(kubectl, args)
        return verbs.run(ClusterJobs(kubectl, everywhere=getattr(args, "all_namespaces", False)), args)
    except KubectlFailed as error:
        print(f"kubectl regroup: {error}", file=sys.stderr)
        return error.code


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


class ClusterJobs:
    """Implements verbs.Jobs with the user's kubectl."""

    def __init__(self, kubectl: Kubectl, *, everywhere: bool) -> None:
        """`everywhere`: jobs of all namespaces are listed."""
        self._kubectl, self._everywhere = kubectl, everywhere

    def all(self) -> list[views.JobView]:
        found = self._kubectl.get(RESOURCE, *(["--all-namespaces"] if self._everywhere else []))
        return list(map(views.job_view, found["items"]))

    def look(self, job: str) -> views.JobView:
        found = self.read(job)
        pods = self._kubectl.get("pods", f"--selector=regroup.dev/job-name={job}")["items"]
        events = self._kubectl.get("events", f"--field-selector=involvedObject.name={job}")["items"]
        return views.job_view(found, pods, events)

    def read(self, job: str) -> views.Object:
        found: views.Object = self._kubectl.get(RESOURCE, job)
        return found

    def changes(self, job: str) -> Iterator[views.Object]:
        patience: Patience | None = None  # none before the first answer: an error may be the user's
        while True:
            failure: KubectlFailed | None = KubectlFailed("The watch ended without an answer. Try again.")
            try:
                for event in self._kubectl.watch(RESOURCE, job):
                    patience = Patience()
                    failure = None
                    if event["type"] == "DELETED":
                        raise KubectlFailed(f"The job {job} was deleted.", is_final=True)
                    yield event["object"]
            except KubectlFailed as error:
                failure = error
            if failure is None:
                continue  # the API server ends a watch after a while
            if patience is None or failure.is_final:
                raise failure
            if patience.ends(time.monotonic()):
                raise Unreachable(f"{failure} It has been so for {log_streams.PATIENCE_S:.0f} s.")
            time.sleep(RETRY_S)

    def change(self, job: str, verb: str, patch: Mapping[str, Any]) -> int:
        if verb == "scale":
            return self._kubectl.become("scale", RESOURCE, job, f"--replicas={patch['replicas']}")
        return self._kubectl.become("patch", RESOURCE, job, "--type=merge", f"--patch={json.dumps({'spec': patch})}")

    def delete(self, job: str) -> int:
        return self._kubectl.become("delete", RESOURCE, job)

    def refuse(self, sentence: str) -> Exception:
        return KubectlFailed(sentence)


def _logs(kubectl: Kubectl, args: argparse.Namespace) -> int:
    def look() -> tuple[Any, list[Any]]:
        try:
            return kubectl.get(RESOURCE, args.job), kubectl.get("pods", _workers_of(args.job))["items"]
        except KubectlFailed as error:
            raise LogsError(str(error), is_final=error.is_final) from None

    since_s = None if args.since is None else int(args.since.total_seconds())
    wanted = Wanted(args.slot, args.rank, args.all_attempts, args.previous)
    reader = PodLogs(look, kubectl.command, wanted, since_s)
    try:
        return logs.show(reader, args, lambda said: print(f"kubectl regroup: {said}", file=sys.stderr))
    except LostError as error:
        raise Unreachable(str(error)) from None
    except LogsError as error:
        raise KubectlFailed(str(error)) from None


def _workers_of(job: str) -> str:
    return f"--selector=regroup.dev/job-name={job},regroup.dev/role=worker"


if __name__ == "__main__":
    sys.exit(main())
