"""The simulator itself: it finds what is broken on purpose, plays the same walk again, and makes failing lists short."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from _regroup_agent import faults as agent_faults
from regroup.generation.adoption import Fallback
from regroup_operator.controller import Controller
from regroup_operator.model.plan import JobCondition
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Current, Decision, Keep, Situation
from regroup_operator.plan import job as plan_job_module
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.failures import on_exit
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.generation import decision, document, forced, generation
from regroup_operator.plan.generation.decision import next_generation
from regroup_operator.plan.lifecycle.lifecycle import Ended, Lifecycle, decide_lifecycle
from regroup_operator.plan.report import conditions, overview
from tests.simulator import setting, trainers
from tests.simulator.agents import ZYGOTE_S
from tests.simulator.faults import KINDS, Fault, parse
from tests.simulator.setting import Setting, faults_of, setting_of
from tests.simulator.strikes import SLOW_START_S, SLOW_STEP_S
from tests.simulator.walk import Walk, run, shrink
from tests.simulator.world import World

PLAIN = Setting(
    seed=1, replicas=3, minimum=1, fixed=False, processes=1, script=False, known=True, total_steps=1_000_000,
    step_s=0.5, checkpoint_every=0, term_grace_s=20.0, quick=True,
)  # fmt: skip

LONG_STEPS = replace(PLAIN, step_s=5.0)
"""Less to compute where much time passes."""


@pytest.mark.parametrize(("kept_s", "sort"), [(agent_faults.ANSWERED_S, ""), (0.0, "miscounted")])
def test_exit_that_goes_with_its_operator_is_found(kept_s: float, sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API is away while a process is killed; the leader, which has been told, cannot renew its lease and ends."""
    monkeypatch.setattr(agent_faults, "ANSWERED_S", kept_s)
    away, kill = Fault("api-down", for_s=20), Fault("kill", size=4)
    assert Walk(setting_of(821), [away, kill]).run().sort == sort


def test_fault_reads_as_it_is_written() -> None:
    for seed in range(30):
        for fault in faults_of(seed, list(KINDS)):
            assert parse(str(fault)) == fault


@pytest.mark.parametrize(("text", "message"), [("explode", "no kind of fault"), ("kill when=3", "no field of a fault")])
def test_fault_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def lasts(seconds: float) -> Callable[[Walk], bool]:
    """Return whether the first commit after the faults took so long."""
    return lambda done: done.outcome.recoveries[0][1] >= seconds


def older_was_read(done: Walk) -> bool:
    disk = done.world.disk
    return any(
        c.state.generation == read.state.generation and c.state.step > read.state.step
        for c in disk.checkpoints
        for read in disk.read[:1]
    )


def noted(reason: str) -> Callable[[Walk], bool]:
    return lambda done: reason in [note.reason for note in done.world.notes]


KILL, KILL_ALL, VANISH = Fault("kill", calm=False), Fault("kill-all", calm=False), Fault("vanish", calm=False)
BESIDE: dict[str, tuple[Fault | None, Callable[[Walk], bool]]] = {
    "kill-zygote": (KILL, lasts(ZYGOTE_S)),
    "slow-starts": (KILL, lasts(SLOW_START_S)),
    "disk-full": (KILL, lambda done: any(pod.container_restarts for pod in done.world.pods.by_uid.values())),
    "slow-rank": (None, lasts(SLOW_STEP_S - PLAIN.step_s)),
    "stall-log": (Fault("break-stream", after_s=1.0, calm=False), lasts(2.0)),
    "truncate-checkpoint": (KILL_ALL, older_was_read),
    "remove-checkpoint": (KILL_ALL, older_was_read),
    "lose-checkpoints": (KILL_ALL, lambda done: done.world.disk.num_refused > 0),
    "blind-worker": (KILL_ALL, lambda done: done.world.disk.num_refused > 0),
    "refuse-pods": (VANISH, lambda done: any(pod.attempt >= 2 for pod in done.world.pods.by_uid.values())),
    "lose-images": (VANISH, lasts(KINDS["lose-images"].spans[0])),
    "volume-full": (None, noted("CheckpointNotSaved")),
}
"""Kinds that show later, or with another fault beside them: that fault, and what has been seen in the end."""


BEFORE_THE_START = ("misspell",)
"""Kinds that find nothing once the job trains."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BEFORE_THE_START])
def test_job_recovers_from_one_fault_of_each_kind_that_hits_something(kind: str) -> None:
    beside, shows = BESIDE.get(kind, (None, None))
    faults = []
    for at in (0, 1):
        faults.append(Fault(kind, after_s=3.0 + 5.0 * at, at=at, for_s=KINDS[kind].spans[0], size=2 - at))
        faults += [replace(beside, at=at)] if beside else []
    done = Walk(replace(PLAIN, checkpoint_every=2, fixed=shows is not None), faults)
    outcome = done.run()
    assert not outcome.sort, outcome
    assert outcome.hits == [fault.kind for fault in faults]
    assert len(outcome.recoveries) == 3  # after each of them, and after all is well
    assert shows is None or shows(done), outcome.recoveries


@pytest.mark.parametrize(("says_why", "want"), [(True, ""), (False, "unnamed")])
def test_members_that_cannot_reach_each_other_and_cannot_be_replaced(
    says_why: bool, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node takes a new pod, and all workers are needed: the job waits, and names the link."""
    if not says_why:
        monkeypatch.setattr(forced, "_missing_link", lambda _: "")
    # The last one comes once the link has broken the group, so that a commit is waited for.
    faults = [Fault("refuse-pods", after_s=3.0, for_s=700.0), Fault("sever-link"), Fault("break-stream", after_s=4.0)]
    outcome = run(replace(PLAIN, minimum=3), faults)
    assert outcome.sort == want, outcome
    assert outcome.waited == (1 if says_why else 0)


@pytest.mark.parametrize("kind", BEFORE_THE_START)
def test_job_starts_once_what_keeps_it_from_starting_has_ended(kind: str) -> None:
    done = Walk(PLAIN, [Fault(kind, calm=False, for_s=max(KINDS[kind].spans))])
    outcome = done.run()
    assert not outcome.sort, outcome
    assert outcome.hits == [kind]
    assert noted("InvalidSpec")(done)


def test_plan_that_never_announces_again_is_found_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(current: Current | None, known: Situation) -> Decision:
        return next_generation(current, known) if current is None else Keep(UntilEvent.CHANGE)

    monkeypatch.setattr(generation, "next_generation", once)
    outcome = run(PLAIN, [Fault("scale", size=2), Fault("kill", after_s=3.0), Fault("break-stream")])
    assert outcome.sort == "stuck"
    short = shrink(outcome)
    assert [str(fault) for fault in short.faults] == ["kill"]


def test_roll_back_while_a_holder_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "decide", lambda *_: Fallback(None, rolled_back=False))
    outcome = run(PLAIN, [Fault("kill", after_s=3.0)])
    assert outcome.sort.startswith("broken")
    assert "generation 2 rolled back to " in outcome.message


def test_two_lists_of_members_with_one_number_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers count on from the status alone; that is restored from a backup, and agents have heard of more."""

    def from_the_status(current: Current | None, *_: object) -> int:
        return 1 + (current.number if current else 0)

    monkeypatch.setattr(document, "_next_number", from_the_status)
    faults = [Fault("kill", after_s=3.0), Fault("restore", size=4), Fault("kill", after_s=1.0)]
    outcome = run(PLAIN, faults)
    assert outcome.sort.startswith("broken")
    assert "stands for two lists of members" in outcome.message


def test_job_that_stays_smaller_than_is_wanted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "_planned", lambda *_: Keep(UntilEvent.CHANGE))
    outcome = run(LONG_STEPS, [Fault("kill", after_s=3.0)])
    assert outcome.sort == "not whole"


def test_wait_that_no_condition_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [Fault("power-off", after_s=3.0 if at == 0 else 0.0, calm=at == 0, at=at) for at in range(4)]
    named = run(LONG_STEPS, faults)
    assert (named.sort, named.waited) == ("", 1)
    real = conditions.training_conditions

    def silent(course: conditions.Course) -> list[JobCondition]:
        return [replace(said, reason="Recovering") if said.type == "Training" else said for said in real(course)]

    monkeypatch.setattr(overview, "training_conditions", silent)
    assert run(LONG_STEPS, faults).sort == "unnamed"


def test_job_that_says_running_while_nobody_trains_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "step", lambda self: self.settle())
    monkeypatch.setattr(setting, "HANG_S", 3600)  # else it is found to hang
    assert run(PLAIN, []).sort == "untrue"


def test_end_that_not_all_have_reached_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(facts: Facts, failures: Failures) -> Lifecycle:
        return Ended(succeeded=True) if facts.newest is not None else decide_lifecycle(facts, failures)

    monkeypatch.setattr(plan_job_module, "decide_lifecycle", early)
    assert run(PLAIN, [Fault("kill", after_s=3.0)]).sort == "untrue"


def test_failure_that_counts_although_a_rule_ignores_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ignoring, faults = replace(PLAIN, ignores=True), [Fault("kill", after_s=3.0)]
    assert run(ignoring, faults).sort == ""

    monkeypatch.setattr(on_exit, "first_match", lambda *_: None)
    assert run(ignoring, faults).sort == "counted"


def test_error_in_the_middle_of_a_reconcile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("nothing")

    monkeypatch.setattr(Controller, "_say", broken)
    assert run(PLAIN, []).sort == "KeyError"


def test_same_seed_is_the_same_walk_whatever_strings_hash_to() -> None:
    code = (
        "from tests.simulator.setting import faults_of, setting_of\n"
        "from tests.simulator.walk import run\n"
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
