"""`import regroup` in a Python that has torch and nothing of ours: the agent brings the library, behind the user's packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.local_run import LocalRun
from regroup.protocol import wire
from regroup.protocol.state import Phase
from tests.long import only_long
from tests.trainer.agent_edge import OperatorEdge, Worker, generation
from tests.trainer.bare_python import bare_python

SCRIPT = Path(__file__).with_name("bare_job.py")
NOBODY = 23456
"""A user id that no account has."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = str(bare_python(tmp_path_factory.mktemp("bare") / "venv"))
    lacks = subprocess.run([found, "-c", "import torch, regroup"], env={}, capture_output=True, text=True)
    assert lacks.stderr.endswith("No module named 'regroup'\n"), "the virtual environment has more than it should"
    return found


def outside_path(monkeypatch: pytest.MonkeyPatch, directory: Path, *, preload: str = "torch") -> Path:
    """Take our sources out of PYTHONPATH, put a directory with a `sitecustomize` there, and return that of the notes."""
    users = directory / "users"
    users.mkdir()
    (users / "sitecustomize.py").write_text("import os; os.environ['USERS_SITECUSTOMIZE'] = 'has run'\n")
    (directory / "where").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(users))
    monkeypatch.setenv("WHERE", str(directory / "where"))
    monkeypatch.setenv("REGROUP_PRELOAD", preload)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return directory / "where"


@pytest.mark.parametrize(
    "preload",
    [
        pytest.param("torch", id="forked"),
        pytest.param(
            "", id="exec'd", marks=only_long("a child that is exec'd is one of the interpreters of the other row")
        ),
    ],
)
def test_session_runs_and_each_interpreter_finds_the_library(
    start: Callable[..., LocalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, preload: str
) -> None:
    where = outside_path(monkeypatch, tmp_path, preload=preload)
    run = start("--workers", "2", python, "-u", str(SCRIPT))
    assert run.process.wait(120) == 0, run.log.read_text()
    notes = {path.name: path.read_text() for path in where.iterdir()}
    assert notes.pop("versions").endswith(torch.__version__.partition("+")[0])
    assert notes.pop("users") == "has run", "the user's sitecustomize is lost"
    assert notes.keys() == {"trainer", "subprocess", "spawn"}
    assert {Path(found).parts[-4:] for found in notes.values()} == {("library", "packages", "regroup", "__init__.py")}
    compiled = Path(notes["trainer"]).parent / "__pycache__"
    assert list(compiled.glob("job.*.pyc")), "each process compiles the library anew"


ROOT_IS_READ_ONLY = """\
#!/bin/sh
reads="-all,+dac_read_search"
exec unshare --mount sh -ec '
for writable in {writable}; do mount --bind "$writable" "$writable"; done
mount -o remount,bind,ro /
exec setpriv --reuid={user} --regid=0 --clear-groups "--inh-caps=$0" "--ambient-caps=$0" {python} "$@"
' "$reads" "$@"
"""
"""The agent as a pod with a read-only root starts it, under a user id without account. May read what pytest's user may."""


@pytest.mark.root
def test_session_trains_with_a_read_only_root_and_a_user_id_without_account(
    operator: OperatorEdge, worker: Worker, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    where = outside_path(monkeypatch, worker.directory)
    writable = [worker.state_dir, where]
    for directory in writable:
        os.chown(directory, NOBODY, 0)
    agent = worker.directory / "agent"
    agent.write_text(
        ROOT_IS_READ_ONLY.format(writable=" ".join(map(str, writable)), user=NOBODY, python=sys.executable)
    )
    agent.chmod(0o755)
    worker.python = str(agent)
    operator.token_file.chmod(0o644)
    worker.start(python, "-u", str(SCRIPT), REGROUP_PRELOAD="torch", HOME="/")
    port = operator.wait_body(wire.Hello).report.store_port
    operator.wait_stream()
    operator.tell(wire.Welcome("Session"))
    operator.wait_phase(Phase.READY, 60)
    command, document = generation(1, port, hosts_store=True)
    operator.tell(command)
    operator.tell(wire.DocumentCommand(document))
    adopted = operator.wait_body(wire.Adopted, 60)
    assert adopted.report.condition.generation == 1, worker.log()
    library = worker.state_dir / "library" / "packages" / "regroup"
    assert {path.read_text() for path in where.iterdir() if path.name not in ("users", "versions")} == {
        str(library / "__init__.py")
    }
    assert library.stat().st_uid == NOBODY
    assert (worker.state_dir / "tmp").is_dir(), "torch cannot be imported without a directory for temporary files"
