"""The drive looks for a commit after every fault, and calls a job stuck, failed or unequal that is so. The job is a double."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chaos import campaign
from chaos.drive import Drive
from chaos.job import Job, NothingToHitError
from chaos.kinds import FORM_S, KINDS, SESSION
from chaos.plan import END, FINISHING, SETTLED, Fault, Scenario
from chaos.verdict import Expected

STEPS = 60
BOUND_S = 2.0
"""Far more than a step of the double takes on a busy machine; the test of a job that is stuck waits as long."""
WHO = {"pod": "w-0", "pid": 1, "start": 1}


class JobDouble(Job):
    """Commits a step each time it is looked at, until a fault of a kind in `fatal`."""

    def __init__(self, directory: Path, *, fatal: str = "", outcome: str = "Succeeded", parameters: str = "aa") -> None:
        super().__init__(Scenario(SESSION, 1, 2, 1), directory, directory / "trace", STEPS)
        self._fatal, self._outcome, self._parameters = fatal, outcome, parameters
        self._dead, self._step, self._generation, self._looks_after = False, 0, 1, 0

    def start(self) -> None:
        self._write("built", started=0.0)

    def status(self) -> dict[str, Any]:
        return {"membership": {"adopted": True, "worldSize": 2}, "samples": {"digest": "dd"}}

    def inject(self, fault: Fault) -> str:
        if fault.kind == "damage-checkpoint":
            raise NothingToHitError("there are no two checkpoints")
        self._dead = self._dead or fault.kind == self._fatal
        self._generation += 1
        return "w-0"

    def changing(self) -> str:
        return ""

    def writes_checkpoint(self) -> bool:
        return False

    def look(self) -> None:
        if self._step < STEPS and not self._dead:
            self._write("commit", generation=self._generation, step=self._step)
            self._step += 1
            if self._step == STEPS:
                self._write(
                    "done", generation=self._generation, world_size=1, parameters=self._parameters, samples="dd"
                )

    def ended(self) -> str | None:
        self._looks_after += self._step == STEPS
        over = self._looks_after > 10 or (self._dead and self._outcome != "Succeeded")
        return self._outcome if over else None

    def diagnosis(self) -> str:
        return "what a person needs"

    def close(self) -> None:
        self.undo.close()

    def _write(self, event: str, **what: object) -> None:
        with (self.traces / "w-0-1.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "t": time.time(), **WHO, **what}) + "\n")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kill-trainer", "kill-two", "scale", "damage-checkpoint"):
        monkeypatch.setitem(KINDS, name, replace(KINDS[name], bound_s=BOUND_S))


def fault(kind: str, moment: str = SETTLED) -> Fault:
    return Fault(kind, moment, 5.0 if moment == END else 0.0, 0.0, 0.0, 0, whole_first=False)


def drive(job: JobDouble, *faults: Fault) -> Drive:
    one = Drive(job, faults, lambda line: None)  # noqa: ARG005
    one.run(lambda: Expected("aa", "dd"))
    job.close()
    return one


def test_every_fault_is_followed_by_a_commit_or_by_the_end(tmp_path: Path) -> None:
    one = drive(
        JobDouble(tmp_path), fault("kill-trainer"), fault("scale"), fault("kill-two", END), fault("scale", FINISHING)
    )
    assert one.verdict.passed, one.verdict
    assert [f.kind for f in one.injected] == ["kill-trainer", "scale", "kill-two", "scale"]
    assert all(f.recovered_s is not None and 0 < f.recovered_s < BOUND_S for f in one.injected)


def test_job_that_commits_no_more_is_stuck_and_the_fault_is_named(tmp_path: Path) -> None:
    one = drive(JobDouble(tmp_path, fatal="kill-two"), fault("kill-trainer"), fault("kill-two"), fault("scale"))
    assert (one.verdict.outcome, one.verdict.passed) == ("Stuck", False)
    (sentence,) = one.verdict.stuck
    assert "after kill-two (settled) of w-0" in sentence
    assert [(f.kind, f.stuck) for f in one.injected] == [("kill-trainer", False), ("kill-two", True)]
    assert one.diagnosis == "what a person needs"


def test_job_that_fails_is_no_success(tmp_path: Path) -> None:
    one = drive(JobDouble(tmp_path, fatal="kill-two", outcome="Failed"), fault("kill-two"))
    assert (one.verdict.outcome, one.verdict.passed) == ("Failed", False)
    assert one.diagnosis == "what a person needs"


def test_other_parameters_than_without_faults_are_no_success(tmp_path: Path) -> None:
    one = drive(JobDouble(tmp_path, parameters="bb"), fault("kill-trainer"))
    assert one.verdict.outcome == "Succeeded"
    assert len(one.verdict.unequal) == 1
    assert not one.verdict.passed


def test_fault_after_the_operators_kill_has_the_time_until_somebody_leads_on_top(tmp_path: Path) -> None:
    one = drive(JobDouble(tmp_path), fault("kill-operator"), fault("kill-trainer"))
    first, second = one.injected
    assert second.bound_s == pytest.approx(BOUND_S + first.bound_s - FORM_S - (second.at_s - first.at_s), abs=0.5)


def test_fault_without_a_target_is_not_counted(tmp_path: Path) -> None:
    one = drive(JobDouble(tmp_path), fault("damage-checkpoint"), fault("kill-trainer"))
    assert one.verdict.passed
    assert [f.kind for f in one.injected] == ["kill-trainer"]
    assert one.skipped == ["damage-checkpoint (settled): there are no two checkpoints"]


@pytest.mark.parametrize(("cluster", "again"), [(False, "SEED=3 FAULTS=2"), (True, "SEED=3 FAULTS=2 CHAOS=cluster")])
def test_failing_seed_is_said_with_the_command_that_replays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: bool, again: str
) -> None:
    monkeypatch.setattr(campaign, "REPOSITORY", tmp_path)
    monkeypatch.setattr(campaign, "OUT", tmp_path / "out")
    console = Console(record=True, width=200, file=io.StringIO())

    def make(_: Scenario, directory: Path, __: int, faults: Sequence[Fault]) -> Job:
        return JobDouble(directory, fatal=faults[0].kind, outcome="Failed")

    result = campaign.run_one(console, make, 3, 2, "v1", cluster=cluster)
    assert not result.verdict.passed
    assert console.export_text().splitlines()[-1].endswith(f"again: make chaos {again}")
