"""Memory snapshots with real agents and trainers: what is left when every process ends at once, and nothing is on disk."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.local_run import LocalRun
from tests.long import only_long
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "raising_job.py"
STEPS = 80
RAISES_AT = 30
PACE_S = "0.05"
ELASTIC = ("--min", "1", "--max", "3", "--join-quiet", "0.2")
SNAPSHOT = ("--memory-snapshot", "64Mi", "--memory-snapshot-every", "1")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LocalRun]]:
    runs: list[LocalRun] = []
    monkeypatch.setenv("TEST_STEPS", str(STEPS))
    monkeypatch.setenv("TEST_TRACE", str(tmp_path / "trace"))

    def begin(*arguments: str, **environment: str) -> LocalRun:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        runs.append(LocalRun(tmp_path, *arguments, str(SCRIPT)))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def commits(directory: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (directory / "trace").read_text().splitlines()]


def hashes(text: str) -> set[str]:
    found = set(re.findall(r"^(?:\[.*\] )?hash (\w+)$", text, re.MULTILINE))
    assert found, text
    return found


@pytest.fixture
def want(tmp_path: Path, zygote: Zygote) -> Callable[[], set[str]]:
    """What the same script comes to in plain python."""
    (tmp_path / "plain").mkdir()
    environment = {"TEST_STEPS": str(STEPS), "TEST_TRACE": str(tmp_path / "plain" / "trace")}
    plain = Plain(zygote, tmp_path / "plain" / "log", SCRIPT, **environment)
    return lambda: hashes(plain.wait())


def ends(run: LocalRun) -> dict[str, Any]:
    status = run.wait(lambda status: status.get("phase") in ("Succeeded", "Failed"), "the end")
    assert status["phase"] == "Succeeded", run.log.read_text()
    run.process.wait(30)
    return status


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param(1, id="one process each"),
        pytest.param(2, id="two processes each", marks=only_long("test_split_snapshots.py has two in a worker")),
    ],
)
def test_exception_on_every_rank_at_once_costs_no_step(
    start: Callable[..., LocalRun], tmp_path: Path, want: Callable[[], set[str]], processes: int
) -> None:
    """Each process copies its state as it ends. The next ones continue in the step that raised."""
    run = start(
        *("--workers", "2", *ELASTIC, *SNAPSHOT, "--processes-per-worker", str(processes)),
        TEST_RAISE=f"1:{RAISES_AT}",
    )
    status = ends(run)
    assert hashes(run.log.read_text()) == want()
    later = [line["step"] for line in commits(tmp_path) if line["generation"] > 1]
    assert min(later) == RAISES_AT
    assert not any(incident.get("stepsRedone") for incident in status["incidents"])
    assert "rolled back" not in json.dumps(status["incidents"])


def test_exception_in_a_forward_leaves_no_half_step_in_the_buffers(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    """Each rank's BatchNorm has seen other samples when it raises: were they kept, the ranks would differ from then on."""
    run = start("--workers", "2", *ELASTIC, *SNAPSHOT, TEST_RAISE=f"1:{RAISES_AT}", TEST_LAYER="batchnorm")
    ends(run)
    assert len(hashes(run.log.read_text())) == 1
    assert min(line["step"] for line in commits(tmp_path) if line["generation"] > 1) == RAISES_AT


@only_long("it shows only that the test above can fail")
def test_without_snapshots_the_same_exception_costs_everything(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    """What the test above would miss if snapshots did nothing."""
    ends(start("--workers", "2", *ELASTIC, TEST_RAISE=f"1:{RAISES_AT}"))
    assert min(line["step"] for line in commits(tmp_path) if line["generation"] > 1) == 0


@pytest.mark.parametrize("workers", [pytest.param(1, marks=only_long("as two workers")), 2])
def test_sigkill_of_every_process_at_once_goes_back_to_the_newest_snapshot(
    start: Callable[..., LocalRun], tmp_path: Path, want: Callable[[], set[str]], workers: int
) -> None:
    go = tmp_path / "go"
    run = start("--workers", str(workers), *ELASTIC, *SNAPSHOT, TEST_PACE=PACE_S, TEST_GO=str(go))
    status = run.wait(lambda status: (status.get("memorySnapshot") or {}).get("step", 0) >= 10, "a snapshot of step 10")
    covered, generation = status["memorySnapshot"]["step"], status["membership"]["generation"]
    assert {c["type"]: c["status"] for c in status["conditions"]}["SnapshotsTaken"] == "True"
    for pid in run.trainers().values():
        os.kill(pid, signal.SIGKILL)
    go.touch()
    ends(run)
    assert hashes(run.log.read_text()) == want()
    later = min(line["step"] for line in commits(tmp_path) if line["generation"] > generation)
    before = max(line["step"] for line in commits(tmp_path) if line["generation"] <= generation)
    assert covered <= later <= before + 1
