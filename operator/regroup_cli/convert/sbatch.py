"""The rules for a script of sbatch: its options, its lines, and the command that it gives to srun.

A script is a program, and only its usual parts have a counterpart. Every line gets a finding; what the job does not run is dropped
by name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regroup.protocol import launchers
from regroup_cli.convert import shell
from regroup_cli.convert.draft import Draft, legal_name
from regroup_cli.convert.findings import Field, Ledger
from regroup_cli.convert.launch import take_launch, without_meeting
from regroup_operator.api import SpecError
from regroup_operator.api.template import is_reserved_env

SHORT = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-t": "--time", "-J": "--job-name", "-p": "--partition",
         "-A": "--account", "-o": "--output", "-e": "--error", "-q": "--qos", "-C": "--constraint", "-w": "--nodelist",
         "-x": "--exclude", "-D": "--chdir", "-d": "--dependency", "-a": "--array", "-G": "--gpus", "-L": "--licenses",
         "-m": "--distribution", "-b": "--begin", "-i": "--input", "-l": "--label",
         "-u": "--unbuffered", "-K": "--kill-on-bad-exit"}  # fmt: skip
"""Long names of the short options of sbatch and srun."""
FLAGS = frozenset({"--exclusive", "--requeue", "--no-requeue", "--contiguous", "--overcommit", "--parsable", "--wait", "--label",
                   "--unbuffered", "--no-kill", "--overlap", "--exact", "--hold", "--spread-job", "--use-min-nodes", "--verbose",
                   "--quiet", "--container-mount-home", "--no-container-mount-home", "--container-writable",
                   "--kill-on-bad-exit"})  # fmt: skip
"""Options without a value of their own."""
_QUEUE = "Kueue's label kueue.x-k8s.io/queue-name, or a namespace with a quota, says where the job may run."
_NODES = "Set nodeSelector or affinity in spec.template.spec."
_LOGS = "The output of all processes is in the pods' logs: kubectl regroup logs."
_BINDING = "The kubelet's CPU and topology managers place a pod on cores of its own."
DROPPED = {
    "--partition": _QUEUE, "--account": _QUEUE, "--qos": _QUEUE, "--reservation": _QUEUE, "--constraint": _NODES,
    "--nodelist": _NODES, "--exclude": _NODES, "--contiguous": _NODES, "--switches": _NODES, "--licenses": _QUEUE,
    "--array": "Apply a job for each index.",
    "--dependency": "Regroup knows no order of jobs. A workflow engine, such as Argo, does.",
    "--begin": "A CronJob, or spec.runPolicy.suspend, can hold a job back.",
    "--mail-type": "Alerts on Regroup's metrics can send mail: docs/how-to/monitor.md.",
    "--mail-user": "Alerts on Regroup's metrics can send mail: docs/how-to/monitor.md.",
    "--tmp": "Set ephemeral-storage in the container's resources.",
    "--nice": "Set priorityClassName in spec.template.spec.", "--priority": "Set priorityClassName in spec.template.spec.",
    "--exclusive": "Ask for all GPUs or CPUs of a node in the container's resources.",
    "--container-mounts": "Mount volumes in spec.template.spec.",
    "--prolog": "An init container runs before the program.", "--epilog": "Nothing runs behind the program in its pod.",
}  # fmt: skip
UNNEEDED = {
    "--output": _LOGS, "--error": _LOGS, "--open-mode": _LOGS, "--label": _LOGS, "--unbuffered": _LOGS,
    "--requeue": "A job whose node is lost goes on by itself.", "--no-requeue": "spec.recovery bounds restarts.",
    "--export": "The environment of the shell that submits a job does not reach it.", "--get-user-env": "There is no login.",
    "--cpu-bind": _BINDING, "--cpus-bind": _BINDING, "--gpu-bind": _BINDING, "--mem-bind": _BINDING, "--hint": _BINDING,
    "--distribution": _BINDING, "--threads-per-core": _BINDING, "--gres-flags": _BINDING, "--accel-bind": _BINDING,
    "--kill-on-bad-exit": "A process that fails ends its generation, and all start again.",
    "--wait-all-nodes": "A job of fixed size trains once all its workers run.", "--wait": "kubectl regroup watch waits.",
    "--parsable": "It changes what sbatch prints.", "--verbose": "It changes what srun prints.",
    "--overlap": "There is one program.",
    "--quiet": "It changes what srun prints.", "--exact": "There is one program.",
    "--mpi": "MPI does not start the program.",
    "--no-kill": "The other workers go on when a node is lost.", "--comment": "It is a comment.",
    "--container-workdir": "It is workingDir.", "--container-mount-home": "There is no home.", "--jobid": "It names Slurm's job.",
    "--no-container-mount-home": "There is no home.", "--container-writable": "A container can write to its own files.",
    "--container-name": "It names a container of Slurm.", "--network": "The cluster's network is the pods'.",
}  # fmt: skip
_ENVIRONMENT = (
    "module",
    "source",
    ".",
    "conda",
    "mamba",
    "micromamba",
    "spack",
    "ml",
    "uv",
    "pip",
    "pip3",
    "virtualenv",
)
"""Commands that prepare the environment of a program."""
_LOGGING = ("set", "echo", "date", "hostname", "env", "printenv", "nvidia-smi", "ulimit", "sleep", "scontrol", "squeue", "wait",
            "true", "printf", "whoami", "pwd", "ls", "sstat", "sacct", "exit", "shopt", "unset", "trap")  # fmt: skip
_RENDEZVOUS = re.compile(
    r"scontrol|hostname|SLURM_(JOB_)?NODELIST|SLURM_NODEID|SLURM_PROCID|SLURM_LOCALID|SLURM_LAUNCH_NODE|head_node|RANDOM"
)
_MOST_SHOWN = 60
"""Characters of a line that are repeated in the findings on it."""
_SLURMS = "Slurm's variables do not exist in the pods."
_AS_IS = "The program, its files and its libraries come from the image or from volumes of spec.template.spec."


@dataclass
class _Script:
    """The parts of a script that make the job."""

    options: dict[str, str] = field(default_factory=dict)
    of: dict[str, Field] = field(default_factory=dict)
    """The fields of the options, for findings."""
    variables: dict[str, str] = field(default_factory=dict)
    meeting: set[str] = field(default_factory=set)
    """Names of variables by which workers meet."""
    exported: dict[str, str] = field(default_factory=dict)
    directory: str | None = None
    launch: list[str] = field(default_factory=list)
    line: Field | None = None
    by_srun: bool = False


def convert(text: str, draft: Draft, ledger: Ledger, *, name: str, image: str | None) -> None:
    """Convert a script. `name` is the job's if the script has none, `image` that of the command line."""
    script = _Script()
    for one, option, value in _options(text, ledger):
        _take(script, one, option, value)
    sizes = _Sizes.of(script)
    script.variables.update(sizes.variables)
    lines = list(shell.commands(_without_options(text)))
    starts = _by_launcher if any(_by_launcher(_divided(line.words)[1]) for line in lines) else _by_python
    for command in lines:
        _read(command, script, ledger, starts)
    if not script.launch or script.line is None:
        raise SpecError("No line starts the program. A script has a line such as srun torchrun train.py.")
    sizes = _Sizes.of(script)  # srun may have said more
    _write(script, sizes, draft, name=name, image=image)
    take_launch(draft, script.line)


def _take(script: _Script, one: Field, option: str, value: str) -> None:
    """Record an option. The last of several of one name counts, as in Slurm; `--export` also sets variables."""
    if option == "--export":
        words = [word for word in value.split(",") if "=" in word]
        _assign(words, True, script, one)
        if not words:
            one.unneeded(UNNEEDED[option])
        return
    if option in script.of:
        script.of[option].unneeded(f"{one} takes its place.")
    script.options[option], script.of[option] = value, one


@dataclass(frozen=True)
class _Sizes:
    """The numbers that the options ask for."""

    nodes: int
    tasks: int
    """Tasks on each node."""
    gpus: int | None
    """GPUs on each node."""
    cpus: int | None
    """CPUs on each node."""

    @property
    def variables(self) -> dict[str, str]:
        """Slurm's variables with these numbers."""
        found = {"SLURM_NNODES": self.nodes, "SLURM_JOB_NUM_NODES": self.nodes, "SLURM_NTASKS": self.nodes * self.tasks,
                 "SLURM_NPROCS": self.nodes * self.tasks, "SLURM_NTASKS_PER_NODE": self.tasks,
                 "WORLD_SIZE": self.nodes * self.tasks}  # fmt: skip
        if self.gpus is not None:
            found.update(
                {
                    "SLURM_GPUS_ON_NODE": self.gpus,
                    "SLURM_GPUS_PER_NODE": self.gpus,
                    "SLURM_GPUS": self.gpus * self.nodes,
                }
            )
        if self.cpus is not None:
            found.update({"SLURM_CPUS_PER_TASK": self.cpus // self.tasks, "SLURM_CPUS_ON_NODE": self.cpus})
        return {name: str(number) for name, number in found.items()}

    @classmethod
    def of(cls, script: _Script) -> _Sizes:
        """Return the numbers of a script."""

        def number(option: str) -> int | None:
            text = script.options.get(option)
            if text is None:
                return None
            text = shell.expand(text, script.variables)[0]
            if not text.isdecimal() or int(text) < 1:
                raise SpecError(f"{script.of[option]} ({text}) is no number of at least 1. Write a number.")
            return int(text)

        nodes, _, most = (script.options.get("--nodes") or "1").partition("-")
        script.options["--nodes"] = nodes
        if most:
            script.of["--nodes"].note(
                f"The job has {nodes} worker{'' if nodes == '1' else 's'}. With spec.elasticPolicy it can have up to {most}."
            )
        script.of.setdefault("--nodes", Field(None, Ledger()))
        num_nodes = number("--nodes") or 1
        tasks = number("--ntasks-per-node")
        total = number("--ntasks")
        if tasks is None:
            tasks = _share(script, "--ntasks", total, num_nodes) if total is not None else 1
        gpus = number("--gpus-per-node") if _plain(script, "--gpus-per-node") else None
        for option, times in (("--gres", 1), ("--gpus-per-node", 1), ("--gpus-per-task", tasks), ("--gpus", 0)):
            text = script.options.get(option)
            if gpus is None and text is not None:
                found = re.search(r"(?:gpu:)?(?:[\w.-]+:)?(\d+)$", text.split(",")[0])
                if found is None and option == "--gres" and "gpu" in text:
                    gpus = 1
                elif found is not None and (option != "--gres" or "gpu" in text):
                    gpus = int(found[1]) * times if times else _share(script, option, int(found[1]), num_nodes)
        cpus = number("--cpus-per-task")
        return cls(num_nodes, tasks, gpus, None if cpus is None else cpus * tasks)


def _share(script: _Script, option: str, total: int, num_nodes: int) -> int:
    """Return the part of one node. Raises SpecError if nodes would have different parts."""
    if total % num_nodes:
        raise SpecError(
            f"{script.of[option]} is no multiple of the {num_nodes} nodes, and all workers of a job are alike. Write a multiple."
        )
    return total // num_nodes


def _plain(script: _Script, option: str) -> bool:
    return script.options.get(option, "").isdecimal()


def _options(text: str, ledger: Ledger) -> Iterator[tuple[Field, str, str]]:
    """Yield (field, long name, value) of each #SBATCH line's options."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            words = _words(line.removeprefix("#SBATCH").split(" #")[0])
            if words[:1] in (["hetjob"], ["packjob"]):
                raise SpecError(
                    f"line {number} (#SBATCH {words[0]}): the script asks for nodes of several kinds, and all workers of a job are "
                    "alike. Convert a script for each kind."
                )
            found, left = _split(words, f"line {number} (#SBATCH {{}})", ledger)
            yield from found
            if left:
                rest = " ".join(left)
                Field(rest, ledger, (f"line {number} (#SBATCH ... {rest})",)).dropped("It is no option of sbatch.")


def _words(text: str) -> list[str]:
    """Return the words of an option line, in which quotes hold spaces."""
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe in a comment
        return text.split()


def _split(words: list[str], where: str, ledger: Ledger) -> tuple[list[tuple[Field, str, str]], list[str]]:
    """Return the options that words begin with, as fields with their values, and the words behind them."""
    found = []
    while words and words[0].startswith("-") and words[0] != "--":
        shown, *words = words
        name, equals, value = shown.partition("=")
        if not name.startswith("--") and len(name) > 2:
            name, equals, value = name[:2], "=", name[2:] + (f"={value}" if equals else "")
        name = SHORT.get(name, name)
        if not equals and name not in FLAGS and words and not words[0].startswith("-"):
            value, *words = words
        value = value.strip("\"'")
        path = where.format(shown if equals else f"{shown} {value}".strip())
        found.append((Field(value or name, ledger, (path,)), name, value))
    return found, words


def _without_options(text: str) -> str:
    return "\n".join("" if line.startswith("#") else line for line in text.splitlines())


def _read(command: shell.Command, script: _Script, ledger: Ledger, starts: Callable[[list[str]], bool]) -> None:
    """Read a line, and record what becomes of it. `starts` decides whether its words start the program."""
    before, words = _divided(shell.split_values(command, script.variables))
    if before and not (words and starts(words)):
        before, words = [], [*before, *words]
    if not words or words[0] in shell.CLOSES:
        return
    shown = " ".join(command.text.replace("\\\n", " ").split())
    shown = shown if len(shown) <= _MOST_SHOWN else shown[: _MOST_SHOWN - 3] + "..."
    line = Field(shown, ledger, (f"line {command.line} ({shown})",))
    first = words[0]
    if first == "export" or all(map(shell.is_assignment, words)):
        _assign([word for word in words if word != "export"], first == "export", script, line)
    elif command.depth and starts(words):
        raise SpecError(
            f"{line}: the program is started in a loop or a condition, which cannot be converted. Write one command."
        )
    elif command.depth:
        line.dropped(
            "Regroup runs one program and no script around it. Put the step into the image, or into an init container."
        )
    elif first == "cd" and len(words) == 2:
        directory, left = shell.expand(words[1], script.variables)
        if left:
            line.dropped(f"{_SLURMS} Set workingDir in spec.template.spec.containers.")
        else:
            script.directory = line.mapped("spec.template.spec.containers[0].workingDir") and directory
    elif first in _ENVIRONMENT:
        line.dropped("The image has the program's environment. Install what this line makes available there.")
    elif first in _LOGGING or _prints(words):
        line.unneeded("It prints, waits, or is for the shell.")
    elif starts(words):
        if script.launch:
            raise SpecError(f"{line} starts a second program, and a job has one. Convert a script for each.")
        if before:
            _assign(before, True, script, line)
        _check_patterns(command, line, script.variables)
        _launch(words, script, line, ledger)
    else:
        line.dropped(
            "Regroup runs one program and no script around it. Put the step into the image, or into an init container."
        )


def _divided(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the assignments before a command, as in `A=1 python train.py`, and its other words."""
    words = list(command)
    while words and words[0] in ("then", "else", "do"):
        words.pop(0)
    number = next((at for at, word in enumerate(words) if not shell.is_assignment(word)), 0)
    return words[:number], words[number:]


def _assign(words: list[str], is_export: bool, script: _Script, line: Field) -> None:
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            if name in script.variables:
                script.exported[name] = script.variables[name]
            continue
        value, left = shell.expand(text, script.variables)
        derived = any(one.strip("${}").partition("[")[0] in script.meeting for one in left)
        if is_reserved_env(name) or (left and (derived or _RENDEZVOUS.search(word))):
            script.meeting.add(name)
            line.unneeded(
                "Regroup chooses the address at which workers meet, and sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
            )
        elif left:
            line.dropped(f"Only a shell on Slurm knows {', '.join(left)}. Set env in spec.template.spec.containers.")
        else:
            script.variables[name] = value
            if is_export:
                script.exported[name] = value
                line.mapped(f"spec.template.spec.containers[0].env[{name}]")
            else:
                line.unneeded("Its value stands where the script uses it.")


def _by_launcher(words: list[str]) -> bool:
    if not words:
        return False
    if words[0].rpartition("/")[2] == "srun":
        return "hostname" not in words and not _prints(words)
    return launchers.recognise(words) is not None


def _prints(words: list[str]) -> bool:
    """Return whether srun starts a program that only prints, such as `srun -l nvidia-smi`."""
    if words[0].rpartition("/")[2] != "srun":
        return False
    left = _split(words[1:], "{}", Ledger())[1]
    return bool(left) and left[0].rpartition("/")[2] in _LOGGING


def _by_python(words: list[str]) -> bool:
    return bool(words) and words[0].rpartition("/")[2].startswith("python")


def _check_patterns(command: shell.Command, line: Field, variables: Mapping[str, str]) -> None:
    """Refuse or name words that a shell replaces: Regroup starts the program without one."""
    if command.braces:
        raise SpecError(
            f"{line} has {', '.join(command.braces)}, which a shell makes several words of. Write these words."
        )
    values = [(name, variables.get(name, "")) for name in command.variables]
    patterns = [*command.patterns, *(f"${name} ({value})" for name, value in values if shell.is_pattern(value))]
    if patterns:
        line.note(
            f"Regroup passes {', '.join(patterns)} as written. A shell replaces a pattern by the files that fit, if there "
            "are any. If your script needs that, let srun start bash -c 'python train.py ...'."
        )


def _launch(words: list[str], script: _Script, line: Field, ledger: Ledger) -> None:
    """Read the command that starts the program, with the options of srun."""
    if words[0].rpartition("/")[2] == "srun":
        script.by_srun = True
        found, words = _split(words[1:], f"{str(line).split(' (')[0]} (srun {{}})", ledger)
        for one, option, value in found:
            if option in script.options and option in ("--nodes", "--ntasks", "--ntasks-per-node"):
                one.unneeded("#SBATCH has the number, and the job runs on all nodes.")
            else:
                _take(script, one, option, value)
        words = words[1:] if words[:1] == ["--"] else words
    text = shell.text_of(words)
    if text is not None:
        commands = [one for one in shell.commands(text) if one.words[0] not in _LOGGING]
        needs_shell = any(one.patterns or one.braces for one in commands)
        inner = [] if needs_shell else [list(one.words) for one in commands]
        sets = [words_ for words_ in inner if words_[0] == "export" or all(map(shell.is_assignment, words_))]
        inner = [words_ for words_ in inner if words_ not in sets]
        if len(inner) == 1:
            for setting in sets:
                _assign([word for word in setting if word != "export"], setting[0] == "export", script, line)
            words = inner[0][1:] if inner[0][0] == "exec" else inner[0]
            line.note("The shell around the program is left out, because Regroup sets the ranks that it would.")
    found_launcher = launchers.recognise(words)
    if found_launcher is not None and found_launcher.launcher == "torchrun":
        known = [shell.expand(word, script.variables)[0] for word in words]
        kept = without_meeting(known)
        if kept != known:
            line.note(
                "Options of torchrun by which its workers meet are left out, because Regroup chooses the address."
            )
        words = kept
    made = []
    for word in words:
        text_, left = shell.expand(word, script.variables)
        if left:
            raise SpecError(f"{line} uses {', '.join(left)}, which only a shell on Slurm knows. Write the value.")
        made.append(text_)
    if not made:
        raise SpecError(f"{line} has no program behind srun. Add it.")
    script.launch, script.line = made, line
    line.mapped("spec.template.spec.containers[0].command")
    line.note(_AS_IS)


def _write(script: _Script, sizes: _Sizes, draft: Draft, *, name: str, image: str | None) -> None:
    """Write the job from what has been read."""
    assert script.line is not None
    of, options = script.of, script.options
    given = of.get("--job-name")
    draft.metadata["name"] = legal_name(given if given else Field(name, Ledger()))
    draft.put("replicas", sizes.nodes)
    of["--nodes"].mapped("spec.replicas")
    launcher = launchers.recognise(script.launch)
    if launcher is None:
        draft.put("processesPerWorker", sizes.tasks)
        script.line.note(
            "srun gave each process SLURM_PROCID and SLURM_LOCALID. Regroup gives it RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT, which torch.distributed reads by itself."
        )
    for option in ("--ntasks-per-node", "--ntasks"):
        if option in of:
            if launcher is None:
                of[option].mapped("spec.processesPerWorker")
            else:
                of[option].unneeded("The launcher says how many processes each worker has.")
    resources: dict[str, dict[str, str | int]] = {}
    if sizes.gpus is not None:
        resources.setdefault("limits", {})["nvidia.com/gpu"] = sizes.gpus
        for option in ("--gres", "--gpus-per-node", "--gpus-per-task", "--gpus"):
            if option in of:
                kind = re.search(r"(?:gpu:)?([A-Za-z][\w.-]*):\d", options[option].removeprefix("gpu:"))
                of[option].mapped("spec.template.spec.containers[0].resources.limits[nvidia.com/gpu]")
                if kind is not None:
                    of[option].note(f"Any GPU is taken. For {kind[1]} set a nodeSelector in spec.template.spec.")
    if sizes.cpus is not None:
        resources.setdefault("requests", {})["cpu"] = sizes.cpus
        of["--cpus-per-task"].mapped("spec.template.spec.containers[0].resources.requests.cpu")
    for option, times in (
        ("--mem", 1),
        ("--mem-per-cpu", sizes.cpus or sizes.tasks),
        ("--mem-per-gpu", sizes.gpus or 1),
    ):
        if option in of:
            _memory(of[option], options[option], times, resources)
    if "--time" in of:
        draft.put("runPolicy.activeDeadlineSeconds", _seconds(of["--time"], options["--time"]))
        of["--time"].changed(
            "It is spec.runPolicy.activeDeadlineSeconds: the job fails then, and the time of its recoveries counts."
        )
    if "--signal" in of:
        _signal(of["--signal"], options["--signal"], draft)
    container: dict[str, Any] = {"name": "trainer", "image": _image(of, options, image), "command": script.launch}
    if script.directory or "--chdir" in of:
        container["workingDir"] = script.directory or options["--chdir"]
    if "--chdir" in of:
        of["--chdir"].mapped("spec.template.spec.containers[0].workingDir")
    if script.exported:
        container["env"] = [{"name": key, "value": value} for key, value in script.exported.items()]
    if resources:
        container["resources"] = resources
    draft.spec["template"] = {
        "spec": {"containers": [{key: value for key, value in container.items() if value is not None}]}
    }
    for option, one in of.items():
        if one.path and one.path not in one.ledger.read:
            if option in UNNEEDED:
                one.unneeded(UNNEEDED[option])
            else:
                one.dropped(DROPPED.get(option, "`regroup convert` has no rule for this option."))


def _image(of: dict[str, Field], options: dict[str, str], image: str | None) -> str | None:
    """Return the image of the command line, else that of pyxis' option, which writes # before the path."""
    if image is not None or "--container-image" not in of:
        if "--container-image" in of:
            of["--container-image"].unneeded("--image says the image.")
        return image
    of["--container-image"].mapped("spec.template.spec.containers[0].image")
    return options["--container-image"].removeprefix("docker://").replace("#", "/")


def _memory(one: Field, text: str, times: int, resources: dict[str, dict[str, str | int]]) -> None:
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text, re.IGNORECASE)
    if found is None:
        raise SpecError(f"{one} is no size. Write a number with K, M, G or T.")
    if int(found[1]) == 0:
        one.dropped("It is all memory of a node. Set the container's memory in resources.")
        return
    size = f"{int(found[1]) * times}{(found[2] or 'M').upper()}i"
    for kind in ("requests", "limits"):
        resources.setdefault(kind, {})["memory"] = size
    one.mapped("spec.template.spec.containers[0].resources.limits.memory")


def _seconds(one: Field, text: str) -> int | None:
    """Return the seconds of a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    if text.lower() in ("infinite", "unlimited"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise SpecError(f"{one} is no time. Write one such as 24:00:00.")
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        hours, minutes, seconds = first or 0, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first or 0, second or 0, third
    else:
        hours, minutes, seconds = 0, first or 0, second or 0
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _signal(one: Field, text: str, draft: Draft) -> None:
    """Convert --signal=B:USR1@120: Slurm sends it before the time limit, Regroup before each planned change."""
    found = re.fullmatch(r"(?:[BR]+:)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?", text)
    name = None if found is None else f"SIG{found[1]}"
    if name not in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        one.dropped("spec.recovery.gracefulStop takes SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 or SIGUSR2.")
        return
    seconds = min(300, int((found and found[2]) or 60))
    draft.put("recovery.gracefulStop", {"signal": name, "seconds": seconds})
    one.changed(
        "It is spec.recovery.gracefulStop: every process gets the signal before a planned change (a resize, a drain, suspension), "
        "and not before the time limit."
    )


def is_script(text: str) -> bool:
    """Return whether a text is a script of a shell, and no manifest."""
    return text.startswith("#!") or re.search(r"^#SBATCH\b", text, re.MULTILINE) is not None
