"""`--help` of every command of `regroup` and `kubectl regroup`, and wrong uses of each: one sentence, and exit code 2."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from regroup_cli import plugin
from regroup_cli.__main__ import main, parser

MAINS = {"regroup": main, "kubectl regroup": plugin.main}


def commands(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser, and those of its commands."""
    yield top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from commands(one)


EVERY = [*commands(parser()), *commands(plugin.parser())]


@pytest.mark.parametrize("command", EVERY, ids=lambda one: one.prog)
def test_help_says_what_the_command_and_each_argument_do(
    command: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "kubectl regroup" if command.prog.startswith("kubectl") else "regroup"
    with pytest.raises(SystemExit) as ended:
        MAINS[name]([*command.prog.removeprefix(name).split(), "--help"])
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    assert said.out.startswith(f"usage: {command.prog} ")
    assert command.description, "what the command does, in a sentence"
    for action in command._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action
    assert not command.allow_abbrev, "an abbreviation means another option once one more begins like it"


WRONG = [
    ("regroup", "", "required: COMMAND"),
    ("regroup", "runn train.py", "invalid choice: 'runn'"),
    ("regroup", "run", "required: SCRIPT"),
    ("regroup", "run --worker 3 train.py", "--worker"),
    ("regroup", "run --workers", "--workers: expected one argument"),
    ("regroup", "run --workers two train.py", "invalid int value: 'two'"),
    ("regroup", "run --workers 0 train.py", "--workers"),
    ("regroup", "run --max 1 --workers 2 train.py", "--max"),
    ("regroup", "run --sizes 4,2 train.py", "is no ascending list of numbers"),
    ("regroup", "run --gpus some train.py", "invalid choice: 'some'"),
    ("regroup", "run --grow-at noon train.py", "invalid choice: 'noon'"),
    ("regroup", "run --checkpoint-wait -1 train.py", "is not a number of seconds"),
    ("regroup", "run none.py", "none.py"),
    ("regroup", "train", "required: CONFIG"),
    ("regroup", "train none.yaml", "none.yaml"),
    ("regroup", "submit", "required: SCRIPT\n"),
    ("regroup", "submit train.py --save a --dry-run", "not allowed with argument --save"),
    ("regroup", "submit train.py --image x --pip", "--pip: expected one argument"),
    ("regroup", "submit train.py --image x --index-url https://index", "--index-url goes with --pip"),
    ("regroup", "submit train.py --image x --gpus -1", "--gpus (-1) is less than 0"),
    ("regroup", "checkpoint", "required: COMMAND"),
    ("regroup", "checkpoint list", "required: DIR"),
    ("regroup", "checkpoint list none", "DIR (none) is not a directory"),
    ("regroup", "checkpoint verify . step-1", "NAME (step-1) is no checkpoint"),
    ("regroup", "checkpoint pull train", "required: DIR"),
    ("regroup", "checkpoint pull train into --step one", "invalid int value: 'one'"),
    ("regroup", "checkpoint pull train into --step 1 --path a", "not allowed with"),
    ("regroup", "checkpoint pull train into --wait 0", "is not a number of seconds; give a number above 0"),
    ("regroup", "checkpoint export .", "required: --to"),
    ("regroup", "checkpoint export . --to m", "DIR (.) holds no checkpoint"),
    ("regroup", "convert", "required: FILE"),
    ("regroup", "convert none.yaml", "none.yaml"),
    ("regroup", "replay none", "none"),
    ("regroup", "completion tcsh", "invalid choice: 'tcsh'"),
    ("regroup", "ui --port http", "--port"),
    ("kubectl regroup", "ui --port http", "--port"),
    ("kubectl regroup", "", "required: COMMAND"),
    ("kubectl regroup", "status", "required: JOB"),
    ("kubectl regroup", "scale train", "required: N"),
    ("kubectl regroup", "logs train --since yesterday", "is not a duration"),
    ("kubectl regroup", "list --namespaces", "unrecognized arguments: --namespaces"),
]


@pytest.mark.parametrize(("name", "words", "sentence"), WRONG, ids=[f"{name} {words}" for name, words, _ in WRONG])
def test_wrong_use_is_one_sentence(
    name: str,
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('it ran')\n")
    try:
        code = MAINS[name](words.split())
    except SystemExit as ended:
        code = int(str(ended.code))
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert sentence in said.err
    usage = ("usage:", " ")  # argparse prints the usage before its sentence
    assert len([line for line in said.err.splitlines() if not line.startswith(usage)]) == 1, said.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]


def test_every_command_has_a_wrong_use_here_or_in_test_verbs() -> None:
    shared = {"list", "status", "why", "watch", "stacks", "scale", "suspend", "resume", "delete", "logs"}
    tried = {words.split()[0] for name, words, _ in WRONG if name == "regroup" and words}
    assert {one.prog.split()[1] for one in commands(parser()) if len(one.prog.split()) > 1} <= tried | shared
