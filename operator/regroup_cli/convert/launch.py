"""The rules for the command that starts the training program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regroup.protocol import launchers
from regroup_cli.convert import shell
from regroup_cli.convert.draft import Draft
from regroup_cli.convert.findings import Field
from regroup_cli.convert.pod import AT_RUNTIME, num_gpus
from regroup_operator.api import SpecError

_MEETING = ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--standalone", "--master-addr", "--master-port",
            "--local-addr", "--node-rank")  # fmt: skip
"""Options of torchrun by which its workers meet."""
_COUNTS = ("--nnodes", "--nproc-per-node")
_NO_NEED = ("set", "echo", "date", "hostname", "env", "printenv", "nvidia-smi", "ulimit", "sleep")
"""Commands that a training script has for its log, or for the shell."""


@dataclass(frozen=True)
class Unwrapped:
    """A launcher's command that a shell's text runs."""

    words: list[str]
    environ: dict[str, str]
    directory: str | None


def take_launch(draft: Draft, source: Field) -> None:
    """Make the trainer's command one that Regroup translates, and say how many processes it means.

    `source` is the field of the source's command, for findings.
    """
    container = draft.trainer
    if draft.command:
        container["command"] = list(draft.command)
    elif not container.get("command"):
        raise SpecError(
            f"{source} has no command, so the image's own one runs, which Regroup does not know. Give it as --command "
            "'python train.py'; the arguments (args) stay."
        )
    command = [*map(str, container.get("command") or ()), *map(str, container.get("args") or ())]
    if launchers.hidden(command) is not None:
        command = _without_shell(container, command, source)
    found = launchers.recognise(command)
    if found is None:
        gpus = num_gpus(container)
        if "processesPerWorker" not in draft.spec and gpus is not None and gpus > 1:
            draft.put("processesPerWorker", 1)
            source.note(
                f"The command is no launcher and ran once in each pod, so spec.processesPerWorker is 1. Without that field Regroup "
                f"starts a process for each of the {gpus} GPUs."
            )
        return
    if found.launcher == "torchrun":
        made = without_meeting(command)
        if made != command:
            source.note(f"Options of torchrun by which its workers meet are left out: {AT_RUNTIME}")
            write_command(container, made)
    if found.launcher == "deepspeed" and draft.framework == "PyTorch":
        draft.framework = "DeepSpeed"
    source.note(f"Regroup translates {found.launcher} and starts the program itself (docs/reference/launchers.md).")


def without_meeting(command: Sequence[str]) -> list[str]:
    """Return a command of torchrun without the options by which workers meet, and without counts that are variables."""

    def unneeded(option: launchers.Option, values: Sequence[str]) -> bool:
        names = set(option.names)
        return bool(names & set(_MEETING)) or (bool(names & set(_COUNTS)) and any("$" in value for value in values))

    return launchers.without(command, unneeded)


def write_command(container: dict[str, Any], command: Sequence[str]) -> None:
    """Write the whole command of a container into its field `command`."""
    made = {"command": list(command)}
    kept = {name: value for name, value in container.items() if name not in ("command", "args")}
    container.clear()
    for name in ("name", "image", "imagePullPolicy"):
        if name in kept:
            container[name] = kept.pop(name)
    container.update({**made, **kept})


def _without_shell(container: dict[str, Any], command: list[str], source: Field) -> list[str]:
    """Return the launcher's command in a shell's text, or the command as it is if the text does more than to start it."""
    text = shell.text_of(command)
    declared = {one["name"] for one in container.get("env") or ()}
    found = None if text is None else unwrap(text, lambda name: f"$({name})" if name in declared else None)
    if found is None:
        return command
    write_command(container, found.words)
    for name, value in found.environ.items():
        container.setdefault("env", []).append({"name": name, "value": value})
    if found.directory is not None:
        container["workingDir"] = found.directory
    source.note("The shell around the launcher is left out, because Regroup starts the launcher's program itself.")
    return found.words


def unwrap(text: str, value_of: Callable[[str], str | None]) -> Unwrapped | None:
    """Return the launcher's command in a text that otherwise only sets variables or a directory. None: it does more.

    `value_of` returns the value of a variable of the container, None for one that it does not have.
    """
    environ: dict[str, str] = {}
    directory = None
    launch: list[str] | None = None
    for one in shell.commands(text):
        words = shell.split_values(one, environ)
        if not words:
            continue
        first = words[0]
        if launch is not None or one.depth or one.end not in ("", "\n", ";", "&&") or one.patterns or one.braces:
            return None
        if first == "export" or all(map(shell.is_assignment, words)):
            for word in words:
                if word != "export":
                    name, _, value = word.partition("=")
                    value, left = shell.expand(value, environ)
                    if left:
                        return None
                    environ[name] = value
        elif first == "cd" and len(words) == 2 and "$" not in words[1]:
            directory = words[1]
        elif first not in _NO_NEED:
            while words and (words[0] == "exec" or shell.is_assignment(words[0])):
                name, _, value = words.pop(0).partition("=")
                if name != "exec":
                    environ[name] = value
            launch = words
    if not launch or launchers.recognise(launch) is None:
        return None
    return _expanded(launch, environ, value_of, directory)


def _expanded(
    launch: list[str], environ: Mapping[str, str], value_of: Callable[[str], str | None], directory: str | None
) -> Unwrapped | None:
    """Return a launcher's command with its variables as the kubelet expands them. None: there are some that it does not know."""
    found = launchers.recognise(launch)
    words = without_meeting(launch) if found is not None and found.launcher == "torchrun" else launch
    made = []
    for word in words:
        text, left = shell.expand(word, environ)
        for reference in left:
            value = value_of(reference.strip("${}"))
            if value is None:
                return None
            text = text.replace(reference, value)
        made.append(text)
    return Unwrapped(made, dict(environ), directory)
