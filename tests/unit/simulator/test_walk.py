"""The simulator itself: it finds what is broken on purpose, plays the same walk again, and makes failing lists short."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from regroup_operator.controller import Controller
from regroup_operator.model.plan import Verdict
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Decision, Keep
from regroup_operator.plan import job as plan_job_module
from regroup_operator.plan.membership import next_generation
from tests.simulator import walk
from tests.simulator.faults import KINDS, Fault, parse
from tests.simulator.walk import Setting, faults_of, run, setting_of, shrink
from tests.simulator.world import World

PLAIN = Setting(
    seed=1, replicas=3, minimum=1, fixed=False, processes=1, script=False, known=True, total_steps=1_000_000,
    step_s=0.5, checkpoint_every=0, term_grace_s=20.0, quick=True,
)  # fmt: skip


def test_fault_reads_as_it_is_written() -> None:
    for seed in range(30):
        for fault in faults_of(seed, list(KINDS)):
            assert parse(str(fault)) == fault


@pytest.mark.parametrize(("text", "message"), [("explode", "no kind of fault"), ("kill when=3", "no field of a fault")])
def test_fault_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize("kind", KINDS)
def test_job_recovers_from_one_fault_of_each_kind(kind: str) -> None:
    for_s = KINDS[kind].spans[0]
    outcome = run(PLAIN, [Fault(kind, after_s=3.0, for_s=for_s, size=2), Fault(kind, after_s=8.0, at=1, for_s=for_s)])
    assert not outcome.sort, outcome
    assert len(outcome.recoveries) == 3  # after each of them, and after all is well


def test_plan_that_never_announces_again_is_found_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(**known: Any) -> Decision:
        return next_generation(**known) if known["current"] is None else Keep(UntilEvent.CHANGE)

    monkeypatch.setattr(plan_job_module, "next_generation", once)
    outcome = run(PLAIN, [Fault("scale", size=2), Fault("kill", after_s=3.0), Fault("break-stream")])
    assert outcome.sort == "stuck"
    short = shrink(outcome)
    assert [str(fault) for fault in short.faults] == ["kill"]


def test_job_that_says_running_while_nobody_trains_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "step", lambda self: self.settle())
    monkeypatch.setattr(walk, "HANG_S", 3600)  # else it is found to hang
    assert run(PLAIN, []).sort == "untrue"


def test_end_that_not_all_have_reached_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = plan_job_module._Planner._ended

    def early(self: plan_job_module._Planner, failure: Verdict | None) -> str | None:
        return "Succeeded" if self.newest is not None else real(self, failure)

    monkeypatch.setattr(plan_job_module._Planner, "_ended", early)
    assert run(PLAIN, [Fault("kill", after_s=3.0)]).sort == "untrue"


def test_error_in_the_middle_of_a_reconcile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("nothing")

    monkeypatch.setattr(Controller, "_say", broken)
    assert run(PLAIN, []).sort == "KeyError"


def test_same_seed_is_the_same_walk_whatever_strings_hash_to() -> None:
    code = (
        "from tests.simulator.walk import run, setting_of, faults_of\n"
        "from tests.simulator.faults import KINDS\n"
        "kinds = list(KINDS)\n"
        "for seed in (3, 11): o = run(setting_of(seed), faults_of(seed, kinds)); print(o, o.num_commits, o.recoveries)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert len(said) == 1
    assert setting_of(3) == setting_of(3)
