"""spec.recovery.onExit: which failure fails the job, which counts, which is ignored."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any, get_args

import pytest

from regroup.protocol.state import Phase
from regroup_operator.api.spec import ExitRule, Signal
from regroup_operator.api.status import JudgedExits
from regroup_operator.model.plan import Clock, Failure, IgnoredRow, JobMemory, JobPlan
from regroup_operator.model.pod_row import FORGOTTEN_S, PodRow
from regroup_operator.model.records import AgentSession, Pod, ProcessExit
from regroup_operator.plan.failures.on_exit import (
    MAX_FAILED,
    QUIET_S,
    SIGNALS,
    blocked_pod,
    first_match,
    judge_exits,
    note_disrupted_pods,
    note_ignored,
    rule_words,
)
from tests.builders.plan import JobBuilder, make_pod, make_session, uid_of
from tests.unit.plan.test_job import MEMBERSHIP, TRAINING, job, plan, trains

WALL = 1_800_000_000.0


def rule(action: str, **matcher: Any) -> ExitRule:
    return ExitRule.model_validate({"action": action, **matcher})


def codes(action: str, *values: int, operator: str = "In") -> ExitRule:
    return rule(action, exitCodes={"operator": operator, "values": list(values)})


def fails(code: int | None = 1, worker: str = "1", at: float = 10.0, generation: int = 1, **changes: Any) -> Failure:
    values: dict[str, Any] = {"generation": generation, "incarnation": 1, "pod": f"digits-worker-{worker}-0"}
    return Failure(at, worker, code, **values | changes)


def judged_in(generation: int, failed: dict[str, int]) -> JudgedExits:
    return JudgedExits(generation=generation, failed=failed)


def evicted(worker: str = "1", at: float = 10.0, reason: str = "Evicted") -> Failure:
    return fails(None, worker, at, 0, reason=reason, detail="EvictionByEvictionAPI", container=True, incarnation=0)


OOM = fails(-9, reason="OOMKilled", detail="limit 2Gi")


@pytest.mark.parametrize(
    ("given", "failure", "matches"),
    [
        pytest.param(codes("Fail", 2, 42), fails(42), True, id="code, in"),
        pytest.param(codes("Fail", 2, 42), fails(1), False, id="code, not in"),
        pytest.param(codes("Fail", 2, operator="NotIn"), fails(1), True, id="code, NotIn: another one"),
        pytest.param(codes("Fail", 2, operator="NotIn"), fails(2), False, id="code, NotIn: this one"),
        pytest.param(codes("Fail", 0), fails(0), True, id="code 0 before the last step"),
        pytest.param(codes("Fail", 137), fails(-9), True, id="a signal has the code of a shell and of Kubernetes"),
        pytest.param(codes("Fail", 2, operator="NotIn"), fails(-9), True, id="a signal is none of the codes"),
        pytest.param(codes("Fail", 2, operator="NotIn"), evicted(), False, id="an eviction has no code"),
        pytest.param(codes("Fail", 2, operator="NotIn"), fails(None), False, id="nor has an end without one"),
        pytest.param(rule("Fail", signals=["SIGTERM", "SIGKILL"]), fails(-9), True, id="signal"),
        pytest.param(rule("Fail", signals=["SIGKILL"]), fails(137, container=True), True, id="signal of a container"),
        pytest.param(rule("Fail", signals=["SIGKILL"]), fails(-15), False, id="another signal"),
        pytest.param(rule("Fail", signals=["SIGKILL"]), fails(9), False, id="a code is no signal"),
        pytest.param(
            rule("Fail", signals=["SIGKILL"]), fails(-9, hung=True), False, id="killed by the operator: it hung"
        ),
        pytest.param(codes("Fail", 2, operator="NotIn"), fails(-9, hung=True), False, id="no rule is for what hung"),
        pytest.param(rule("Fail", signals=["SIGKILL"]), OOM, True, id="what is killed for its memory gets SIGKILL"),
        pytest.param(rule("Fail", reasons=["OOMKilled"]), OOM, True, id="out of memory"),
        pytest.param(rule("Fail", reasons=["OOMKilled"]), fails(-9), False, id="killed, but not for its memory"),
        pytest.param(rule("Fail", reasons=["Preempted", "Evicted"]), evicted(), True, id="evicted"),
        pytest.param(rule("Fail", reasons=["Preempted"]), evicted(reason="Preempted"), True, id="preempted"),
        pytest.param(rule("Fail", reasons=["Preempted"]), evicted(), False, id="evicted is not preempted"),
    ],
)
def test_matchers(given: ExitRule, failure: Failure, matches: bool) -> None:
    assert first_match([given], failure) == (0 if matches else None)
    assert first_match([codes("Ignore", 99), given], failure) == (1 if matches else None)


def test_first_rule_that_matches_applies() -> None:
    rules = [codes("Restart", 2), codes("Fail", 1, 2), codes("Ignore", 1, operator="NotIn")]
    assert [first_match(rules, fails(code)) for code in (2, 1, 3)] == [0, 1, 2]


def test_every_signal_has_its_number() -> None:
    assert tuple(SIGNALS) == get_args(Signal)
    assert (SIGNALS["SIGBUS"], SIGNALS["SIGUSR1"], SIGNALS["SIGSYS"]) == (7, 10, 31)


@pytest.mark.parametrize("reason", ["Evicted", "Preempted"])
@pytest.mark.parametrize(
    ("action", "of_exit", "of_eviction"),
    [
        ("Fail", "fails", "fails"),
        ("Restart", "counts", "counts"),
        ("Ignore", "ignored", "ignored"),
        (None, "counts", ""),
    ],
)
def test_actions(action: str | None, of_exit: str, of_eviction: str, reason: str) -> None:
    rules = [] if action is None else [codes(action, 2), rule(action, reasons=[reason])]
    for failure, want in ((fails(2), of_exit), (evicted(reason=reason), of_eviction)):
        got = judge_exits(rules, [failure], judged=JudgedExits(), generations={"1": 1})
        found = {
            "fails": got.fails is not None,
            "ignored": bool(got.ignored),
            "counts": bool(got.counted and not got.fails),
        }
        assert [name for name, is_so in found.items() if is_so] == ([want] if want else [])


FAIL_2_IGNORE_3 = [codes("Fail", 2), codes("Ignore", 3)]


@pytest.mark.parametrize(
    ("judged", "failures", "failing", "counted", "ignored"),
    [
        pytest.param(
            JudgedExits(), [fails(2, "1", 10.0), fails(3, "0", 11.0)], "1", ["1"], ["0"], id="the first fails the job"
        ),
        pytest.param(
            JudgedExits(), [fails(2, "1", 11.0), fails(3, "0", 10.0)], None, ["1"], ["0"], id="it came second"
        ),
        pytest.param(
            JudgedExits(), [fails(2, "1", 10.0), fails(3, "0", 10.0)], None, ["1"], ["0"], id="at once: by name"
        ),
        pytest.param(
            JudgedExits(),
            [fails(1, "0", 9.0), fails(2, "1", 10.0)],
            None,
            ["0", "1"],
            [],
            id="the first matched no rule",
        ),
        pytest.param(
            JudgedExits(), [evicted("0", 9.0), fails(2, "1", 10.0)], "1", ["1"], [], id="a drain is no failure"
        ),
        pytest.param(judged_in(1, {"0": 1}), [fails(2, "1")], None, ["1"], [], id="the first was judged before"),
        pytest.param(
            judged_in(1, {"0": 1}), [fails(2, "1", generation=2)], "1", ["1"], [], id="of the next generation"
        ),
        pytest.param(judged_in(2, {"0": 1}), [fails(2, "1")], None, ["1"], [], id="told late: of an older generation"),
        pytest.param(
            judged_in(2, {"0": 1}),
            [fails(2, "1", incarnation=3, alone=True)],
            "1",
            ["1"],
            [],
            id="started again, and never in a generation since",
        ),
        pytest.param(judged_in(1, {"1": 1}), [fails(2, "1")], None, ["1"], [], id="another process of that worker"),
        pytest.param(
            judged_in(1, {"0": 1, "1": 1}),
            [fails(2, "1", incarnation=2, alone=True)],
            "1",
            ["1"],
            [],
            id="started again, and failed by itself",
        ),
        pytest.param(
            judged_in(1, {"0": 1, "1": 1}),
            [fails(2, "1", incarnation=2)],
            None,
            ["1"],
            [],
            id="a sibling of one that was started again: of the group that broke",
        ),
        pytest.param(
            judged_in(1, {"0": 1, "1": 0}),
            [fails(2, "1", incarnation=2)],
            "1",
            ["1"],
            [],
            id="all its processes are new since its container ended",
        ),
        pytest.param(
            judged_in(1, {"1": 3}),
            [fails(2, "1", container=True, incarnation=0)],
            "1",
            ["1"],
            [],
            id="its container, later",
        ),
        pytest.param(judged_in(5, {"0": 1}), [fails(2, "4", generation=0)], "4", ["4"], [], id="in no generation yet"),
        pytest.param(JudgedExits(), [fails(2, "4", generation=0)], "4", ["4"], [], id="before the first generation"),
        pytest.param(
            judged_in(1, {"0": 1}),
            [fails(2, "1", generation=0, container=True, incarnation=0)],
            None,
            ["1"],
            [],
            id="a container, after a peer",
        ),
        pytest.param(
            judged_in(1, {"0": 1}),
            [fails(2, "4", generation=0, container=True, incarnation=0)],
            "4",
            ["4"],
            [],
            id="a spare's container has no peers",
        ),
        pytest.param(
            JudgedExits(),
            [fails(3, "4", 2.0, generation=0, container=True, incarnation=0), fails(2, "1", 3.0)],
            "1",
            ["1"],
            ["4"],
            id="a spare's end is not the generation's first failure",
        ),
        pytest.param(
            judged_in(2, {"1": 1}),
            [fails(2, "3", generation=0, container=True, incarnation=0)],
            None,
            ["3"],
            [],
            id="a container that ended in the generation before",
        ),
    ],
)
def test_first_failure_of_a_generation(
    judged: JudgedExits, failures: list[Failure], failing: str | None, counted: list[str], ignored: list[str]
) -> None:
    newest = max(1, judged.generation)
    generations = {"0": newest, "1": newest, "2": newest, "3": 1}
    for order in permutations(failures):
        got = judge_exits(FAIL_2_IGNORE_3, order, judged=judged, generations=generations)
        assert (got.fails[1].worker if got.fails else None) == failing
        assert sorted(f.worker for f in got.counted) == sorted(counted)
        assert [f.worker for _, f in got.ignored] == ignored
        at_once = got.judged
        one_by_one = judged
        for failure in sorted(failures, key=lambda f: (f.at, f.worker)):
            one_by_one = judge_exits(FAIL_2_IGNORE_3, [failure], judged=one_by_one, generations=generations).judged
        assert one_by_one == at_once, "one plan or several: what is known is the same"


def test_written_down_workers_are_bounded() -> None:
    many = [fails(3, str(n), 10.0 + n) for n in range(MAX_FAILED + 9)]
    judged = judge_exits(FAIL_2_IGNORE_3, many, judged=JudgedExits(), generations={}).judged
    assert len(judged.failed) == MAX_FAILED
    assert judged.rule == "spec.recovery.onExit[1] (Ignore, exitCodes In 3)"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (codes("Fail", 2, 42), "spec.recovery.onExit[0] (Fail, exitCodes In 2, 42)"),
        (rule("Restart", signals=["SIGKILL"]), "spec.recovery.onExit[0] (Restart, signals SIGKILL)"),
        (
            rule("Ignore", reasons=["Evicted", "Preempted"]),
            "spec.recovery.onExit[0] (Ignore, reasons Evicted, Preempted)",
        ),
    ],
)
def test_words(given: ExitRule, words: str) -> None:
    assert rule_words([given], 0) == words


PENDING: dict[str, Any] = {"phase": "Pending", "running_since_s": None}
NO_NODE = make_pod(**PENDING, unschedulable="0/3 nodes are available.", unscheduled_reason="Unschedulable")


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        pytest.param(make_pod(**PENDING, waiting_reason="ImagePullBackOff"), "ImagePullBackOff", id="no image"),
        pytest.param(
            make_pod(**PENDING, waiting_reason="InvalidImageName"), "ImagePullBackOff", id="no name of an image"
        ),
        pytest.param(make_pod(**PENDING, waiting_reason="ErrImagePull"), "", id="the first pull: it is tried again"),
        pytest.param(
            make_pod(**PENDING, waiting_reason="CreateContainerConfigError"), "CreateContainerError", id="no secret"
        ),
        pytest.param(NO_NODE, "Unschedulable", id="no node"),
        pytest.param(replace(NO_NODE, unscheduled_reason="SchedulingGated"), "", id="held back by a queue"),
        pytest.param(replace(NO_NODE, terminating=True), "", id="not needed"),
        pytest.param(make_pod(waiting_reason="CrashLoopBackOff"), "", id="it has started"),
    ],
)
def test_pods_that_cannot_start(pod: Pod, reason: str) -> None:
    every = ["ImagePullBackOff", "CreateContainerError", "Unschedulable"]
    assert blocked_pod([rule("Fail", reasons=every)], [pod]) == ((0, pod, reason) if reason else None)
    assert blocked_pod([rule("Restart", reasons=every), rule("Fail", reasons=every)], [pod]) is None
    assert blocked_pod([rule("Ignore", reasons=every)], [pod]) is None
    assert blocked_pod([], [pod]) is None


@pytest.mark.parametrize(
    ("slots", "spares", "per_group", "fails"),
    [
        pytest.param([2], 0, 1, True, id="no spares"),
        pytest.param([0], 1, 1, False, id="the others are enough, whichever it is"),
        pytest.param([0, 2], 1, 1, True, id="one more than the spares"),
        pytest.param([0, 1], 2, 2, False, id="two of one group"),
        pytest.param([1, 2], 2, 2, True, id="two groups, and one is spare"),
    ],
)
def test_pods_that_cannot_start_fail_the_job_once_the_spares_do_not_make_up_for_them(
    slots: list[int], spares: int, per_group: int, fails: bool
) -> None:
    pods = [replace(NO_NODE, slot=slot, uid=f"uid-{slot}") for slot in slots]
    got = blocked_pod([rule("Fail", reasons=["Unschedulable"])], pods, spares=spares, per_group=per_group)
    assert got == ((0, pods[0], "Unschedulable") if fails else None)


@pytest.mark.parametrize(
    ("row", "new_at", "committed_at", "now", "count"),
    [
        pytest.param(None, [10.0], None, 10.0, 1, id="the first"),
        pytest.param(IgnoredRow(1, 10.0, ""), [20.0, 30.0], None, 30.0, 3, id="further ones"),
        pytest.param(IgnoredRow(4, 10.0, ""), [10.0 + QUIET_S], None, 10.0 + QUIET_S, 1, id="it ran well in between"),
        pytest.param(IgnoredRow(4, 10.0, ""), [], None, 9.0 + QUIET_S, 4, id="none new"),
        pytest.param(IgnoredRow(4, 10.0, ""), [], None, 10.0 + QUIET_S, None, id="none for long"),
        pytest.param(IgnoredRow(4, 10.0, ""), [], 11.0, 12.0, None, id="a step was committed since"),
        pytest.param(IgnoredRow(4, 10.0, ""), [], 9.0, 12.0, 4, id="a step was committed before"),
    ],
)
def test_rows_of_ignored_failures(
    row: IgnoredRow | None, new_at: list[float], committed_at: float | None, now: float, count: int | None
) -> None:
    got = note_ignored(row, [(fails(at=at), "words") for at in new_at], committed_at=committed_at, now=now)
    assert (None if got is None else got.count) == count


def test_pods_that_are_evicted_in_a_row_wait_longer_each_time() -> None:
    known = {slot: PodRow(2, 2 if slot == 1 else 0, 50.0) for slot in (1, 2, 3, 7)}
    known[4] = PodRow(2, 0, 100.0 - FORGOTTEN_S)
    running = [make_pod(1, 3, running_since_s=100.1 - QUIET_S), make_pod(2, 1, running_since_s=100.0 - QUIET_S)]
    known = note_disrupted_pods(known, [], running, 100.0, slots=5)
    assert sorted(known) == [1, 3], (
        "one that has lasted ends the row, and so do a time without another and the slot's end"
    )
    ended = [make_pod(slot, attempt, phase="Failed", running_since_s=None) for slot, attempt in ((1, 3), (2, 1))]
    got = note_disrupted_pods(known, ended, ended, 110.0, slots=5)
    assert got == {1: PodRow(3, 3, 110.0), 2: PodRow(1, 1, 110.0), 3: known[3]}


def test_evicted_worker_whose_processes_run_on_can_still_fail_as_a_consequence() -> None:
    """The eviction is decided first; a rule names it. Then a peer dies, and the worker's processes end with it."""
    rules = [rule("Ignore", reasons=["Evicted"]), codes("Fail", 2)]
    for judged in (JudgedExits(), judged_in(1, {"0": 1})):
        evicted_first = judge_exits(rules, [evicted()], judged=judged, generations={"1": 1, "0": 1})
        got = judge_exits(rules, [fails(3, "0"), fails(2, "1", 11.0)], judged=evicted_first.judged, generations={})
        assert got.fails is None
        ended = judge_exits(rules, [fails(3, "1", container=True, incarnation=0)], judged=judged, generations={"1": 1})
        got = judge_exits(rules, [fails(2, "1", 11.0, incarnation=2)], judged=ended.judged, generations={})
        assert got.fails is not None, "its container has ended: all its processes are new"


# --- in a whole job ------------------------------------------------------------------------------------------------


def ruled(*rules: ExitRule, status: dict[str, Any] | None = TRAINING, **recovery: Any) -> JobBuilder:
    written = [r.model_dump(by_alias=True, exclude_none=True) for r in rules]
    return job(status).with_recovery(onExit=written, **recovery)


def exited(slot: int, code: int, at_s: float = 99.0, *, count: int = 1, incarnation: int = 1) -> AgentSession:
    ended = [ProcessExit(at_s, incarnation, 0, code, "ValueError: no data", 1, number=i + 1) for i in range(count)]
    return trains(slot, exits=tuple(ended), num_exits=count)


def condition(got: JobPlan, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next((c for c in got.written["conditions"] if c["type"] == kind), {})
    return found


def test_rule_fails_the_job_in_one_sentence() -> None:
    got = plan(ruled(codes("Ignore", 3), codes("Fail", 2), maxRestarts=0), sessions=(exited(0, 2), trains(1)))
    assert got.written["failedPod"] == "digits-worker-0-0"
    assert (got.written["phase"], condition(got, "Failed")["reason"]) == ("Failed", "ExitRule")
    assert condition(got, "Failed")["message"] == (
        'Worker 0 (pod digits-worker-0-0) ended with exit code 2: "ValueError: no data"; spec.recovery.onExit[1] '
        "(Fail, exitCodes In 2) fails the job. kubectl logs --namespace=default digits-worker-0-0"
    )


def test_ignored_failure_counts_nothing_and_a_row_of_them_is_told() -> None:
    rules = ruled(codes("Ignore", 3), maxRestarts=0)
    first = plan(rules, sessions=(exited(0, 3), trains(1)))
    assert first.written["phase"] != "Failed"
    restarts = first.written["restarts"]
    assert (restarts["total"], restarts["recent"], restarts["ignored"]) == (0, [], 1)
    assert condition(first, "Degraded")["reason"] != "FailuresIgnored"
    again = plan(
        ruled(codes("Ignore", 3), status=first.written, maxRestarts=0), memory=first.memory,
        sessions=(exited(0, 3, count=3), trains(1)), clock=Clock(101.0, WALL + 1),
    )  # fmt: skip
    assert (again.written["restarts"]["ignored"], again.written["restarts"]["total"]) == (3, 0)
    told = condition(again, "Degraded")
    assert (told["status"], told["reason"]) == ("True", "FailuresIgnored")
    assert told["message"].endswith("spec.recovery.onExit[0] (Ignore, exitCodes In 3) does not count it.")
    later = plan(
        ruled(codes("Ignore", 3), status=again.written), memory=again.memory, sessions=(exited(0, 3, count=3), trains(1)),
        clock=Clock(101.0 + QUIET_S, WALL + QUIET_S + 1),
    )  # fmt: skip
    assert condition(later, "Degraded")["reason"] != "FailuresIgnored"


def test_job_is_looked_at_again_when_a_row_is_over() -> None:
    ended = ProcessExit(99.0, 1, 0, 3, "", 0)
    sessions = tuple(make_session(slot, Phase.STARTING, exits=(ended,), num_exits=1) for slot in (0, 1))
    told = plan(ruled(codes("Ignore", 3), status=None), sessions=sessions)
    assert condition(told, "Degraded")["reason"] == "FailuresIgnored"
    assert told.due_s == 99.0 + QUIET_S


def test_restart_counts_as_without_rules() -> None:
    with_rule = plan(ruled(codes("Restart", 2), codes("Fail", 2), maxRestarts=0), sessions=(exited(0, 2), trains(1)))
    without = plan(job().with_recovery(maxRestarts=0), sessions=(exited(0, 2), trains(1)))
    for got in (with_rule, without):
        assert condition(got, "Failed")["reason"] == "TooManyRestarts"
    assert "judged" not in without.written["restarts"]


def test_next_operator_decides_by_what_the_status_says() -> None:
    """The first failure of generation 1 was judged by the operator before: a peer's is no first one, although nothing else is
    remembered."""
    rules = (codes("Fail", 2), codes("Ignore", 3))
    first = plan(ruled(*rules), sessions=(exited(0, 3), trains(1)))
    assert first.written["restarts"]["judged"] == {
        "generation": 1, "rule": "spec.recovery.onExit[1] (Ignore, exitCodes In 3)", "failed": {"0": 1}, "ends": {},
    }  # fmt: skip
    other = plan(ruled(*rules, status=first.written), memory=JobMemory(), sessions=(trains(0), exited(1, 2)))
    same = plan(ruled(*rules, status=first.written), memory=first.memory, sessions=(exited(0, 3), exited(1, 2)))
    for got in (other, same):
        assert got.written["phase"] != "Failed"
        assert got.written["restarts"]["judged"]["failed"] == {"0": 1, "1": 1}


OOM_POD = make_pod(0, container_restarts=1, last_exit_code=137, last_exit_reason="OOMKilled")


@pytest.mark.parametrize(
    ("ends", "fails_by_rule"),
    [
        pytest.param({}, True, id="it ended while no operator looked"),
        pytest.param({"digits-worker-0-0": 1}, False, id="the operator before has judged it"),
        pytest.param(None, False, id="there were no rules then"),
    ],
)
@pytest.mark.parametrize(
    ("how", "unseen"),
    [
        pytest.param({}, False, id="by itself"),
        pytest.param({"last_exit_code": 255, "last_exit_reason": "Unknown"}, True, id="with its node"),
        pytest.param({"terminating": True}, True, id="on its way out"),
    ],
)
def test_container_that_ended_while_no_operator_looked(
    ends: dict[str, int] | None, fails_by_rule: bool, how: dict[str, Any], unseen: bool
) -> None:
    judged = {} if ends is None else {"restarts": {"judged": {"generation": 0, "failed": {}, "ends": ends}}}
    builder = ruled(rule("Fail", reasons=["OOMKilled"]), status={**TRAINING, **judged})
    pod = replace(OOM_POD, **how)
    got = plan(builder, memory=JobMemory(), pods=(pod, make_pod(1)))
    assert (got.written["phase"] == "Failed") == (fails_by_rule and not unseen)
    assert got.written["restarts"]["processes"] == int(fails_by_rule and not unseen)
    assert got.written["restarts"]["judged"]["ends"] == {"digits-worker-0-0": 1}
    again = plan(
        ruled(rule("Restart", reasons=["OOMKilled"]), status=got.written), memory=got.memory, pods=(pod, make_pod(1))
    )
    no_rules = plan(job({**TRAINING, **judged}), memory=JobMemory(), pods=(pod, make_pod(1)))
    assert not no_rules.written.get("restarts", {}).get("processes"), "without rules what is not seen does not count"
    assert again.written["restarts"]["processes"] == got.written["restarts"]["processes"], "judged once"


@pytest.mark.parametrize("memory", [None, JobMemory()], ids=["the same operator", "the next one"])
def test_rule_that_is_written_later_applies_to_later_failures(memory: JobMemory | None) -> None:
    before = plan(ruled(), sessions=(exited(0, 2), trains(1)))
    sessions = (exited(0, 2), trains(1)) if memory is None else (trains(0), trains(1))
    edited = plan(ruled(codes("Fail", 2), status=before.written), memory=memory or before.memory, sessions=sessions)
    assert edited.written["phase"] != "Failed"
    later = plan(
        ruled(codes("Fail", 2), status=edited.written), memory=edited.memory,
        sessions=(exited(0, 2, 100.5, count=2, incarnation=2), trains(1)),
    )  # fmt: skip
    assert condition(later, "Failed")["reason"] == "ExitRule"
    gone = plan(ruled(status=edited.written), memory=edited.memory, sessions=sessions)
    assert "judged" not in gone.written["restarts"]


@pytest.mark.parametrize(
    ("action", "counted", "has_failed"),
    [("Fail", 1, True), ("Restart", 1, False), ("Ignore", 0, False), (None, 0, False)],
)
@pytest.mark.parametrize("drains", [True, False], ids=["asked to leave", "over"])
def test_eviction_counts_only_by_a_rule(action: str | None, counted: int, has_failed: bool, drains: bool) -> None:
    rules = () if action is None else (rule(action, reasons=["Evicted"]),)
    over: dict[str, Any] = {"terminating": True} if drains else {"phase": "Failed", "last_exit_code": 1}
    pods = (make_pod(0, disruption="EvictionByEvictionAPI", **over), make_pod(1))
    got = plan(ruled(*rules), pods=pods)
    restarts = got.written.get("restarts", {})
    assert (len(restarts.get("recent", ())), restarts.get("processes", 0)) == (counted, 0)
    assert (got.written["phase"] == "Failed") == has_failed
    again = plan(ruled(*rules, status=got.written), memory=got.memory, pods=pods)
    assert len(again.written.get("restarts", {}).get("recent", ())) == counted, "counted once"


@pytest.mark.parametrize(
    ("ends", "counted"), [({}, 1), ({"digits-worker-0-0": 1}, 0), (None, 0)], ids=["new", "judged", "no rules then"]
)
def test_eviction_while_no_operator_looked(ends: dict[str, int] | None, counted: int) -> None:
    judged = {} if ends is None else {"restarts": {"judged": {"generation": 0, "failed": {}, "ends": ends}}}
    pods = (make_pod(0, disruption="EvictionByEvictionAPI", terminating=True), make_pod(1))
    builder = ruled(rule("Restart", reasons=["Evicted"]), status={**TRAINING, **judged})
    assert len(plan(builder, memory=JobMemory(), pods=pods).written["restarts"].get("recent", ())) == counted


def test_eviction_of_a_pod_that_was_let_go_counts_nothing() -> None:
    pods = (make_pod(0), make_pod(1), make_pod(2, disruption="EvictionByEvictionAPI", terminating=True))
    builder = ruled(rule("Fail", reasons=["Evicted"]), status={**TRAINING, "released": [uid_of(2)]})
    assert plan(builder, pods=pods).written["phase"] != "Failed"


def test_process_that_hung_is_judged_by_no_rule() -> None:
    hung = ProcessExit(99.0, 1, 0, -9, "", 1, hung="No step for 300 s.")
    sessions = (trains(0, exits=(hung,), num_exits=1), trains(1))
    got = plan(ruled(rule("Fail", signals=["SIGKILL"]), codes("Ignore", 137)), sessions=sessions)
    assert (got.written["phase"] != "Failed", got.written["restarts"]["processes"]) == (True, 1)


def test_counted_evictions_are_no_crash_of_the_script() -> None:
    memory, status = None, TRAINING
    for attempt in range(4):
        at_s = 100.0 + 10 * attempt
        pods = (make_pod(0), make_pod(1, attempt, disruption="PreemptionByScheduler", terminating=True))
        got = plan(
            ruled(rule("Restart", reasons=["Preempted"]), status=status), memory=memory, pods=pods, sessions=(trains(0),),
            clock=Clock(at_s, WALL + at_s),
        )  # fmt: skip
        memory, status = got.memory, got.written
    assert (got.written["phase"] != "Failed", len(got.written["restarts"]["recent"])) == (True, 4)
    assert memory is not None
    assert (memory.crash, memory.slots) == (None, {}), "what counts is bounded by maxRestarts, and not held back"


@pytest.mark.parametrize("rules", [(rule("Ignore", reasons=["Preempted"]),), ()], ids=["ignored", "without a rule"])
def test_pod_that_is_preempted_again_and_again_comes_back_later_each_time(rules: tuple[ExitRule, ...]) -> None:
    memory, status, due = None, TRAINING, []
    for attempt in range(3):
        ended = make_pod(
            1, attempt, phase="Failed", status_reason="Preempting", last_exit_code=143, running_since_s=None
        )
        got = plan(ruled(*rules, status=status), memory=memory, pods=(make_pod(0), ended), sessions=(trains(0),))
        memory, status = got.memory, got.written
        due.append(bool(got.create))
    assert due == [True, False, False]
    assert memory is not None
    assert memory.slots[1].disrupted == PodRow(3, 2, 100.0, "Preempted")
    ready = condition(got, "PodsReady")
    assert (ready["status"], ready["reason"]) == ("False", "Disrupted")
    assert (
        "3 pods of worker 1 in a row were evicted or preempted soon after they started; the next one"
        in ready["message"]
    )


def test_pod_that_cannot_start_fails_the_job_by_a_rule_only() -> None:
    stuck = make_pod(1, **PENDING, waiting_reason="ImagePullBackOff", waiting_message="Back-off pulling image.")
    pods, sessions = (make_pod(0), stuck), (trains(0),)
    waits = plan(ruled(rule("Fail", reasons=["Unschedulable"])), pods=pods, sessions=sessions)
    assert (waits.written["phase"] != "Failed", condition(waits, "PodsReady")["reason"]) == (True, "ImagePullBackOff")
    edited = plan(
        ruled(rule("Fail", reasons=["ImagePullBackOff"]), status=waits.written),
        memory=waits.memory,
        pods=pods,
        sessions=sessions,
    )
    assert condition(edited, "Failed")["message"] == (
        "Worker 1 (pod digits-worker-1-0) cannot start (ImagePullBackOff: Back-off pulling image); spec.recovery.onExit[0] "
        "(Fail, reasons ImagePullBackOff) fails the job."
    )
    scaled = plan(ruled(rule("Fail", reasons=["ImagePullBackOff"])).with_replicas(1), pods=pods, sessions=sessions)
    assert scaled.written["phase"] != "Failed", "its slot is not wanted"
    spared = plan(ruled(rule("Fail", reasons=["ImagePullBackOff"]), spares=1), pods=pods, sessions=sessions)
    assert spared.written["phase"] != "Failed", "a spare makes up for it"
    let_go = ruled(rule("Fail", reasons=["ImagePullBackOff"]), status={**TRAINING, "released": [uid_of(1)]})
    assert plan(let_go, pods=pods, sessions=sessions).written["phase"] != "Failed"


def test_incident_names_the_rule() -> None:
    died = exited(1, -15)
    died = replace(died, condition=replace(died.condition, phase=Phase.READY, incarnation=2))
    got = plan(ruled(rule("Ignore", signals=["SIGTERM"])), sessions=(trains(0), died))
    assert got.written["membership"]["generation"] == 2
    assert got.written["incidents"][-1]["rule"] == "spec.recovery.onExit[0] (Ignore, signals SIGTERM)"
    second = {**TRAINING, "membership": {**MEMBERSHIP, "generation": 2}}
    other = replace(trains(0), condition=replace(trains(0).condition, generation=2, entered=2, heard=2, adopted=2))
    silent = replace(trains(1), connected=False, closed_at_s=50.0)
    judged = {
        "generation": 1,
        "failed": {"1": 1},
        "ends": {},
        "rule": "spec.recovery.onExit[0] (Ignore, signals SIGTERM)",
    }
    later = plan(
        ruled(rule("Ignore", signals=["SIGTERM"]), status={**second, "restarts": {"judged": judged}}),
        sessions=(other, silent),
    )
    assert later.written["incidents"][-1]["cause"] == "Disconnected"
    assert "rule" not in later.written["incidents"][-1], "that was in the generation before"
    judged_now = {"restarts": {"judged": judged}}
    joiner = make_session(2, Phase.READY, session=True)
    grown = plan(
        ruled(rule("Ignore", signals=["SIGTERM"]), status={**TRAINING, **judged_now}).with_replicas(3),
        pods=(make_pod(0), make_pod(1), make_pod(2)), sessions=(trains(0), trains(1), joiner),
    )  # fmt: skip
    assert grown.written["incidents"][-1]["cause"] == "Resized"
    assert "rule" not in grown.written["incidents"][-1], "nothing failed that it is for"
    plain = plan(ruled(codes("Fail", 2)), sessions=(trains(0), died))
    assert "rule" not in plain.written["incidents"][-1]


def test_incident_names_the_rule_of_an_exit_that_is_told_after_its_generation_has_ended() -> None:
    rules = ruled(rule("Ignore", signals=["SIGKILL"]))
    first = plan(rules, sessions=(trains(0), trains(1)))
    died = exited(1, -9)
    left = replace(died, exits=(), num_exits=0, last_exits={}, fault=None)
    left = replace(left, condition=replace(died.condition, phase=Phase.READY, incarnation=2))
    issued = plan(
        ruled(rule("Ignore", signals=["SIGKILL"]), status=first.written),
        memory=first.memory,
        sessions=(trains(0), left),
    )
    assert issued.written["membership"]["generation"] == 2
    assert "rule" not in issued.written["incidents"][-1], "nobody knows yet how it ended"
    told = replace(left, exits=died.exits, num_exits=1, last_exits=died.last_exits)
    later = plan(
        ruled(rule("Ignore", signals=["SIGKILL"]), status=issued.written),
        memory=issued.memory,
        sessions=(trains(0), told),
    )
    assert later.written["restarts"]["ignored"] == 1
    assert later.written["incidents"][-1]["generation"] == 2
    assert later.written["incidents"][-1]["rule"] == "spec.recovery.onExit[0] (Ignore, signals SIGKILL)"


# --- a member that fails after others have finished ------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["Session", "Script"])
@pytest.mark.parametrize("memory", [None, JobMemory()], ids=["the same operator", "the next one"])
def test_member_that_fails_after_success_elsewhere_is_no_success(tier: str, memory: JobMemory | None) -> None:
    status = {**TRAINING, "tier": tier, "membership": MEMBERSHIP}
    finished = trains(0, session=tier == "Session")
    finished = replace(finished, condition=replace(finished.condition, phase=Phase.FINISHED))
    for code in (1, -9):
        failed = exited(1, code)
        failed = replace(failed, condition=replace(failed.condition, phase=Phase.STARTING, generation=0, incarnation=2))
        got = plan(ruled(codes("Fail", 99), status=status), memory=memory, sessions=(finished, failed))
        assert got.written["phase"] not in ("Succeeded", "Failed")
        assert not condition(got, "Complete")
        if memory is None:
            by_rule = plan(ruled(codes("Fail", 1, 137), status=status), sessions=(finished, failed))
            assert condition(by_rule, "Failed")["reason"] == "ExitRule"


def test_pod_that_failed_after_it_had_finished_is_no_success() -> None:
    done = tuple(replace(one, condition=replace(one.condition, phase=Phase.DONE)) for one in (trains(0), trains(1)))
    assert plan(sessions=done).written["phase"] == "Succeeded"
    lost = make_pod(1, phase="Failed", last_exit_code=1)
    got = plan(pods=(make_pod(0), lost), sessions=(done[0], replace(done[1], connected=False, closed_at_s=99.0)))
    assert got.written["phase"] != "Succeeded"
    assert uid_of(0) not in got.written.get("released", ())
