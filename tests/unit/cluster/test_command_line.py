"""The command line: its commands, its defaults, and one sentence for everything that is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster import __main__, lifecycle
from cluster.settings import Settings


def test_up_without_options_is_the_default_cluster() -> None:
    arguments = __main__.parser().parse_args(["up"])
    got = Settings(arguments.nodes, arguments.gpus, arguments.node_grace_s, arguments.toleration_s)
    assert got == Settings(num_nodes=3, num_gpus=0, node_grace_s=10, toleration_s=300)


@pytest.mark.parametrize(
    "line",
    [
        ["status"],
        ["down"],
        ["power-off", "n2"],
        ["power-on", "n2"],
        ["load", "trainer"],
        ["build"],
        ["build-images"],
        ["up", "--nodes", "5", "--gpus", "2"],
    ],
    ids=" ".join,
)
def test_command_is_known(line: list[str]) -> None:
    assert __main__.parser().parse_args(line).command == line[0]


def test_programs_are_built_before_any_package_is_installed() -> None:
    """`make test` begins with it, beside `make venv`."""
    text = "from cluster import __main__, binaries; binaries.ensure = lambda: 'built'; raise SystemExit(__main__.main(['build']))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-S", "-c", text], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "built\n"), done.stderr


def test_build_images_without_names_builds_both() -> None:
    assert __main__.parser().parse_args(["build-images"]).images == ["operator", "trainer"]


@pytest.mark.parametrize("command", ["power-off", "power-on"])
def test_power_switch_of_an_existing_cluster_is_refused_in_a_sentence(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGROUP_CONTEXT", "work")
    assert __main__.main([command, "n1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("cluster: REGROUP_CONTEXT=work names an existing cluster; its machines are not ours")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "what"), [("up", "nothing is started"), ("down", "nothing is stopped"), ("load", "nothing is loaded")]
)
def test_command_on_an_existing_cluster_does_nothing_and_says_so(
    command: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGROUP_CONTEXT", "work")
    assert __main__.main([command, *(["trainer"] if command == "load" else [])]) == 0
    assert what in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        pytest.param(Settings(), None, id="the same again"),
        pytest.param(Settings(num_nodes=4), None, id="one node more"),
        pytest.param(Settings(num_gpus=8), None, id="fake GPUs"),
        pytest.param(Settings(num_nodes=2), "runs with 3 nodes and --nodes is 2", id="fewer nodes"),
        pytest.param(Settings(node_grace_s=40), "--node-grace-s 10, not 40", id="another grace period"),
        pytest.param(Settings(toleration_s=10), "--toleration-s 300, not 10", id="another toleration"),
    ],
)
def test_what_a_running_cluster_takes(wanted: Settings, sentence: str | None) -> None:
    got = lifecycle.change_sentence(Settings(), wanted)
    assert (got is None) if sentence is None else (got is not None and sentence in got and "down" in got)
