"""The command line `regroup`: runs jobs of this machine, and looks at them."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys

from regroup.protocol import frameworks
from regroup.train import command as training
from regroup_cli import completion, local, logs, pull, submit, verbs
from regroup_cli.convert import command as converting
from regroup_cli.plugin import UNREACHABLE
from regroup_cli.streams import guarded
from regroup_client.errors import ArgumentError, ClientError, JobError, LostError, SubmitError
from regroup_client.local_jobs import LocalJobs, local_views
from regroup_client.log_streams import LogsError
from regroup_operator.api import SpecError
from regroup_operator.model.records import Settings

LOOK_S = 0.5
"""Time between two looks at a local job while its logs are followed."""


_DIRECTORY = "the directory that `regroup run` printed, or the name of a job in `regroup list`"


def parser() -> argparse.ArgumentParser:
    """Return the parser. Its help is part of the product."""
    top = argparse.ArgumentParser(
        prog="regroup",
        description="Run and control training jobs on this machine, and submit scripts to a cluster.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script as a job of local worker processes",
        description="Run SCRIPT as a training job of local worker processes, under the same rules as in a cluster: a process "
        "that dies is replaced, while the others keep running with their state in memory. Ctrl-C ends the job.",
        epilog="Exit code: 0 if the script has returned 0 in all workers. If the script fails the job, the exit code of the "
        "process that the message names, 128 + n for signal n. 1 if the job fails for another reason, 2 if the arguments are "
        "refused before anything runs, 130 after Ctrl-C. Example: regroup run --workers 3 --max 5 manifests/samples/digits.py",
    )
    run.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of workers (default: what a launcher such as torchrun says, else the smallest of --sizes, else 1)",
    )
    run.add_argument(
        "--min",
        type=int,
        metavar="N",
        help="fewest workers to train with; makes the job resizable (default with --max: 1)",
    )
    run.add_argument(
        "--max",
        type=int,
        metavar="N",
        help="most workers; makes the job resizable (default with --min: N of --workers)",
    )
    run.add_argument(
        "--sizes",
        type=sizes,
        metavar="N,N",
        help="numbers of workers that the script can train with, for example 2,4,8; makes the job resizable (default: every "
        "number). --min and --max default to the smallest and the largest",
    )
    run.add_argument(
        "--grow-at",
        choices=["now", "checkpoint"],
        help="when a script without the library grows: now, or right after its next checkpoint, so that it loses nothing; makes "
        "the job resizable (default now)",
    )
    run.add_argument(
        "--processes-per-worker",
        type=int,
        metavar="P",
        help="processes per worker (default 1, or what a launcher such as torchrun says)",
    )
    run.add_argument(
        "--workers-per-group",
        type=int,
        default=1,
        metavar="W",
        help="workers that hold one copy of the model together; N, --min and --max are multiples of it (default 1)",
    )
    run.add_argument(
        "--framework",
        choices=frameworks.ALL,
        default=frameworks.PYTORCH,
        help="framework of a script without the library, whose environment its processes get (default PyTorch)",
    )
    run.add_argument(
        "--gpus",
        choices=["auto", "none"],
        default="auto",
        help="auto: each process gets a GPU of its own, of those in CUDA_VISIBLE_DEVICES or else of all, and a run with too few is "
        "refused; none: the workers see no GPU, for scripts that compute on the CPU (default auto)",
    )
    run.add_argument("--checkpoint", metavar="DIR", help="directory for checkpoints (default: no checkpoints)")
    run.add_argument(
        "--resume",
        metavar="DIR",
        help="begin with the newest checkpoint in DIR, or with the one that DIR is, instead of step 0; new ones are written "
        "beside it unless --checkpoint says where",
    )
    run.add_argument(
        "--checkpoint-every", type=int, default=300, metavar="S", help="seconds between two checkpoints (default 300)"
    )
    run.add_argument(
        "--checkpoint-keep", type=int, default=3, metavar="K", help="number of checkpoints to keep (default 3)"
    )
    run.add_argument(
        "--checkpoint-wait",
        type=seconds,
        default=Settings.checkpoint_s,
        metavar="S",
        help="longest wait for the last checkpoint, in seconds (default 1800)",
    )
    run.add_argument(
        "--memory-snapshot",
        metavar="SIZE",
        help="memory for a copy of the state that outlives the processes, at least twice the state's size, such as 2Gi "
        "(default: no copy)",
    )
    run.add_argument(
        "--memory-snapshot-every",
        type=int,
        default=10,
        metavar="S",
        help="seconds between two copies (default 10)",
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=10,
        metavar="N",
        help="failures allowed per hour; the next one fails the job (default 10)",
    )
    run.add_argument(
        "--disconnect-seconds",
        type=int,
        default=5,
        metavar="S",
        help="seconds of silence until a worker counts as lost (default 5)",
    )
    run.add_argument(
        "--rejoin-seconds",
        type=int,
        default=0,
        metavar="S",
        help="seconds to wait for a crashed process before continuing without its worker (default 0)",
    )
    run.add_argument(
        "--hang-seconds",
        type=int,
        metavar="S",
        help="seconds without a step until the job counts as hung (default: from its step times, at least 300)",
    )
    run.add_argument(
        "--progress-log",
        metavar="PATTERN",
        help="regular expression with the groups step, total, percent and loss, which finds the progress of a script without the "
        r"library in its output, such as 'iter (?P<step>\d+): loss (?P<loss>\S+)'",
    )
    run.add_argument(
        "--stop-signal",
        metavar="SIGNAL",
        help="signal that tells a script without the library to save and end before a planned change, such as SIGUSR1",
    )
    run.add_argument(
        "--stop-seconds",
        type=int,
        default=60,
        metavar="S",
        help="seconds that a script without the library may take to end before a planned change (default 60)",
    )
    run.add_argument(
        "--first-step-seconds",
        type=seconds,
        default=Settings.first_step_s,
        metavar="S",
        help="longest first step of a process, in seconds (default 1800)",
    )
    run.add_argument(
        "--first-wait",
        type=seconds,
        default=30.0,
        metavar="S",
        help="seconds until the job starts with fewer workers (default 30)",
    )
    run.add_argument(
        "--join-quiet",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds to collect workers that join before resizing (default 1)",
    )
    run.add_argument("--name", default="local", help="name of the job (default local)")
    run.add_argument(
        "--state-dir",
        metavar="DIR",
        help="directory for the job's files, kept after the job (default: a temporary one)",
    )
    run.add_argument("--ui", action="store_true", help="show the job in a browser, too, until it ends: see regroup ui")
    verbs.add_port(run)
    run.add_argument("--plain", action="store_true", help="print lines on a terminal, too, and draw no screen")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument(
        "script",
        metavar="SCRIPT",
        help="a Python script, a YAML configuration for `regroup train`, or any command, also of a launcher: torchrun, accelerate "
        "launch, deepspeed, horovodrun, mpirun",
    )
    rest = run.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments for the script")
    rest.required = False  # argparse would name ARGS, too, where only SCRIPT is missing
    train = commands.add_parser(
        "train",
        help="train what a configuration says, in this process",
        description="Train what CONFIG says, in this process. `regroup run CONFIG` does the same in several processes, and "
        "`python -m regroup.train CONFIG` is the command of a job in a cluster.",
        epilog="example: regroup train manifests/samples/train/digits.yaml --set steps=200",
    )
    training.add_arguments(train)
    submitted = commands.add_parser(
        "submit",
        help="run a script as a job in a cluster, without building an image",
        description=submit.DESCRIPTION,
        epilog=submit.EPILOG,
        allow_abbrev=False,
    )
    submit.add_arguments(submitted)
    verbs.add_parsers(commands, "DIR", _DIRECTORY)
    verbs.add_page(commands)
    log = commands.add_parser(
        "logs",
        help="print the logs of a job's workers",
        description=logs.DESCRIPTION,
        epilog=verbs.EXIT_CODES,
        allow_abbrev=False,
    )
    logs.add_arguments(log)
    log.add_argument("job", metavar="DIR", help=_DIRECTORY)
    checkpoint = commands.add_parser(
        "checkpoint",
        help="list, verify, export or pull checkpoints",
        description="Look at the checkpoints in a directory, export one, or pull one from a job in a cluster.",
    )
    kinds = checkpoint.add_subparsers(dest="kind", required=True, metavar="COMMAND")
    listing = kinds.add_parser(
        "list",
        help="list checkpoints, the newest first",
        description="List the checkpoints in a directory, the newest first, and those that are not complete.",
    )
    verify = kinds.add_parser(
        "verify",
        help="read checkpoints and compare every file with what was committed",
        description="Read checkpoints and compare every file with what was committed. Exit code 1 if one cannot be used.",
    )
    for one in (listing, verify):
        one.add_argument("directory", metavar="DIR", help="the directory of spec.checkpoint, or of --checkpoint")
    verify.add_argument(
        "name", nargs="?", metavar="NAME", help="a checkpoint, as `list` names it (default: the newest)"
    )
    verify.add_argument("--all", action="store_true", help="every complete checkpoint")
    pulled = kinds.add_parser(
        "pull",
        help="copy a checkpoint of a job in a cluster to this machine",
        description=pull.DESCRIPTION,
        epilog=pull.EPILOG,
    )
    pull.add_arguments(pulled)
    exported = kinds.add_parser(
        "export",
        help="write a checkpoint's model as one safetensors file",
        description="Write the model of a checkpoint as one safetensors file, whatever number of workers or split it was trained "
        "with. Tensors have the names and types that the model's state_dict has. Every file of the checkpoint is compared with "
        "what was committed first. Exit code 1 if the checkpoint is damaged, 2 if the command is refused.",
        epilog="example: regroup checkpoint export checkpoints --to model.safetensors",
    )
    exported.add_argument(
        "directory",
        metavar="DIR|JOB",
        help="the directory of spec.checkpoint, or of --checkpoint; or one checkpoint in it; or, if there is no such directory, a "
        "job in the cluster, whose checkpoint is pulled first",
    )
    pull.add_where(exported)
    exported.add_argument("--to", required=True, metavar="FILE", help="the file to write; it must not exist")
    exported.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    exported.add_argument(
        "--optimizer", metavar="FILE", help="write the optimizer's state to this file, too (default: it is left out)"
    )
    converted = commands.add_parser(
        "convert",
        help="write the job of another operator, or of Slurm, as a DistributedTrainingJob",
        description="Read jobs of other operators (PyTorchJob, TFJob, MPIJob, XGBoostJob, TrainJob with its runtime, JobSet) or "
        "a script for sbatch, and write each as a DistributedTrainingJob. The command says on stderr what became of each field: "
        "mapped, changed in meaning, unneeded, or dropped. Other objects in the files stay as they are.",
        epilog="Exit code: 0 if the jobs were written, 1 with --strict if a field was dropped, 2 if a file cannot be "
        "converted or the operator would refuse the result. Example: regroup convert pytorchjob.yaml -o job.yaml",
    )
    converting.add_arguments(converted)
    replayed = commands.add_parser(
        "replay",
        help="show an operator's decision log, and make its decisions again",
        description="Show the decisions in FILE, an operator's decision log, and make each again from what it was made from. "
        "Exit code 1 if this version decides one otherwise.",
        epilog="example: regroup replay --job team/digits decisions.jsonl",
    )
    replayed.add_argument("file", metavar="FILE", help="the decision log, or one of its older parts")
    replayed.add_argument("--job", metavar="NAMESPACE/NAME", help="only decisions on this job (default: all)")
    shell = commands.add_parser(
        "completion",
        help="print what a shell needs to complete words of this command",
        description="Print what a shell needs to complete words of this command. kubectl asks kubectl_complete-regroup by itself, "
        "if it is on the PATH.",
        epilog='example: eval "$(regroup completion bash)"',
    )
    shell.add_argument("shell", choices=sorted(completion.SCRIPTS), help="your shell")
    for command in (*commands.choices.values(), *kinds.choices.values()):
        command.allow_abbrev = False  # an abbreviation means another option once one more begins like it
    return top


def seconds(text: str) -> float:
    """Return a number of seconds. argparse turns the ValueError for any other text into a sentence."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds; give a number of at least 0")
    return value


def sizes(text: str) -> list[int]:
    """Return the numbers of --sizes. argparse says what is wrong with another text."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no ascending list of numbers of at least 1; give one such as 2,4,8"
        )
    return numbers


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code. A user's error is one sentence and exit code 2."""
    given = sys.argv[1:] if argv is None else argv
    if given[:2] == ["complete", "--"]:  # asked by the shell's function
        names = (view.name for view in local_views())
        print("\n".join(completion.words(parser(), given[2:], lambda: names)))
        return 0
    rest: list[str] = []
    if given[:1] == ["submit"] and "--" in given:  # argparse loses arguments that options separate from the script
        given, rest = given[: given.index("--")], given[given.index("--") + 1 :]
    args = parser().parse_args(given)
    try:
        if args.command == "submit":
            args.args += rest
            return submit.run(args, parser().parse_args(["submit", args.script]))
        if args.command == "run":
            from regroup_cli.run import run

            return asyncio.run(run(args))
        if args.command == "train":
            return training.run(args)
        if args.command == "checkpoint":
            if args.kind == "pull":
                return pull.run(args)
            if args.kind == "export" and pull.is_job(args.directory):
                return pull.export(args)
            from regroup_cli import checkpoint

            return checkpoint.run(args)
        if args.command == "convert":
            return converting.run(args)
        if args.command == "replay":
            from regroup_cli import replay

            return replay.run(args)
        if args.command == "completion":
            print(completion.SCRIPTS[args.shell], end="")
            return 0
        if args.command == "ui":
            from regroup_cli.page import command as page
            from regroup_cli.page.sources import Local

            return page.run(Local(LocalJobs(local.edit)), args, lambda said: print(f"regroup: {said}", flush=True))
        if args.command == "logs":
            return logs.show(
                LocalJobs(local.edit), args, lambda said: print(f"regroup: {said}", file=sys.stderr), LOOK_S
            )
        return verbs.run(LocalJobs(local.edit), args)
    except (SpecError, ClientError) as error:
        for line in str(error).splitlines():
            print(f"regroup: {line}", file=sys.stderr)
        if isinstance(error, LostError):
            return UNREACHABLE
        return 2 if isinstance(error, (ArgumentError, SpecError, SubmitError, JobError, LogsError)) else 1


if __name__ == "__main__":
    sys.exit(guarded("regroup", main))
