"""The drive looks for a commit after every fault, and calls a job stuck, failed or unequal that is so. The job is a double."""

from __future__ import annotations

import io
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chaos import campaign
from chaos import drive as drive_module
from chaos.drive import Drive
from chaos.job import Job, NothingToHitError
from chaos.kinds import FORM_S, KINDS, SESSION
from chaos.plan import ADOPTING, CHECKPOINT, END, FINISHING, FORMING, RECOVERING, SCALING, SETTLED, Fault, Scenario
from chaos.verdict import Expected

STEPS = 60
BOUND_S = 2.0
"""Far more than a step of the double takes on a busy machine; the test of a job that is stuck waits as long."""
WHO = {"pod": "w-0", "pid": 1, "start": 1}


class JobDouble(Job):
    """Commits a step each time it is looked at, until a fault of a kind in `fatal`.

    `after`: what each look between the first fault and the second shows instead of a commit: a moment, or "" for nothing yet.
    A resize shows SCALING, and commits meanwhile.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fatal: str = "",
        outcome: str = "Succeeded",
        parameters: str = "aa",
        after: Sequence[str] = (),
    ) -> None:
        super().__init__(Scenario(SESSION, 1, 2, 1), directory, directory / "trace", STEPS)
        self._fatal, self._outcome, self._parameters = fatal, outcome, parameters
        self._dead, self._step, self._generation, self._looks_after = False, 0, 1, 0
        self._after, self._shows, self._size = deque(after), "", self.wanted
        self.met: list[str] = []
        """What it showed when each fault was injected."""

    def start(self) -> None:
        self._write("built", started=0.0)

    def status(self) -> dict[str, Any]:
        return {"membership": {"adopted": True, "worldSize": self._size}, "samples": {"digest": "dd"}}

    def inject(self, fault: Fault) -> str:
        if fault.kind == "damage-checkpoint":
            raise NothingToHitError("there are no two checkpoints")
        self._dead = self._dead or fault.kind == self._fatal
        self._generation += 1
        self.met.append(self._shows)
        if len(self.met) > 1:
            self._after.clear()
        self.wanted += fault.kind == "scale"
        return "w-0"

    def changing(self) -> str:
        return self._shows if self._shows in (FORMING, ADOPTING) else ""

    def writes_checkpoint(self) -> bool:
        return self._shows == CHECKPOINT

    def look(self) -> None:
        waits = bool(self.met) and bool(self._after)
        self._shows = self._after.popleft() if waits else ""
        if not waits:
            self._size = self.wanted
        if self._step < STEPS and not self._dead and (not waits or self._shows == SCALING):
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
    monkeypatch.setattr(drive_module, "LOOK_S", 0.004)
    for name in ("kill-trainer", "kill-two", "scale", "damage-checkpoint"):
        monkeypatch.setitem(KINDS, name, replace(KINDS[name], bound_s=BOUND_S))


def fault(kind: str, moment: str = SETTLED, delay_s: float = 0.0) -> Fault:
    return Fault(kind, moment, 5.0 if moment == END else delay_s, 0.0, 0.0, 0, whole_first=False)


def drive(job: JobDouble, *faults: Fault, say: Callable[[str], None] = lambda line: None) -> Drive:  # noqa: ARG005
    one = Drive(job, faults, say)
    one.run(lambda: Expected("aa", "dd"))
    job.close()
    return one


def test_every_fault_is_followed_by_a_commit_or_by_the_end(tmp_path: Path) -> None:
    one = drive(
        JobDouble(tmp_path), fault("kill-trainer"), fault("scale"), fault("kill-two", END), fault("scale", FINISHING)
    )
    assert one.verdict.passed, one.verdict
    assert [f.kind for f in one.injected] == ["kill-trainer", "scale", "kill-two", "scale"]
    assert [f.moment for f in one.injected[2:]] == [END, FINISHING]
    assert all(f.recovered_s is not None and 0 < f.recovered_s < BOUND_S for f in one.injected)


@pytest.mark.parametrize(
    ("first", "moment", "after"),
    [
        pytest.param("kill-trainer", FORMING, ["", "", FORMING, FORMING, ADOPTING], id="while the next generation forms"),
        pytest.param("kill-trainer", ADOPTING, ["", FORMING, FORMING, ADOPTING, ADOPTING], id="while it takes over the state"),
        pytest.param("scale", SCALING, [SCALING] * 1000, id="while a resize is under way"),
        pytest.param("scale", ADOPTING, [SCALING] * 10 + [FORMING] * 2 + [ADOPTING] * 2, id="when a resize's newcomers are there"),
        pytest.param("kill-trainer", CHECKPOINT, ["", "", CHECKPOINT, CHECKPOINT, ""], id="while a checkpoint is written"),
    ],
)  # fmt: skip
def test_fault_meets_the_moment_that_it_is_aimed_at(tmp_path: Path, first: str, moment: str, after: list[str]) -> None:
    job = JobDouble(tmp_path, after=after)
    one = drive(job, fault(first), fault("kill-two", moment, delay_s=0.05))
    assert one.verdict.passed, one.verdict
    assert job.met[1] == moment
    assert [(f.planned, f.moment, f.when) for f in one.injected] == [
        (SETTLED, SETTLED, SETTLED),
        (moment, moment, moment),
    ]


@pytest.mark.parametrize(
    ("first", "moment", "after", "met"),
    [
        pytest.param("kill-trainer", FORMING, [], SETTLED, id="the change is over before it is seen"),
        pytest.param("kill-trainer", FORMING, ["", ADOPTING, ADOPTING, ""], SETTLED, id="it goes by unseen"),
        pytest.param("kill-trainer", FORMING, [""] * 1000, RECOVERING, id="nothing is seen to happen"),
        pytest.param("kill-trainer", ADOPTING, [FORMING] * 1000, FORMING, id="forming takes longer than a fault waits"),
        pytest.param("kill-trainer", CHECKPOINT, [], SETTLED, id="no checkpoint is written"),
        pytest.param("scale", ADOPTING, [SCALING] * 1000, SCALING, id="newcomers import longer than a fault waits"),
        pytest.param("scale", SCALING, [], RECOVERING, id="a resize that is over at once"),
    ],
)
def test_fault_whose_moment_does_not_come_says_which_it_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, moment: str, after: list[str], met: str
) -> None:
    for name in ("CHANGE_S", "RESIZE_S"):  # shorter than the job takes to come to its end, a step at each look
        monkeypatch.setattr(drive_module, name, 0.1)
    lines: list[str] = []
    job = JobDouble(tmp_path, after=after)
    one = drive(job, fault(first), fault("kill-two", moment, delay_s=0.05), say=lines.append)
    assert one.verdict.passed, one.verdict
    assert (one.injected[1].planned, one.injected[1].moment) == (moment, met)
    assert job.met[1] == {SETTLED: "", RECOVERING: ""}.get(met, met)
    assert f"kill-two ({met} instead of {moment}): w-0" in lines[1]


def test_quick_resize_is_met_while_its_generation_forms(tmp_path: Path) -> None:
    job = JobDouble(tmp_path, after=[SCALING] * 3 + [FORMING] * 5)
    one = drive(job, fault("scale"), fault("kill-two", SCALING, delay_s=5.0))
    assert (one.injected[1].moment, job.met[1]) == (SCALING, FORMING)


def test_fault_that_meets_a_moment_by_chance_says_so(tmp_path: Path) -> None:
    job = JobDouble(tmp_path, after=[SCALING] * 1000)
    one = drive(job, fault("scale"), fault("kill-two"))
    assert [(f.planned, f.moment) for f in one.injected] == [(SETTLED, SETTLED), (SETTLED, SCALING)]


def test_job_that_commits_no_more_is_stuck_and_the_fault_is_named(tmp_path: Path) -> None:
    one = drive(JobDouble(tmp_path, fatal="kill-two"), fault("kill-trainer"), fault("kill-two"), fault("scale"))
    assert (one.verdict.outcome, one.verdict.passed) == ("Stuck", False)
    (sentence,) = one.verdict.stuck
    assert "after kill-two (settled) of w-0" in sentence
    assert [(f.kind, f.stuck) for f in one.injected] == [("kill-trainer", False), ("kill-two", True)]
    assert one.skipped == ["scale (settled): the job was over"]
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
