"""`python -m chaos`: the printed command runs the same job again; each place keeps its own verdict; the journal's sums."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from chaos import __main__ as command
from chaos import campaign, cluster_job
from chaos.local import REPOSITORY
from chaos.totals import Journal, Result
from chaos.verdict import Injected, Verdict


@pytest.fixture(autouse=True)
def out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setattr(command, "OUT", tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def ran(seed: int, where: str, *, stuck: bool = False) -> Result:
    one = Injected("kill-two", "settled", "x", 1.0, 20.0, 5, 1, None if stuck else 0.5, stuck, "settled")
    verdict = Verdict("Stuck", stuck=["no commit"]) if stuck else Verdict("Succeeded")
    return Result(seed, 1, where, "v1", "a job", (one,), verdict, 30.0)


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert command.main([*arguments, "--plan"]) == 0
    return capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize(
    ("where", "count"),
    [
        pytest.param("local", 10, id="a short job"),
        pytest.param("local", 60, id="a longer job than --per-job has it"),
        pytest.param("cluster", 7, id="a short job in the cluster"),
        pytest.param("cluster", 25, id="a longer one there"),
        pytest.param("local-split", 12, id="a job whose model is split"),
    ],
)
def test_printed_command_runs_the_same_job_again(where: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    place, _, model = where.partition("-")
    several = [
        "--where",
        place,
        "--model",
        model or "whole",
        "--seed",
        "6",
        "--faults",
        str(2 * count),
        "--per-job",
        str(count),
    ]
    both = planned(several, capsys)
    second = both[next(i for i, line in enumerate(both) if line.startswith("seed 7:")) :]
    assert len(second) == 1 + count

    words = shlex.split(campaign.replay(7, count, where))
    assert words[:2] == ["make", "chaos"]
    recipe = subprocess.run(
        ["make", "--dry-run", *words[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.replace("\\\n", " ")
    (line,) = (line for line in recipe.splitlines() if " -m chaos " in line)
    assert planned(line.split(" -m chaos ")[1].split(), capsys) == second


def test_run_in_the_cluster_leaves_the_verdict_of_the_local_one(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    def run_one(_: Any, __: Any, seed: int, *___: Any, cluster: bool, model: str) -> Result:
        assert model == "whole"
        return ran(seed, "cluster" if cluster else "local", stuck=not cluster)

    monkeypatch.setattr(command, "run_one", run_one)
    monkeypatch.setattr(cluster_job, "installed", nullcontext)
    assert command.main(["--seed", "1", "--faults", "1"]) == 1
    assert command.main(["--seed", "2", "--faults", "1", "--where", "cluster"]) == 0
    kept = {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert {name: (v["seed"], v["stuck"]) for name, v in kept.items()} == {
        "chaos.json": (2, 0), "chaos-local.json": (1, 1), "chaos-cluster.json": (2, 0),
    }  # fmt: skip


def test_split_jobs_have_a_journal_of_their_own_and_none_in_the_cluster(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_one(_: Any, __: Any, seed: int, *___: Any, cluster: bool, model: str) -> Result:
        assert not cluster
        return ran(seed, f"local-{model}")

    monkeypatch.setattr(command, "run_one", run_one)
    assert command.main(["--seed", "1", "--faults", "1", "--model", "split"]) == 0
    assert {path.name for path in out.iterdir()} == {"chaos.json", "chaos-local-split.json", "chaos-local-split.jsonl"}
    assert command.main(["--seed", "1", "--model", "split", "--where", "cluster"]) == 2
    assert "--model split runs with --where local only" in capsys.readouterr().out


def test_totals_are_printed_as_the_document_has_them_and_no_verdict_is_written(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--totals"]) == 0
    assert "No job has been run" in capsys.readouterr().out
    journal = Journal(out / "chaos-local.jsonl")
    journal.add(ran(1, "local"))
    journal.add(ran(2, "local", stuck=True))
    assert command.main(["--totals"]) == 1
    text = capsys.readouterr().out
    assert "| kill-two | 2 | 0.50 s | 0.50 s | 0.50 s |" in text
    assert "2 faults in 2 jobs: 1 stuck" in text
    assert "Failing seeds: 2" in text
    assert [path.name for path in out.iterdir()] == ["chaos-local.jsonl"]
