"""The decision log: every line of a random life is made again alike, in another process, and holds no secret."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regroup_cli import __main__ as cli
from regroup_operator.decision_log import NUM_FILES, DecisionLog, DecisionLogError, decision_of, difference, from_line
from regroup_operator.plan.job import plan_job
from tests.builders.jobs import role
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.faults import KINDS
from tests.simulator.setting import faults_of, setting_of
from tests.simulator.walk import Walk
from tests.simulator.world import World

SECRET = "do-not-tell"


def logged(world: World, path: Path, max_bytes: int = 2**30) -> DecisionLog:
    """Have each operator of a world log to a file."""
    log = world.decisions = DecisionLog(path, max_bytes)
    for operator in world.operators:
        operator.controller._decisions = log
    return log


def job() -> JobBuilder:
    secret: dict[str, Any] = {"name": "TOKEN", "value": SECRET}
    builder = make_job().with_replicas(3).elastic(1, 5).with_spec(roles=[role()])
    manifest = builder.manifest()
    for template in (manifest["spec"]["template"], manifest["spec"]["roles"][0]["template"]):
        container = template["spec"]["containers"][0]
        container |= {"env": [secret], "args": [SECRET]}
        template["metadata"] = {"annotations": {"note": SECRET}}
    return builder.with_spec(template=manifest["spec"]["template"], roles=manifest["spec"]["roles"])


def life(tmp_path: Path, **given: Any) -> Path:
    path = tmp_path / "decisions.jsonl"
    world = World(tmp_path, job(), known_session=True)
    log = logged(world, path, **given)
    world.advance(5.0, step_every_s=0.5)
    world.vanish(world.uid(1))
    world.advance(5.0, step_every_s=0.5)
    world.scale(2)
    world.advance(5.0, step_every_s=0.5)
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended", step_every_s=0.5)
    log.close()
    return path


def test_every_decision_is_made_again_alike_and_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = life(tmp_path)
    assert cli.main(["replay", str(path)]) == 0
    shown = capsys.readouterr().out
    for words in ("generation 1 of workers 0-2", "make worker 1.1", "make pod 0.0 of role board", "delete digits-worker-2-0",
                  "Suspended=True", "decisions, all made again alike."):  # fmt: skip
        assert words in shown
    # The order of sets differs from process to process.
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "regroup_cli", "replay", "--job", "default/digits", str(path)],
            env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-500:] + done.stderr


def test_decisions_on_a_template_that_has_changed_are_made_again_alike(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    world = World(tmp_path, job(), known_session=True)
    log = logged(world, path)
    world.advance(5.0, step_every_s=0.5)
    world.store.replace_status({**world.status, "templateDigest": "of another"})
    world.vanish(world.uid(1))
    world.advance(5.0, step_every_s=0.5)
    log.close()
    assert 1 not in [pod.slot for pod in world.pods.by_uid.values()]
    assert cli.main(["replay", str(path)]) == 0


def test_line_holds_no_secret_of_a_template(tmp_path: Path) -> None:
    assert SECRET not in life(tmp_path).read_text()


def test_another_decision_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = life(tmp_path)
    lines = path.read_text().splitlines()
    body = json.loads(lines[3])
    body["decision"]["status"]["phase"] = "Dancing"
    path.write_text("\n".join([*lines[:3], json.dumps(body), *lines[4:]]))
    assert cli.main(["replay", str(path)]) == 1
    assert "line 4: status.phase was Dancing and is " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no decision."),
        ("{}\n", "line 1: The line is no decision of this release"),
        ("no json\n", "line 1: The line is no decision of this release"),
        ("[" * 100_000 + "\n", "line 1: The line is no decision of this release: maximum recursion depth"),
        ('{"version":99}\n', "line 1: The line is of version 99; this program reads 1."),
    ],
)
def test_file_that_is_no_log_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert cli.main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_file_that_was_copied_while_a_line_was_being_written_is_replayed_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = life(tmp_path)
    whole = path.read_text()
    num_lines = whole.count("\n")
    path.write_text(whole[:-20])
    assert cli.main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "The last line is not whole" in out
    assert f"{num_lines - 1} decisions, all made again alike." in out
    path.write_text(whole.splitlines()[0][:-20])
    assert cli.main(["replay", str(path)]) == 2
    assert "has no decision." in capsys.readouterr().err


def test_line_whose_job_is_none_is_refused_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = life(tmp_path)
    body = json.loads(path.read_text().splitlines()[0])
    for broken in ({}, {**body["inputs"]["job"], "spec": {}}, "digits"):
        path.write_text(json.dumps({**body, "inputs": {**body["inputs"], "job": broken}}))
        assert cli.main(["replay", str(path)]) == 2
        assert "line 1: The line is no decision of this release" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "value"),
    [
        pytest.param(("decision",), {}, id="a decision without its parts"),
        pytest.param(("decision", "status", "conditions"), [5], id="a condition that is none"),
        pytest.param(("decision", "create"), [[0, 0]], id="a pod without nodes to avoid"),
        pytest.param(("decision", "notes"), "event", id="events that are none"),
        pytest.param(("inputs", "clock", "wall"), -1e300, id="a time before all others"),
        pytest.param(("inputs", "job", "metadata", "namespace"), 5, id="a namespace that is a number"),
        pytest.param(("inputs", "job", "spec", "roles"), ["board"], id="a role from which nothing can be planned"),
    ],
)
def test_line_that_no_operator_wrote_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: tuple[str, ...], value: Any
) -> None:
    path = life(tmp_path)
    lines = path.read_text().splitlines()
    body = inner = json.loads(lines[12])
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    path.write_text("\n".join([*lines[:12], json.dumps(body), *lines[13:]]))
    assert cli.main(["replay", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"regroup: {path}, line 13: The line is no decision of this release: ")
    assert said.count("\n") == 1


def test_reader_that_leaves_is_not_taken_for_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Left(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    path = life(tmp_path)
    monkeypatch.setattr(sys, "stdout", Left())
    with pytest.raises(BrokenPipeError):  # `guarded` ends the command
        cli.main(["replay", str(path)])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(lambda path: path.mkdir(), "Is a directory", id="a directory"),
        pytest.param(lambda path: path.write_bytes(bytes(range(256))), "it is not UTF-8 text", id="no text"),
        pytest.param(lambda path: None, "No such file or directory", id="no file"),  # noqa: ARG005
    ],
)
def test_file_that_cannot_be_read_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "file"
    make(path)
    assert cli.main(["replay", str(path)]) == 2
    said = capsys.readouterr().err
    assert said == f"regroup: FILE ({path}) cannot be read ({why}). Give an operator's decision log.\n"


def test_file_that_cannot_be_written_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        DecisionLogError, match=r"none/log cannot be written \(No such file or directory\)\. Name a file"
    ):
        DecisionLog(tmp_path / "none" / "log", 1000)


def test_log_has_a_bound(tmp_path: Path) -> None:
    life(tmp_path, max_bytes=40_000)
    files = sorted(tmp_path.glob("decisions.jsonl*"))
    assert 1 < len(files) <= NUM_FILES
    assert all(f.stat().st_size <= 40_000 for f in files)


@pytest.mark.parametrize("seed", range(700, 724))
def test_decisions_of_random_walks_are_made_again_alike(tmp_path: Path, seed: int) -> None:
    setting = setting_of(seed)
    walk = Walk(setting, faults_of(seed, sorted(KINDS)))
    log = logged(walk.world, tmp_path / "decisions.jsonl")
    assert walk.run().sort == ""
    log.close()
    lines = (tmp_path / "decisions.jsonl").read_text().splitlines()
    assert lines
    for text in lines:
        line = from_line(text)
        assert difference(line.decision, decision_of(plan_job(line.inputs))) is None
