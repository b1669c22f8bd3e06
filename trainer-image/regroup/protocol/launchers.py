"""Reads commands that begin with a launcher, such as `torchrun --nproc-per-node 2 train.py`.

Operator and agent share this module. The operator reads from it how many processes and workers a command asks for, before any pod
exists. The agent asks the launcher's own parser in the pod (`_regroup_agent/launch/`). Images of today lack `horovodrun` and
`mpirun`, whose commands the agent reads by this module, too. OPTIONS says for each option of each launcher what Regroup does with
it. docs/reference/launchers.md shows that table.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from . import launcher_options
from .launcher_options import IGNORED, MAPPED, REFUSED, Option

__all__ = ["IGNORED", "MAPPED", "OPTIONS", "REFUSED", "Counts", "LauncherCommand", "LauncherError", "Option", "read"]

OPTIONS: Mapping[str, tuple[Option, ...]] = launcher_options.TABLE
_PROGRAMS = {
    "torchrun": "torchrun", "accelerate": "accelerate", "accelerate-launch": "accelerate", "deepspeed": "deepspeed",
    "ds": "deepspeed", "horovodrun": "horovodrun", "mpirun": "mpirun", "mpiexec": "mpirun", "orterun": "mpirun",
    "mpirun.openmpi": "mpirun", "mpiexec.openmpi": "mpirun", "mpiexec.hydra": "mpirun",
}  # fmt: skip
"""Launcher by the file name of a command's first word."""
_MODULES = {
    "torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate", "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed", "horovod.runner.launch": "horovodrun",
}  # fmt: skip
"""Launcher by the module of `python -m MODULE`."""
_NO_ABBREVIATIONS = frozenset({"accelerate", "mpirun"})
"""Launchers whose parsers take only whole names of options."""
_WRAPPERS = frozenset({"env", "nice", "nohup", "time", "timeout", "numactl", "taskset", "stdbuf", "sudo", "xvfb-run",
                       "uv", "poetry", "conda", "pixi", "tini", "dumb-init", "nsys"})  # fmt: skip
"""Commands that run another command."""
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_SHELLS_OWN = frozenset({"exec", "if", "then", "elif", "else", "while", "until", "do", "time", "!", "{"})
"""Words of a shell that may stand before a command."""
_SUBCOMMANDS = frozenset({"run", "exec", "profile", "launch"})
"""Words between a wrapper and its command, as in `uv run`."""
_MASK_OR_TIME = re.compile(r"[\dA-Fa-fx.,:-]+[smhd]?$")
_PYTHONS_FLAGS = frozenset("bBdEiIOPqRsSuvx")
_KEPT_FLAGS = frozenset("bBdOqRv")
"""Flags of python that the program gets, too. The others change where modules are found, or are for the launcher alone."""
_PYTHON = re.compile(r"python(3(\.\d+)?)?$")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")


class LauncherError(Exception):
    """A launcher's command cannot be translated. The text is one sentence for the user."""


@dataclass(frozen=True)
class Counts:
    """The numbers of processes and workers that a command asks for. None: the command does not say, or only the pod knows."""

    processes: int | str | None = None
    """Processes of each worker. `gpu`, `auto` and the like stay words."""
    total: int | None = None
    """Processes of all workers together."""
    workers: tuple[int, int] | None = None
    """The fewest and the most workers."""
    processes_said: str = ""
    """The option with its value that says `processes` or `total`, for sentences."""
    workers_said: str = ""
    """The option with its value that says `workers`."""


@dataclass(frozen=True)
class LauncherCommand:
    """A command that begins with a launcher."""

    launcher: str
    """A key of OPTIONS."""
    start: tuple[str, ...]
    """The words that name the launcher: (`torchrun`,) or (`python`, `-m`, `torch.distributed.run`), without python's options."""
    arguments: tuple[str, ...]
    """All words after `start`."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that `env NAME=VALUE` sets before the launcher."""
    python_options: tuple[str, ...] = ()
    """Options of the launcher's python that the program's python gets, such as (`-X`, `dev`)."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The first name of each given option, with its values."""
    program: tuple[str, ...] = ()
    """The words after the launcher's options: the program and its arguments."""
    counts: Counts = field(default_factory=Counts)

    @property
    def module(self) -> str:
        """The launcher's module, or "" if it was started by its command."""
        return self.start[-1] if self.start[-2:-1] == ("-m",) else ""

    @property
    def local_rank_argument(self) -> str:
        """Name of the argument by which each process gets its local rank, or "" if there is none."""
        if self.launcher == "deepspeed" and "--no_local_rank" not in self.options:
            return "--local_rank"
        return "--local-rank" if self.module == "torch.distributed.launch" and "--use-env" not in self.options else ""

    def is_set(self, name: str) -> bool:
        """Return whether an option is given."""
        return name in self.options

    def ignored(self) -> Iterator[Option]:
        """Yield each given option that changes nothing here."""
        for option in OPTIONS[self.launcher]:
            if option.effect == IGNORED and option.names[0] in self.options:
                yield option


def recognise(command: Sequence[str]) -> LauncherCommand | None:
    """Return the launcher that a command begins with, without reading its options. None: it begins with none."""
    words, environ = list(command), {}
    if words and PurePosixPath(words[0]).name == "env":
        words.pop(0)
        while words and (assigned := _ASSIGNMENT.match(words[0])):
            environ[assigned[1]] = assigned[2]
            words.pop(0)
    start, python_options, length = _start_of(words)
    if not start:
        return None
    rest = tuple(words[length:])
    name = _MODULES[start[-1]] if start[-2:-1] == ("-m",) else _PROGRAMS[PurePosixPath(start[-1]).name]
    by_subcommand = PurePosixPath(start[-1]).name == "accelerate" or start[-1] == "accelerate.commands.accelerate_cli"
    if name == "accelerate" and by_subcommand:
        if rest[:1] != ("launch",):
            return None  # `accelerate config` and the like train nothing, and launch nothing
        rest = rest[1:]
    return LauncherCommand(name, start, rest, environ, python_options)


def read(command: Sequence[str], environ: Mapping[str, str]) -> LauncherCommand | None:
    """Return the launcher's command with its options and counts, or None if the command begins with no launcher.

    `environ` has the literal variables of the container. Raises LauncherError for an option that is refused or not known, and for
    a command without a program.
    """
    found = recognise(command)
    if found is None:
        return None
    known = {**environ, **found.environ}
    options, program = _split(found.launcher, [expand(word, known) for word in found.arguments])
    for option in OPTIONS[found.launcher]:
        if option.effect == REFUSED and option.names[0] in options:
            raise LauncherError(f"{found.launcher} {option.names[0]} in the command is refused: {option.says}")
    if not program:
        raise LauncherError(
            f"The command starts {found.launcher} without a program. Write the program behind the options, for example "
            f"{found.launcher} train.py."
        )
    counts = _COUNTS[found.launcher](options, known)
    return replace(found, options=options, program=program, counts=counts)


def without(command: Sequence[str], unneeded: Callable[[Option, Sequence[str]], bool]) -> list[str]:
    """Return a command without some options of its launcher. `unneeded` decides on an option with its values.

    The command begins with a launcher. Options that Regroup does not know stay, with all words behind them.
    """
    found = recognise(command)
    assert found is not None
    words, kept = list(found.arguments), []
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        try:
            option, value, more = _option_of(found.launcher, words[0])
        except LauncherError:
            break
        length = 1 + (option.takes - (value is not None) if not more else 0)
        values = [*([value] if value is not None else []), *words[1:length]]
        if more or not unneeded(option, values):
            kept += words[:length]
        words = words[length:]
    start = list(command[: len(command) - len(found.arguments)])
    return [*start, *kept, *words]


def hidden(command: Sequence[str]) -> str | None:
    """Return a sentence if a shell or another command starts a launcher, which Regroup then cannot translate."""
    if not command or recognise(command) is not None:
        return None
    first = PurePosixPath(command[0]).name
    words = _inside(command)
    found = recognise(words)
    if found is None:
        return None
    return _without(f"a shell ({first})" if first in _SHELLS else first, found.launcher, words)


def _inside(command: Sequence[str]) -> Sequence[str]:
    """Return the words from the launcher on that a command starts directly, by a shell or by a wrapper. Empty: there is none."""
    if not command or recognise(command) is not None:
        return command
    first = PurePosixPath(command[0]).name
    if first in _SHELLS:
        return next(filter(None, map(_inside, _simple_commands(_text_for(command)))), ())
    return _wrapped(command) if first in _WRAPPERS else ()


def _wrapped(command: Sequence[str]) -> Sequence[str]:
    """Return the words from the launcher on that a wrapper starts. The first word that is another program ends the search."""
    for index in range(1, len(command)):
        word, before = command[index], command[index - 1]
        name = PurePosixPath(word).name
        if recognise(command[index:]) is not None and before not in ("-n", "--name"):  # conda run -n deepspeed
            return command[index:]
        if name in _SHELLS or name in _WRAPPERS:
            return _inside(command[index:])
        if _PYTHON.match(name):
            return ()
        belongs = word.startswith("-") or (before.startswith("-") and before != "--")
        if not (belongs or word in _SUBCOMMANDS or _ASSIGNMENT.match(word) or _MASK_OR_TIME.match(word)):
            return ()
    return ()


def _text_for(command: Sequence[str]) -> str:
    """Return the text of a shell's option -c, or "" if the shell runs a file."""
    words = list(command[1:])
    while words and words[0][:1] in ("-", "+"):
        option = words.pop(0)
        if option[:2] != "--" and "c" in option:
            return next((word for word in words if not word.startswith("-")), "")
        if option[-1] in "oO":  # bash -o pipefail
            words = words[1:]
    return ""


def _simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a shell's text, without assignments and the shell's own words before it."""
    text = text.replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quote without its end, perhaps in a comment
        words = re.sub(r"([;&|()\n]+)", r" \1 ", text).split(" ")
    simple: list[str] = []
    for word in [*words, ";"]:
        if word and not set(word) - set(";&|()\n"):
            if simple:
                yield simple
            simple = []
        elif simple or not (word in _SHELLS_OWN or _ASSIGNMENT.match(word) or not word):
            simple.append(word)


def _without(wrapper: str, launcher: str, words: Sequence[str]) -> str:
    shown = ", ".join(_shown(word.strip("'\"")) for word in words[:8]) + (", ..." if len(words) > 8 else "")
    return (
        f"The command starts {launcher} from {wrapper}, where Regroup cannot translate it. Write the launcher's command itself "
        f"as a list: command: [{shown}]. Variables belong into env, and the directory into workingDir."
    )


def _shown(word: str) -> str:
    """Return a word as YAML takes it for a string."""
    return f"'{word}'" if re.fullmatch(r"[-+.\d:]*|true|false|yes|no|on|off|null", word) else word


def shortened(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a command of the same counts and the same ignored options, without their values. It has no program, and no argument
    that may hold a secret."""
    try:
        found = read(command, environ)
    except LauncherError:
        return ["python"]
    if found is None:
        return ["python"]
    kept = []
    for option in OPTIONS[found.launcher]:
        for value in found.options.get(option.names[0], ())[-1:] if option.counts else ():
            kept += [option.names[0], value]
    for option in found.ignored():
        kept += [option.names[0], *("-" for _ in range(option.takes))]
    for name in _COUNTING_ENV if found.launcher == "torchrun" else ():
        given = {**environ, **found.environ}.get(name)
        if given and (option_name := _COUNTING_ENV[name]) not in found.options:
            kept += [option_name, given]
    start = ["accelerate", "launch"] if found.launcher == "accelerate" else [found.launcher]
    return [*start, *kept, "train.py"]


def expand(word: str, environ: Mapping[str, str]) -> str:
    """Return a word with $(NAME) replaced, as the kubelet does it. A name that `environ` does not have stays as it is."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return environ.get(found[1], found[0])

    return _REFERENCE.sub(value, word)


def _start_of(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return the words that name the launcher, python's options that the program gets, and the number of words of both.

    No words: the command begins with no launcher.
    """
    name = PurePosixPath(words[0]).name if words else ""
    if name in _PROGRAMS:
        return (words[0],), (), 1
    if not _PYTHON.match(name):
        return (), (), 0
    kept: list[str] = []
    index = 1
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        flags = words[index][1:]
        index += 1
        end = next((at for at, flag in enumerate(flags) if flag not in _PYTHONS_FLAGS), len(flags))
        if own := "".join(flag for flag in flags[:end] if flag in _KEPT_FLAGS):
            kept.append("-" + own)
        if end == len(flags):
            continue
        value = flags[end + 1 :]  # -Xdev, -mtorch.distributed.run
        if not value:
            value, index = words[index] if index < len(words) else "", index + 1
        if flags[end] in "XW":
            kept += ["-" + flags[end], value]
        elif flags[end] == "m" and value in _MODULES:
            return (words[0], "-m", value), tuple(kept), index
        else:
            return (), (), 0
    script = words[index] if index < len(words) else ""
    if "/" in script and PurePosixPath(script).name in _PROGRAMS:  # python /opt/bin/torchrun
        return (words[0], script), tuple(kept), index + 1
    return (), (), 0


def _split(launcher: str, words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the values of the launcher's options, and the words from the program on."""
    found: dict[str, tuple[str, ...]] = {}
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        word = words[index]
        index += 1
        if word == "--":
            break
        option, value, more = _option_of(launcher, word)
        while more:  # short flags in one word, -mq
            found[option.names[0]] = ()
            option, value, more = _option_of(launcher, more)
        values = [] if value is None else [value]
        missing = option.takes - len(values)
        if value is not None and option.takes == 0:
            raise LauncherError(
                f"{launcher} {option.names[0]} in the command takes no value ({value}). Leave the value out."
            )
        if len(words) - index < missing:
            raise LauncherError(f"{launcher} {option.names[0]} in the command has no value. Write the value behind it.")
        values += words[index : index + missing]
        index += missing
        found[option.names[0]] = (*found.get(option.names[0], ()), *values)
    if launcher == "mpirun" and ":" in words[index:]:
        raise LauncherError(
            "mpirun in the command starts several programs (:), and Regroup starts one. Write one program."
        )
    return found, tuple(words[index:])


def _option_of(launcher: str, word: str) -> tuple[Option, str | None, str]:
    """Return the option that a word names, the value in the same word, and what else the word holds of short flags."""
    table = OPTIONS[launcher]
    name, equals, value = word.partition("=")
    if launcher == "mpirun" and name.startswith("--"):
        name = name[1:]  # Open MPI takes each long name with one and with two hyphens
    exact = [option for option in table if name in option.names]
    if exact:
        return exact[0], value if equals else None, ""
    if name.startswith("--") and launcher not in _NO_ABBREVIATIONS:
        near = [option for option in table if any(one.startswith(name) for one in option.names)]
        if len(near) == 1:
            return near[0], value if equals else None, ""
    if not word.startswith("--") and launcher != "mpirun":
        short = [option for option in table if word[:2] in option.names]
        if short and short[0].takes:
            return short[0], word[2:], ""
        if short and len(word) > 2:
            return short[0], None, "-" + word[2:]
    raise LauncherError(
        f"The command gives {launcher} the option {name}, which Regroup does not know. Leave it out, or write the program's own "
        "command, for example [python, train.py]."
    )


# --- counts ----------------------------------------------------------------------------------------------------------

_Options = Mapping[str, tuple[str, ...]]
_MOST_DIGITS = 9
_MOST_SAID = 100
_COUNTING_ENV = {"PET_NPROC_PER_NODE": "--nproc-per-node", "PET_NNODES": "--nnodes"}


def _last(options: _Options, name: str) -> str | None:
    """Return the last value of an option. None: it is absent, or its value is not known before there is a pod."""
    values = options.get(name)
    return values[-1] if values and "$(" not in values[-1] else None


def count_of(text: str) -> int | None:
    """Return the count from 1 to 999999999 that a text writes, or None if it writes none. Python's int() bounds the digits."""
    return int(text) or None if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _number(text: str | None, said: str) -> int | None:
    """Return a count, or None if there is none. Raises LauncherError for a text that is no count."""
    if text is None:
        return None
    count = count_of(text)
    if count is None:
        raise LauncherError(
            f"{_bounded(said)} in the command is no number from 1 to {'9' * _MOST_DIGITS}. Write a number."
        )
    return count


def _bounded(said: str) -> str:
    return said if len(said) <= _MOST_SAID else said[:_MOST_SAID] + "..."


def _of_torchrun(options: _Options, environ: Mapping[str, str]) -> Counts:
    said = {}
    for variable, name in _COUNTING_ENV.items():
        value = _last(options, name)
        if value is not None:
            said[name] = value, f"{name} {value}"
        elif name not in options and environ.get(variable):
            said[name] = environ[variable], f"{variable}={environ[variable]}"
    text, processes_said = said.get("--nproc-per-node", ("", ""))
    processes: int | str | None = _number(text, processes_said) if text.isdecimal() else text or None
    workers = None
    nodes, workers_said = said.get("--nnodes", ("", ""))
    if nodes:
        bounds = [count_of(part) for part in nodes.split(":")]
        low, high = bounds[0], bounds[-1]
        if len(bounds) > 2 or low is None or high is None or low > high:
            raise LauncherError(
                f"{_bounded(workers_said)} in the command is no number and no range. Write N or MIN:MAX."
            )
        workers = low, high
    # Without the option torchrun starts one process. That is no word about a worker's GPUs, so the spec may say another number.
    return Counts(processes, None, workers, processes_said, workers_said)


def _of_accelerate(options: _Options, _environ: Mapping[str, str]) -> Counts:
    machines, total = _last(options, "--num_machines"), _last(options, "--num_processes")
    workers = _number(machines, f"--num_machines {machines}")
    processes = _number(total, f"--num_processes {total}")
    if processes is not None and "--num_machines" in options and workers is None:
        processes = None
    if processes is not None and workers is not None:
        if processes % workers:
            raise LauncherError(
                f"--num_processes {processes} in the command is no multiple of --num_machines {workers}. Choose a multiple."
            )
        processes //= workers
    shown = f"--num_processes {total}" + (f" --num_machines {machines}" if workers is not None else "")
    return Counts(
        processes,
        None,
        None if workers is None else (workers, workers),
        shown if processes else "",
        f"--num_machines {machines}",
    )


def _of_deepspeed(options: _Options, _environ: Mapping[str, str]) -> Counts:
    nodes, gpus = (
        None if text == "-1" else text for text in (_last(options, "--num_nodes"), _last(options, "--num_gpus"))
    )
    workers, processes = _number(nodes, f"--num_nodes {nodes}"), _number(gpus, f"--num_gpus {gpus}")
    return Counts(
        processes, None, None if workers is None else (workers, workers), f"--num_gpus {gpus}", f"--num_nodes {nodes}"
    )


def _of_horovodrun(options: _Options, _environ: Mapping[str, str]) -> Counts:
    total, slots = _last(options, "--num-proc"), _last(options, "--slots-per-host")
    processes = _number(slots, f"--slots-per-host {slots}")
    said = f"--slots-per-host {slots}" if processes else f"-np {total}"
    low, high = _last(options, "--min-np"), _last(options, "--max-np")
    if processes is None or (low is None and high is None):
        return Counts(processes, _number(total, f"-np {total}"), None, said)
    least, most = _number(low or total, f"--min-np {low}"), _number(high, f"--max-np {high}")
    if least is None or most is None or least % processes or most % processes or least > most:
        return Counts(processes, None, None, said)
    workers = least // processes, most // processes
    return Counts(processes, None, workers, said, f"--min-np {least} --max-np {most} --slots-per-host {processes}")


def _of_mpirun(options: _Options, _environ: Mapping[str, str]) -> Counts:
    total, each = _last(options, "-np"), _last(options, "-N")
    processes = _number(each, f"-N {each}")
    said = f"-N {each}" if processes else f"-np {total}"
    return Counts(processes, _number(total, f"-np {total}"), None, said)


_COUNTS = {
    "torchrun": _of_torchrun, "accelerate": _of_accelerate, "deepspeed": _of_deepspeed, "horovodrun": _of_horovodrun,
    "mpirun": _of_mpirun,
}  # fmt: skip
