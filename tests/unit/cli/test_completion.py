"""Completion: the words that a shell offers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regroup_cli import completion, plugin
from regroup_cli.__main__ import main, parser


@pytest.mark.parametrize(
    ("given", "want"),
    [
        pytest.param(["wh"], ["why"], id="a command that is begun"),
        pytest.param(["why", ""], ["digits", "words"], id="jobs"),
        pytest.param(["why", "d"], ["digits"], id="a job that is begun"),
        pytest.param(["-n", "team", "s"], ["scale", "stacks", "status", "suspend"], id="after an option with a value"),
        pytest.param(["why", "digits", "--na"], ["--namespace"], id="an option"),
        pytest.param(["why", "-n", ""], [], id="the value of an option"),
        pytest.param(["list", "-o", ""], ["json"], id="one of few values"),
        pytest.param(["scale", "digits", ""], [], id="a number"),
        pytest.param(["nothing", ""], [], id="no command"),
        pytest.param([], sorted(plugin.parser()._subparsers._group_actions[0].choices), id="nothing yet"),  # type: ignore[union-attr, arg-type]
    ],
)
def test_words(given: list[str], want: list[str]) -> None:
    assert completion.words(plugin.parser(), given, lambda: ["words", "digits"]) == want


def test_jobs_are_asked_for_only_where_one_is_named() -> None:
    def never() -> list[str]:
        raise AssertionError

    assert completion.words(parser(), ["checkpoint", "l"], never) == ["list"]
    assert completion.words(parser(), ["run", "--gpus", ""], never) == ["auto", "none"]


def test_kubectl_gets_words_and_a_directive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubectl").write_text(
        f"#!{sys.executable}\nimport json, sys\nopen({str(tmp_path / 'asked')!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
        "print('distributedtrainingjob.regroup.dev/digits')\n"
    )
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-regroup", "-n", "team", "why", ""])
    assert completion.kubectl_main() == 0
    assert capsys.readouterr().out == "digits\n:4\n"
    assert "--namespace=team" in json.loads((tmp_path / "asked").read_text())
    monkeypatch.setenv("PATH", "")
    assert completion.kubectl_main() == 0
    assert capsys.readouterr().out == ":0\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "regroup").write_text(f'#!/bin/sh\nexec {sys.executable} -m regroup_cli "$@"\n')
    (tmp_path / "regroup").chmod(0o755)
    ask = "COMP_WORDS=(regroup sta); COMP_CWORD=1; _regroup; printf '%s\\n' \"${COMPREPLY[@]}\""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["stacks", "status"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_takes_words_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "regroup").write_text("#!/bin/sh\nprintf '%s\\n' '*' 'a b' 'reg[r]oup'\n")
    (tmp_path / "regroup").chmod(0o755)
    ask = "COMP_WORDS=(regroup x); COMP_CWORD=1; _regroup; printf '%s\\n' \"${COMPREPLY[@]}\""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = completion.SCRIPTS["bash"] + ask
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["*", "a b", "reg[r]oup"]
