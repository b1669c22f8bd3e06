"""`regroup submit`: a script of this machine becomes a job in a cluster, without an image of its own.

This module reads the options and files, and prints. regroup_client/submission.py makes the objects, and creation.py puts them into
the cluster, through the user's own kubectl.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import yaml

from regroup.protocol import frameworks
from regroup_cli import plugin
from regroup_cli.convert.documents import as_yaml
from regroup_cli.verbs import say
from regroup_client import bundle, creation, packages, submission, views
from regroup_client.access import connect
from regroup_client.api import Api
from regroup_client.cluster_jobs import ClusterJobs
from regroup_client.errors import ApiError, LostError, SubmitError
from regroup_client.submission import Choices, Objects
from regroup_operator.api import parse_job

DESCRIPTION = (
    "Run SCRIPT as a training job in a cluster, in an image that has python3 and what the script imports. "
    "The script, or with --directory a whole directory, travels in a ConfigMap that the job owns: at most 900 KiB and 300 files, "
    "without what .gitignore names. The manifest is printed and applied with your own kubectl, and the job is followed until it "
    "trains. Ctrl-C ends the following, and the job goes on. A manifest (FILE.yaml) is submitted as it is."
)
EPILOG = (
    "Exit code: 0 once the job trains or has succeeded, 1 if it fails or the cluster refuses it, 2 if the arguments or files are "
    "wrong, 130 after Ctrl-C. Example: regroup submit train.py --image pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime --workers 4 "
    "--gpus 1 -- --epochs 10"
)
_CONTROLS = ("command", "script", "args", "namespace", "context", "kubeconfig", "dry_run", "save", "detach")
"""Options that a manifest may go with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, or a manifest (FILE.yaml)")
    parser.add_argument("args", nargs="*", default=[], metavar="ARGS", help="arguments for the script, after --")
    parser.add_argument("--image", metavar="IMAGE", help="image of the workers, with python3 and torch; needed")
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: that of the script)")
    parser.add_argument("--directory", metavar="DIR", help="directory that travels; SCRIPT is in it")
    for option, default, text in (
        ("--workers", 1, "number of workers (default 1)"),
        ("--min", None, "fewest workers to train with (default with --max: 1)"),
        ("--max", None, "most workers; makes the job resizable"),
        ("--gpus", 0, "GPUs of each worker; each of them gets a process (default 0)"),
        ("--user", None, "user id of the pods, which then fit the Pod Security standard restricted"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=text)
    parser.add_argument("--cpu", default="", metavar="AMOUNT", help="CPU that each worker requests, such as 4")
    parser.add_argument("--memory", default="", metavar="AMOUNT", help="memory limit of each worker, such as 16Gi")
    parser.add_argument("--framework", choices=frameworks.ALL, default="", help="framework (default PyTorch)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script")
    parser.add_argument(
        "--pip",
        action="append",
        default=[],
        metavar="NAME[==VERSION]",
        help="a package that the image lacks; its version and hashes are fixed now, and each pod installs it when it starts",
    )
    parser.add_argument(
        "--index-url",
        default="",
        metavar="URL",
        help="index of --pip, here and in the pods (default: that of each pip)",
    )
    parser.add_argument(
        "--python-version",
        default="",
        metavar="X.Y",
        help="Python of the image, for --pip (default: versions that fit every Python from 3.10 on)",
    )
    parser.add_argument("--env-from", action="append", default=[], metavar="SECRET", help="variables from a Secret")
    parser.add_argument(
        "--data", action="append", default=[], metavar="CLAIM:PATH", help="a volume; CLAIM:PATH:ro cannot be written"
    )
    parser.add_argument(
        "--checkpoint",
        default="",
        metavar="CLAIM",
        help="a volume claim for checkpoints; new:5Gi makes one, which stays when the job is deleted",
    )
    plugin.add_where(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--save", metavar="FILE", help="write the manifest into a file, and submit nothing")
    only.add_argument("--dry-run", action="store_true", help="print the manifest, and let the API server check it")
    only.add_argument("--detach", action="store_true", help="do not follow the job")


def run(args: argparse.Namespace, defaults: argparse.Namespace) -> int:
    """Submit, and return the exit code. `defaults` has the options as they are if none is given.

    Raises ClientError or SpecError with one sentence.
    """
    objects = _objects(args, defaults)
    parse_job(copy.deepcopy(objects.job))
    if args.save:
        _save(objects, args.save)
        return 0
    say(_shown(objects))
    with connect(plugin.target(args)) as api:
        if args.dry_run:
            creation.check(api, objects)
            say("# The API server accepts this. Nothing was created.")
            return 0
        job = creation.create(api, objects)
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        say(f"# The job {name} is in the namespace {namespace}.")
        return 0 if args.detach else _follow(api, name, namespace)


def _objects(args: argparse.Namespace, defaults: argparse.Namespace) -> Objects:
    script = Path(args.script)
    if script.suffix in (".yaml", ".yml"):
        given = [
            name for name, value in vars(args).items() if name not in _CONTROLS and value != getattr(defaults, name)
        ]
        given = [f"--{name.replace('_', '-')}" for name in given] + (["ARGS"] if args.args else [])
        if given:
            raise SubmitError(f"{given[0]} does not go with a manifest ({script}). Write it into the manifest.")
        return creation.of_documents(_documents(script, args.namespace), str(script))
    if script.suffix != ".py":
        raise SubmitError(f"SCRIPT ({script}) ends neither in .py nor in .yaml. Give a Python script, or a manifest.")
    path, files = bundle.travelling(script, args.directory)
    env = dict(map(_variable, args.env))
    choices = Choices(
        name=submission.job_name(script.stem) if args.name is None else args.name,
        image=args.image or "",
        script=path,
        arguments=args.args,
        workers=args.workers,
        least=args.min,
        most=args.max,
        gpus=args.gpus,
        cpu=args.cpu,
        memory=args.memory,
        framework=args.framework,
        env=env,
        env_from=args.env_from,
        data=args.data,
        checkpoint=args.checkpoint,
        user=args.user,
        namespace=args.namespace or "",
        packages=packages.resolve(args.pip, args.index_url, args.python_version, env),
    )
    return submission.objects(choices, files)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SubmitError(f"--env ({text}) has no value. Write NAME=VALUE.")
    return name, value


def _documents(path: Path, namespace: str | None) -> list[dict[str, Any]]:
    """Return the objects in a manifest. The namespace of the command line is written into those that have none."""
    try:
        found = [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]
    except OSError as error:
        raise SubmitError(f"FILE ({path}) cannot be read ({error.strerror}). Give a file that exists.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = "" if place is None else f", line {place.line + 1}"
        raise SubmitError(f"FILE ({path}{line}) is no YAML. Correct it, or give another file.") from None
    for one in found:
        if not isinstance(one, dict):
            raise SubmitError(f"FILE ({path}) has a document that is no object. Give a manifest.")
        metadata = one.get("metadata")
        if not namespace or not isinstance(metadata, dict):
            continue
        if metadata.setdefault("namespace", namespace) != namespace:
            raise SubmitError(
                f"--namespace ({namespace}) is not the one in {path} ({metadata['namespace']}). Leave one of them out."
            )
    return found


def _save(objects: Objects, path: str) -> None:
    try:
        Path(path).write_text(as_yaml(objects.all()), encoding="utf-8")
    except OSError as error:
        raise SubmitError(f"--save ({path}) cannot be written ({error.strerror}). Give another file.") from None
    say(f"The manifest is in {path}. Submit it with: regroup submit {path}")


def _shown(objects: Objects) -> str:
    """Return the manifest as a user wants to see it: the files of the job by name and size."""
    lines = []
    for one in objects.code:
        items = {**one.get("data", {}), **one.get("binaryData", {})}
        num_files = sum(not key.startswith(".") for key in items)  # without what installs packages
        lines.append(f"# ConfigMap {one['metadata']['name']}: {views.counted(num_files, 'file')}")
    return "\n".join([*lines, as_yaml([*objects.others, objects.job]).rstrip()])


def _follow(api: Api, name: str, namespace: str) -> int:
    """Print a line for each change until the job trains or ends, and return the exit code."""
    said = ""
    try:
        for job in ClusterJobs(api.in_namespace(namespace)).changes(name):
            line, state = views.line(job), views.state(job)
            if line != said:
                say(f"{time.strftime('%H:%M:%S')}  {line}")
                said = line
            if state == "Suspended" or state in views.ENDED or views.trains(job):
                break
    except (KeyboardInterrupt, ApiError, LostError) as error:
        if not isinstance(error, ApiError) or not error.is_final:
            say(f"The job goes on. To look at it: kubectl regroup watch {name} -n {namespace}")
        raise
    if state == "Failed":
        say("\n".join(views.why(job, [], [])))
        return 1
    say(
        f"To follow it: kubectl regroup watch {name} -n {namespace}, and kubectl regroup logs {name} -n {namespace} --follow"
    )
    return 0
