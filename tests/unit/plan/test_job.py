"""The composition: what is counted, written, told and remembered by one plan of a whole job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.document import Document, Member, Store
from regroup.protocol.state import Phase
from regroup.protocol.wire import (
    Adopted,
    Draining,
    Fault,
    Generation,
    Ping,
    ProgressRequest,
    Prune,
    Restart,
    Stop,
    Welcome,
)
from regroup_operator.api.job import TEMPLATE_CHANGED, template_digest, worker_digest
from regroup_operator.model.plan import (
    Clock,
    Issued,
    JobMemory,
    JobPlan,
    SlotMemory,
    Spell,
    Urgency,
    Verdict,
    WorkerMemory,
)
from regroup_operator.model.pod_row import PodRow
from regroup_operator.model.records import AgentSession, Observation, Pod, ProcessExit, Settings
from regroup_operator.plan.facts.facts import Inputs
from regroup_operator.plan.facts.stalls import FIRST_STALL_S, SCRIPT_ASK_EVERY_S
from regroup_operator.plan.failures.restarts import KUBECTL_LOGS
from regroup_operator.plan.job import plan_job
from tests.builders.jobs import role
from tests.builders.plan import JobBuilder, counted, make_job, make_pod, make_progress, make_session, remembered, uid_of

CLOCK = Clock(100.0, 1_800_000_000.0)
SETTINGS = Settings()
MEMBERSHIP: dict[str, Any] = {
    "generation": 1, "uid": "g1", "kind": "forced", "digest": "d", "startStep": 0, "adopted": True, "worldSize": 2,
    "members": "0-1", "store": {"host": "10.0.0.0", "port": 4000, "slot": 0}, "older": [], "lost": [],
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "startTime": "2027-01-15T08:00:00Z", "tier": "Session", "membership": MEMBERSHIP,
    "lineage": [{"generation": 1, "startStep": 0}],
}  # fmt: skip


def job(status: dict[str, Any] | None = TRAINING) -> JobBuilder:
    builder = make_job().with_replicas(2).elastic(1, 4)
    return builder.with_status(status) if status else builder


def plan(
    builder: JobBuilder | None = None,
    *,
    pods: tuple[Pod, ...] | None = None,
    sessions: tuple[AgentSession, ...] | None = None,
    memory: JobMemory | None = None,
    clock: Clock = CLOCK,
    term_started_s: float = 0.0,
    refusal: Verdict | None = None,
) -> JobPlan:
    """Plan a job of two workers that trains, unless said otherwise."""
    pods = (make_pod(0), make_pod(1)) if pods is None else pods
    sessions = (trains(0), trains(1)) if sessions is None else sessions
    seen = remembered()
    observation = Observation(pods, {s.pod_uid: s for s in sessions}, term_started_s)
    return plan_job(
        Inputs(
            (builder or job()).build(), observation, memory or seen, clock, SETTINGS, fresh_uid="fresh",
            endpoint="regroup.ns.svc:8443", agent_image="agent:1", logs=KUBECTL_LOGS, refusal=refusal,
        )
    )  # fmt: skip


def trains(slot: int, **changes: Any) -> AgentSession:
    told: dict[str, Any] = {"told_tier": "Session", "told_generation": 1, "condition_at_s": 0.0}
    return make_session(slot, Phase.TRAINING, 1, **told | changes)


def exits(slot: int, count: int, **changes: Any) -> AgentSession:
    return trains(
        slot, num_exits=count, exits=tuple(ProcessExit(90.0 + i, 1, 0, 1, "boom") for i in range(count)), **changes
    )


def told(got: JobPlan, kind: type) -> list[str]:
    return [t.pod_uid for t in got.tell if isinstance(t.body, kind)]


def test_steady_job_is_planned_to_the_same_status() -> None:
    first = plan()
    again = plan(job(first.written), memory=first.memory, clock=Clock(109.0, 1_800_000_009.0))
    assert again.written == first.written
    assert [t for t in again.tell if not isinstance(t.body, Ping)] == []  # nothing was ever committed: they are asked
    assert (again.urgency, again.create, again.delete, again.notes) == (Urgency.LATER, (), (), ())


def test_what_a_newer_operator_has_written_stays_where_the_plan_does_not_replace_it() -> None:
    sessions = (trains(0, progress=make_progress(7), progress_generation=1, progress_at_s=99.0), trains(1))
    known = TRAINING | {"later": True, "membership": MEMBERSHIP | {"later": 1}, "progress": {"step": 6, "later": 2}}
    got = plan(job(known), sessions=sessions).written
    assert (got["later"], got["membership"]["later"], "later" in got["progress"]) == (True, 1, False)


def test_agents_are_asked_when_no_first_step_comes() -> None:
    """Nobody knows how long a step takes: a frozen agent behind an open stream would hold the job for ever."""
    young = job(TRAINING)
    assert told(plan(young, clock=Clock(FIRST_STALL_S - 1, 1_800_000_000.0)), Ping) == []
    assert told(plan(young, clock=Clock(FIRST_STALL_S, 1_800_000_000.0)), Ping) == [uid_of(0), uid_of(1)]


@pytest.mark.parametrize(
    ("heard_s", "unanswered_s", "asked"),
    [
        pytest.param(SCRIPT_ASK_EVERY_S - 1, None, False, id="they have said something a moment ago"),
        pytest.param(SCRIPT_ASK_EVERY_S, None, True, id="they have said nothing for a while"),
        pytest.param(100.0, 5.0, False, id="they are asked already, and their nodes are busy"),
    ],
)
def test_agents_of_a_script_are_asked_from_time_to_time(
    heard_s: float, unanswered_s: float | None, asked: bool
) -> None:
    """No step tells that they are there: one that hangs behind an open stream is found by this alone (walk 18508)."""
    now_s = 1000.0
    since_s = None if unanswered_s is None else now_s - unanswered_s
    script = tuple(
        trains(slot, session=False, heard_at_s=now_s - heard_s, unanswered_since_s=since_s) for slot in (0, 1)
    )
    got = plan(job({**TRAINING, "tier": "Script"}), sessions=script, clock=Clock(now_s, 1_800_000_000.0))
    assert told(got, Ping) == ([uid_of(0), uid_of(1)] if asked else [])


@pytest.mark.parametrize("rows", ["failed", "disrupted"])
def test_number_of_a_pod_that_counts_is_not_used_again_once_it_is_gone(rows: str) -> None:
    counted: dict[str, Any] = {rows: PodRow(1, 3, 99.0)}
    memory = remembered(slots={0: SlotMemory(**counted)})
    got = plan(pods=(make_pod(0, terminating=True), make_pod(1)), memory=memory)
    assert got.create == ((0, 4, ()),)


def test_rows_of_failed_pods_are_forgotten_once_the_job_is_to_be_suspended() -> None:
    row = PodRow(7, 3, 99.0)
    memory = remembered(slots={0: SlotMemory(failed=row), 1: SlotMemory(disrupted=row)})
    got = plan(memory=memory)
    assert got.memory.slots == memory.slots
    got = plan(job().with_spec(runPolicy={"suspend": True}), memory=memory)
    assert got.memory.slots == {}


def test_slot_is_not_held_back_once_its_template_is_corrected() -> None:
    row = PodRow(7, 3, 99.0)
    memory = remembered(slots={0: SlotMemory(failed=row), 1: SlotMemory(disrupted=row)})
    pods = tuple(
        make_pod(s, 3, phase="Failed", running_since_s=None, spec_digest="old", last_exit_code=None) for s in (0, 1)
    )
    got = plan(job(None), pods=pods, sessions=(), memory=memory)
    assert [(slot, attempt) for slot, attempt, _ in got.create] == [(0, 4), (1, 4)]


def test_progress_alone_is_not_urgent() -> None:
    first = plan()
    moving = (trains(0, progress=make_progress(7, loss=0.5), progress_generation=1, progress_at_s=99.0), trains(1))
    got = plan(job(first.written), sessions=moving, memory=first.memory)
    assert got.written["progress"] == {"step": 7, "loss": 0.5, "at": "2027-01-15T07:59:59Z", "curve": ["7 0 0.5"]}
    assert (got.written != first.written, got.urgency) == (True, Urgency.LATER)
    later = plan(job(got.written), sessions=moving, memory=got.memory, clock=Clock(107.0, 1_800_000_009.0))
    assert later.written == got.written  # the clocks drifted by two seconds; nothing has happened


# --- counting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others_s", "restarted"),
    [
        pytest.param(0.25, True, id="its agent was stopped for six minutes between two reports"),
        pytest.param(30.0, False, id="it may be in the middle of a long step"),
    ],
)
def test_late_worker_has_its_time_by_the_steps_that_most_report(others_s: float, restarted: bool) -> None:
    second = {**MEMBERSHIP, "generation": 2, "members": "1", "worldSize": 1, "adopted": False, "startStep": None}
    late = trains(0, progress=make_progress(9), progress_generation=1, step_s=360.0)
    memory = remembered({uid_of(0): WorkerMemory(spell=Spell("behind", 0.0))})
    holder = make_session(
        1, Phase.TRAINING, 2, told_tier="Session", told_generation=2, condition_at_s=0.0, step_s=others_s
    )
    holder = replace(holder, condition=replace(holder.condition, adopted=2, step=9))
    status = {**TRAINING, "membership": second}
    got = plan(job(status), sessions=(late, holder), memory=memory)
    assert told(got, Restart) == ([uid_of(0)] if restarted else [])


@pytest.mark.parametrize(
    ("reported", "restarted"),
    [
        pytest.param({"longest_s": 600.0}, False, id="its first step took ten minutes, and the second may"),
        pytest.param({"step_s": 70.0, "longest_s": 90.0}, False, id="a new operator has heard one report"),
        pytest.param({"step_s": 0.5, "longest_s": 90.0}, True, id="its steps are short, whatever its longest was"),
        pytest.param({}, True, id="nothing is known"),
    ],
)
def test_late_worker_has_its_time_by_what_processes_measured_before_the_second_report(
    reported: dict[str, Any], restarted: bool
) -> None:
    second = {**MEMBERSHIP, "generation": 2, "members": "1", "worldSize": 1, "adopted": False, "startStep": None}
    late = trains(0, progress=replace(make_progress(9), **reported), progress_generation=1)
    memory = remembered({uid_of(0): WorkerMemory(spell=Spell("behind", 0.0))})
    holder = make_session(1, Phase.TRAINING, 2, told_tier="Session", told_generation=2, condition_at_s=0.0)
    holder = replace(holder, condition=replace(holder.condition, adopted=2, step=9))
    got = plan(job({**TRAINING, "membership": second}), sessions=(late, holder), memory=memory)
    assert told(got, Restart) == ([uid_of(0)] if restarted else [])


@pytest.mark.parametrize(
    ("session", "pod", "memory", "count"),
    [
        pytest.param(exits(0, 1), make_pod(0), remembered(), 1, id="an exit"),
        pytest.param(exits(0, 3), make_pod(0), JobMemory(counted(exits=1)), 2, id="those that were counted are not again"),
        pytest.param(exits(0, 2), make_pod(0), JobMemory(counted(exits=2)), 0, id="nothing new"),
        pytest.param(
            trains(0), make_pod(0, container_restarts=2, last_exit_code=137), JobMemory(), 0,
            id="container restarts of before this operator were counted by the one before",
        ),
        pytest.param(
            trains(0), make_pod(0, container_restarts=2, last_exit_code=137),
            remembered(counted(container_restarts=1)), 1, id="a container that failed",
        ),
        pytest.param(
            trains(0), make_pod(0, container_restarts=1, last_exit_code=0), remembered(), 0,
            id="a container that ended well",
        ),
        pytest.param(
            trains(0), make_pod(0, container_restarts=1, last_exit_code=143, terminating=True), remembered(), 0,
            id="a deletion is no failure",
        ),
        pytest.param(
            trains(0, draining=Draining(20.0)), make_pod(0, container_restarts=1, last_exit_code=143),
            remembered(), 0, id="a drain is none",
        ),
        pytest.param(
            trains(0), make_pod(0, phase="Failed", last_exit_code=2), remembered(), 1,
            id="a pod that ended by itself with an error",
        ),
        pytest.param(
            trains(0), make_pod(0, phase="Failed", last_exit_code=137), remembered(), 0,
            id="a pod that was evicted is none",
        ),
        pytest.param(
            trains(0), make_pod(0, phase="Failed", last_exit_code=2), remembered(counted(has_ended=True)), 0,
            id="a failed pod counts once",
        ),
    ],
)  # fmt: skip
def test_what_counts_as_a_failure(session: AgentSession, pod: Pod, memory: JobMemory, count: int) -> None:
    got = plan(pods=(pod, make_pod(1)), sessions=(session, trains(1)), memory=memory)
    assert got.written.get("restarts", {}).get("processes", 0) == count
    again = plan(job(got.written), pods=(pod, make_pod(1)), sessions=(session, trains(1)), memory=got.memory)
    assert again.written.get("restarts", {}).get("processes", 0) == count


SHA = "5f0c" * 16


@pytest.mark.parametrize(
    ("known", "said", "pinned"),
    [
        pytest.param(None, SHA, SHA, id="the first generation has read it"),
        pytest.param("0" * 64, SHA, "0" * 64, id="what the first one has read stays"),
        pytest.param(None, None, None, id="it has begun with something else"),
        pytest.param(None, "x" * 64, None, id="what is no digest is not written"),
        pytest.param(None, SHA + "0", None, id="nor what is longer than one"),
    ],
)
def test_checkpoint_that_the_job_begins_with_is_written_at_once_and_read_by_every_later_generation(
    known: str | None, said: str | None, pinned: str | None
) -> None:
    path = "/regroup/checkpoint/step-83.g1-c83a5257"
    resumes = make_job().with_replicas(2).elastic(1, 4)
    resumes = resumes.with_spec(checkpoint={"volumeClaim": "ckpt", "resumeFrom": "step-83.g1-c83a5257"})
    status = {**TRAINING, "membership": {**MEMBERSHIP, "adopted": False}, "lineage": []}
    del status["membership"]["startStep"]
    if known is not None:
        status["resumedFrom"] = {"path": path, "step": 83, "digest": known}
    adopted = Adopted(83, "disk", imported=said)
    begun = tuple(trains(slot, adopted=adopted, adopted_generation=1) for slot in (0, 1))
    got = plan(resumes.with_status(status), sessions=begun)
    want = None if pinned is None else {"path": path, "step": 83, "digest": pinned}
    assert (got.written.get("resumedFrom"), got.written["membership"]["startStep"]) == (want, 83)
    assert got.urgency == Urgency.NOW

    fresh = tuple(make_session(slot, attempt=1) for slot in (0, 1))
    later = plan(
        resumes.with_status(got.written), pods=(make_pod(0, 1), make_pod(1, 1)), sessions=fresh, memory=got.memory
    )
    assert later.memory.issued.document is not None
    assert (later.memory.issued.document.number, later.memory.issued.document.imported) == (2, pinned)


TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: boom'


def test_crash_that_repeats_fails_the_job_with_its_traceback_and_keeps_the_reason() -> None:
    ended = tuple(ProcessExit(80.0 + i, 1, 0, 1, "ValueError: boom", 1, tail=TRACEBACK) for i in (0, 10, 19))
    twice = plan(sessions=(trains(0, num_exits=2, exits=ended[:2]), trains(1)))
    degraded = next(c for c in twice.written["conditions"] if c["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"], "ValueError: boom" in degraded["message"]) == (
        "True",
        "Crashing",
        True,
    )
    got = plan(sessions=(trains(0, num_exits=3, exits=ended), trains(1)))
    failed = next(c for c in got.written["conditions"] if c["type"] == "Failed")
    assert (got.written["phase"], failed["reason"]) == ("Failed", "RepeatedCrash")
    assert got.written["failedPod"] == "digits-worker-0-0"
    assert failed["message"].startswith(
        "Worker 0 (pod digits-worker-0-0) ended with exit code 1, 3 times in 19 s at the same"
    )
    assert failed["message"].endswith("ValueError: boom\nkubectl logs --namespace=default digits-worker-0-0")
    again = plan(job(got.written), sessions=(), memory=got.memory)
    assert next(c for c in again.written["conditions"] if c["type"] == "Failed") == failed


@pytest.mark.parametrize("rules", [[], [{"action": "Ignore", "exitCodes": {"operator": "In", "values": [1]}}]])
def test_process_that_can_never_run_fails_the_job_at_once_whatever_the_rules_say(rules: list[dict[str, Any]]) -> None:
    ended = ProcessExit(
        99.0, 1, 0, 1, "UsageError: torch ...", 1, reason="CannotRun", detail="torch 2.10.1 is too old."
    )
    rejecting = job().with_spec(recovery={"onExit": rules})
    got = plan(rejecting, sessions=(trains(0, num_exits=1, exits=(ended,)), trains(1)))
    failed = next(c for c in got.written["conditions"] if c["type"] == "Failed")
    assert (got.written["phase"], failed["reason"]) == ("Failed", "CannotRun")
    assert failed["message"] == ("torch 2.10.1 is too old. kubectl logs --namespace=default digits-worker-0-0")
    assert got.written["failedPod"] == "digits-worker-0-0"


def test_step_that_is_committed_after_a_crash_lets_it_pass() -> None:
    ended = tuple(ProcessExit(70.0 + i, 1, 0, 1, "ValueError: boom", 1, tail=TRACEBACK) for i in (0, 10, 19))
    steps = trains(1, progress=make_progress(7), progress_generation=1, progress_at_s=95.0, progress_told_s=95.0)
    got = plan(sessions=(trains(0, num_exits=3, exits=ended), steps))
    assert [c for c in got.written["conditions"] if c["reason"] in ("RepeatedCrash", "Crashing")] == []


def test_process_that_is_killed_for_its_memory_is_the_incidents_cause_and_said_until_it_is_back() -> None:
    detail = "limit 1 GiB, at most 1 GiB used"
    fault = Fault("exit", exit_code=-9, reason="OOMKilled", detail=detail)
    ended = ProcessExit(99.9, 1, 0, -9, generation=1, reason="OOMKilled", detail=detail)
    died = make_session(
        1, Phase.STARTING, entered=1, fault=fault, fault_generation=1, fault_at_s=99.9, exits=(ended,), num_exits=1
    )
    got = plan(sessions=(trains(0), died))
    incident = got.written["incidents"][-1]
    says = f"worker 1 lost a process (OOMKilled: {detail}); 1 worker goes on."
    assert (incident["cause"], incident["culprit"], incident["decision"]) == ("OOMKilled", "1", says)
    assert [n.note for n in got.notes if n.reason == "MemberLost"] == [f"Generation 2: {says}"]
    membership = got.written["membership"] | {"adopted": True}
    starts = make_session(1, Phase.STARTING, incarnation=2, entered=1)
    alone = make_session(0, Phase.TRAINING, 2, condition_at_s=99.0)
    after = plan(job(got.written | {"membership": membership}), sessions=(alone, starts))
    degraded = next(c for c in after.written["conditions"] if c["type"] == "Degraded")
    assert (degraded["reason"], degraded["message"]) == ("OOMKilled", f"1 of 2 workers train. Generation 2: {says}")


@pytest.mark.parametrize("changed", [False, True])
def test_no_pod_is_made_from_a_template_that_is_not_the_one_of_the_start(changed: bool) -> None:
    first = plan(job().with_spec(roles=[role()]))
    assert first.written["templateDigest"] == template_digest(job().with_spec(roles=[role()]).manifest())
    status = {**first.written, "templateDigest": "of another"} if changed else first.written
    refusal = Verdict("InvalidSpec", TEMPLATE_CHANGED) if changed else None
    got = plan(job(status).with_spec(roles=[role()]), pods=(make_pod(0),), memory=first.memory, refusal=refusal)
    assert ([slot for slot, _, _ in got.create], len(got.create_roles)) == (([], 0) if changed else ([1], 1))
    assert got.written["templateDigest"] == status["templateDigest"]
    said = {c["type"]: c["message"] for c in got.written["conditions"] if c["status"] == "False"}
    assert ("Accepted" in said) == changed
    assert ("none is made from a template that is not the one of the start" in said["PodsReady"]) == changed


def test_whole_group_is_tried_at_once_where_a_member_cannot_be_reached() -> None:
    """Its slot has a pod that is waited for: another one of its position comes to complete a group."""
    membership = MEMBERSHIP | {"adopted": True}
    builder = job(TRAINING | {"membership": membership})
    builder = builder.with_spec(replicas=4, workersPerGroup=2, elasticPolicy={"minReplicas": 2, "maxReplicas": 4})
    sessions = (trains(0, connected=False, closed_at_s=50.0, heard_at_s=50.0), trains(1))
    got = plan(builder, pods=(make_pod(0), make_pod(1)), sessions=sessions)
    assert [slot for slot, _, _ in got.create] == [2], "one that completes a group; the other one, once it has a node"


def test_failures_of_a_template_that_was_corrected_before_the_start_count_no_more() -> None:
    """The last pod of the former one stays for its log."""
    digest = worker_digest(job(None).build())
    given: dict[str, Any] = {"phase": "Failed", "running_since_s": None}
    pods = (make_pod(0, 1, spec_digest="of before", **given), make_pod(0, 2, spec_digest=digest, **given), make_pod(1))
    got = plan(job(None), pods=pods, sessions=())
    assert {slot: row.failed for slot, row in got.memory.slots.items() if row.failed} == {0: PodRow(1, 2, CLOCK.now_s)}
    assert [made[:2] for made in got.create] == [(0, 3)], "the first failure is made good at once"


def test_replaced_pod_counts_once_however_often_it_is_asked_for() -> None:
    """The informer is late: the second plan asks for the same pod again."""
    status = TRAINING | {"membership": MEMBERSHIP | {"adopted": True}}
    got = plan(job(status), pods=(make_pod(0),), sessions=(trains(0),))
    assert got.create == ((1, 1, ()),)
    assert (got.written["restarts"]["pods"], got.written["restarts"]["total"]) == (1, 1)
    again = plan(job(got.written), pods=(make_pod(0),), sessions=(trains(0),), memory=got.memory)
    assert again.create == ((1, 1, ()),)
    assert again.written["restarts"]["pods"] == 1


def test_slot_that_fails_twice_on_a_node_avoids_it() -> None:
    ended: dict[str, Any] = {"phase": "Failed", "node": "bad", "last_exit_code": 137}
    first = plan(pods=(make_pod(0), make_pod(1, **ended)), sessions=(trains(0),))
    assert first.create == ((1, 1, ()),)
    second = plan(
        job(first.written),
        pods=(make_pod(0), make_pod(1, **ended), make_pod(1, 1, **ended)),
        sessions=(trains(0),),
        memory=first.memory,
    )
    assert second.create == ((1, 2, ("bad",)),)


# --- drains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        pytest.param({}, "from step 0, because the job writes no checkpoints.", id="nothing is saved"),
        pytest.param(
            {"checkpoint": {"volumeClaim": "ckpt"}}, "from the checkpoint that is written at its end.", id="saved"
        ),
    ],
)
def test_member_that_leaves_and_is_needed_is_said_replaced_and_counted_nowhere(spec: dict[str, Any], says: str) -> None:
    alone = TRAINING | {"membership": MEMBERSHIP | {"members": "0", "worldSize": 1}}
    builder = make_job().with_replicas(1).elastic(1, 4).with_status(alone).with_spec(**spec)
    got = plan(builder, pods=(make_pod(0),), sessions=(trains(0, draining=Draining(20.0)),))
    degraded = next(c for c in got.written["conditions"] if c["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "Leaving")
    assert degraded["message"].endswith(says)
    assert (got.create, got.written.get("restarts", {}).get("pods", 0)) == (((0, 1, ()),), 0)


@pytest.mark.parametrize(
    ("session", "counted"),
    [
        pytest.param(trains(1, draining=Draining(20.0)), 0, id="it hands over"),
        pytest.param(
            trains(1, draining=Draining(20.0), connected=False, closed_at_s=50.0), 1, id="it was cut off: lost"
        ),
    ],
)
def test_pod_that_is_replaced_because_it_leaves(session: AgentSession, counted: int) -> None:
    got = plan(sessions=(trains(0), session))
    assert got.create == ((1, 1, ()),)
    assert got.written.get("restarts", {}).get("pods", 0) == counted


def test_pod_that_does_not_leave_and_is_replaced_counts() -> None:
    """Its node is not ready, and its agent cannot be reached."""
    got = plan(
        pods=(make_pod(0), make_pod(1, node_ready=False)),
        sessions=(trains(0), trains(1, connected=False, closed_at_s=50.0)),
    )
    assert (got.create, got.written["restarts"]["pods"]) == (((1, 1, ()),), 1)


# --- released ------------------------------------------------------------------------------------------------------

TWO_OF_THREE = (make_pod(0), make_pod(1), make_pod(2))


def test_release_is_written_told_and_deleted_in_one_plan() -> None:
    got = plan(pods=TWO_OF_THREE, sessions=(trains(0), trains(1), make_session(2)))
    assert got.written["released"] == [uid_of(2)]
    assert told(got, Stop) == [uid_of(2)]
    assert [p.uid for p in got.delete] == [uid_of(2)]
    assert got.urgency == Urgency.NOW


def test_nobody_is_released_by_a_plan_that_issues_a_generation() -> None:
    """The generation that is about to be written is adopted by nobody yet, and may name the very pod."""
    got = plan(pods=(make_pod(0), make_pod(2)), sessions=(trains(0), make_session(2)))
    assert got.announced
    assert got.written["membership"]["members"] == "0,2"
    assert (got.written.get("released", []), got.delete) == ([], ())


@pytest.mark.parametrize(
    ("pods", "released"),
    [
        pytest.param(TWO_OF_THREE, [uid_of(2)], id="kept while the pod is there"),
        pytest.param(TWO_OF_THREE[:2], [], id="forgotten with the pod"),
    ],
)
def test_released_is_pruned(pods: tuple[Pod, ...], released: list[str]) -> None:
    got = plan(job(TRAINING | {"released": [uid_of(2)]}), pods=pods, sessions=(trains(0), trains(1), make_session(2)))
    assert got.written["released"] == released
    assert "2" not in got.written["membership"]["members"].split(",")


# --- adoption, progress, checkpoints -------------------------------------------------------------------------------

FORMING = TRAINING | {
    "membership": {k: v for k, v in MEMBERSHIP.items() if k != "startStep"}
    | {"generation": 2, "uid": "g2", "adopted": False, "older": [{"generation": 1, "uid": "g1", "members": "0-1"}]}
}


def adopted(slot: int, **changes: Any) -> AgentSession:
    return make_session(
        slot,
        Phase.TRAINING,
        2,
        condition_at_s=99.0,
        adopted=Adopted(9, "self"),
        adopted_generation=2,
        told_tier="Session",
        **changes,
    )


def test_first_adoption_writes_start_step_and_lineage_the_last_forgets_the_older() -> None:
    """MAD."""
    first = plan(job(FORMING), sessions=(adopted(0), make_session(1, Phase.ADOPTING, 2, condition_at_s=99.0)))
    assert (first.written["membership"]["startStep"], first.written["membership"]["adopted"]) == (9, False)
    assert first.written["lineage"][-1] == {"generation": 2, "startStep": 9}
    assert len(first.written["membership"]["older"]) == 1
    last = plan(job(first.written), sessions=(adopted(0), adopted(1)), memory=first.memory)
    assert (last.written["membership"]["adopted"], last.written["membership"]["older"]) == (True, [])
    assert len(last.written["lineage"]) == 2


KNOWN: dict[str, Any] = {"generation": 1, "step": 8, "directory": "x", "kept": ["x"]}
CHECKPOINT = {"generation": 1, "step": 8, "directory": "step-8.g1-x"}


def at_step(step: int, generation: int = 1, **changes: Any) -> AgentSession:
    progress = make_progress(step, checkpoint=CHECKPOINT)
    session = make_session(0, Phase.TRAINING, generation, told_tier="Session", told_generation=generation)
    return replace(session, progress=progress, progress_generation=generation, progress_at_s=99.0, **changes)


def test_checkpoint_of_one_worker_counts_where_others_are_as_far() -> None:
    """All stop after the same step, and the one that saves it need not be the last to say so."""
    session = make_session(1, Phase.TRAINING, 1, told_tier="Session", told_generation=1)
    other = replace(session, progress=make_progress(9), progress_generation=1, progress_at_s=99.5)
    builder = job(TRAINING).with_spec(checkpoint={"volumeClaim": "ckpt", "keep": 2})
    got = plan(builder, sessions=(at_step(9), other))
    assert got.written["checkpoint"]["directory"] == "step-8.g1-x"


@pytest.mark.parametrize(
    ("status", "session", "written"),
    [
        pytest.param(TRAINING, at_step(9), True, id="from the newest generation"),
        pytest.param(FORMING, at_step(9, 2), False, id="not before startStep is known (MAD)"),
        pytest.param(FORMING, at_step(9, 1), False, id="not from an older generation (CKPT)"),
        pytest.param(TRAINING | {"checkpoint": KNOWN}, at_step(9), False, id="once"),
        pytest.param(TRAINING | {"checkpoint": KNOWN | {"generation": 2, "step": 3}}, at_step(9), False,
                     id="never an older one: (generation, step)"),
    ],
)  # fmt: skip
def test_checkpoint(status: dict[str, Any], session: AgentSession, written: bool) -> None:
    builder = job(status).with_spec(checkpoint={"volumeClaim": "ckpt", "keep": 2})
    got = plan(builder, sessions=(session, make_session(1, Phase.TRAINING, session.condition.generation)))
    assert (got.written.get("checkpoint", {}).get("directory") == "step-8.g1-x") == written
    assert (told(got, Prune) != []) == written
    assert got.urgency == Urgency.NOW or not written


def test_progress_never_comes_from_an_older_generation() -> None:
    got = plan(job(FORMING), sessions=(at_step(50, 1), make_session(1, Phase.FORMING, 2)))
    assert "progress" not in got.written
    planned = FORMING | {"membership": FORMING["membership"] | {"kind": "planned"}}
    got = plan(job(planned), sessions=(at_step(50, 1), make_session(1, Phase.FORMING, 2)))
    assert got.written["progress"]["step"] == 50  # while a planned one is pending, the one before trains on


def snapshots(status: dict[str, Any] = TRAINING) -> JobBuilder:
    return job(status).with_spec(memorySnapshot={"sizeLimit": "1Gi"})


def keeps(step: int | None, generation: int = 1, problem: str = "", slot: int = 0) -> AgentSession:
    """A member that has committed step 9 and says what the memory snapshots cover."""
    progress = make_progress(9, snapshot_step=step, snapshot_problem=problem)
    session = make_session(slot, Phase.TRAINING, generation, told_tier="Session", told_generation=generation)
    return replace(session, progress=progress, progress_generation=generation, progress_at_s=99.0)


KEPT = {"memorySnapshot": {"step": 5}}
PLANNED = {"membership": FORMING["membership"] | {"kind": "planned"}}


@pytest.mark.parametrize(
    ("builder", "session", "want"),
    [
        pytest.param(snapshots(), keeps(7), {"step": 7}, id="the first"),
        pytest.param(snapshots(TRAINING | KEPT), keeps(7), {"step": 7}, id="a newer one"),
        pytest.param(snapshots(TRAINING | KEPT), keeps(None), None, id="some worker has none: nothing to go back to"),
        pytest.param(snapshots(FORMING | KEPT), keeps(7, 1), {"step": 5}, id="a new generation forms: as it was"),
        pytest.param(snapshots(FORMING | PLANNED | KEPT), keeps(7, 1), {"step": 5}, id="the one before trains on: as it was"),
        pytest.param(snapshots(FORMING | PLANNED | KEPT), keeps(None, 1), {"step": 5}, id="nor is it removed for that one"),
        pytest.param(snapshots(FORMING | KEPT), keeps(7, 2), {"step": 7}, id="the new generation's own"),
        pytest.param(snapshots(FORMING | KEPT), keeps(None, 2), None, id="somebody in it has none yet"),
        pytest.param(job(TRAINING), keeps(7), None, id="the job asks for none"),
    ],
)  # fmt: skip
def test_status_names_the_snapshot_of_the_newest_generation(
    builder: JobBuilder, session: AgentSession, want: dict[str, int] | None
) -> None:
    generation = session.condition.generation
    got = plan(builder, sessions=(session, make_session(1, Phase.TRAINING, generation)))
    assert got.written.get("memorySnapshot") == want


def test_snapshot_that_moves_on_is_not_urgent() -> None:
    other = trains(1)
    first = plan(snapshots(), sessions=(keeps(5), other))
    got = plan(snapshots(first.written), sessions=(keeps(7), other), memory=first.memory)
    assert (got.written["memorySnapshot"], got.urgency) == ({"step": 7}, Urgency.LATER)


def taken(got: JobPlan) -> tuple[str, str] | None:
    known = next((c for c in got.written["conditions"] if c["type"] == "SnapshotsTaken"), None)
    return known and (known["status"], known["reason"])


@pytest.mark.parametrize(
    ("builder", "step", "want"),
    [
        pytest.param(snapshots(), 5, ("True", "Taken"), id="every worker has one"),
        pytest.param(snapshots(), None, ("Unknown", "NoneYet"), id="some worker has none"),
        pytest.param(job(), 5, None, id="the job asks for none"),
    ],
)
def test_condition_says_whether_snapshots_are_taken(
    builder: JobBuilder, step: int | None, want: tuple[str, str] | None
) -> None:
    assert taken(plan(builder, sessions=(keeps(step), trains(1)))) == want


def test_each_sentence_about_snapshots_that_are_not_taken_is_an_event_once() -> None:
    def events(got: JobPlan) -> list[tuple[str, str, str]]:
        return [(n.kind, n.reason, n.note) for n in got.notes]

    first = plan(snapshots(), sessions=(keeps(None, problem="It needs 64 MiB."), trains(1)))
    assert events(first) == [("Warning", "SnapshotNotTaken", "Worker 0: It needs 64 MiB.")]
    same = plan(
        snapshots(first.written), sessions=(keeps(None, problem="It needs 64 MiB."), trains(1)), memory=first.memory
    )
    assert events(same) == []
    other = plan(snapshots(same.written), sessions=(keeps(None, problem="No room."), trains(1)), memory=same.memory)
    assert events(other) == [("Warning", "SnapshotNotTaken", "Worker 0: No room.")]
    well = plan(snapshots(other.written), sessions=(keeps(7), trains(1)), memory=other.memory)
    assert (events(well), taken(well)) == ([], ("True", "Taken"))
    again = plan(snapshots(well.written), sessions=(keeps(7, problem="No room."), trains(1)), memory=well.memory)
    assert [reason for _, reason, _ in events(again)] == ["SnapshotNotTaken"], "it is news again"


def test_each_sentence_about_a_checkpoint_that_is_not_saved_is_an_event_once() -> None:
    saves = {"checkpoint": {"volumeClaim": "ckpt"}}
    session = replace(at_step(9), progress=make_progress(9, checkpoint_problem="The volume is full."))
    first = plan(job().with_spec(**saves), sessions=(session, trains(1)))
    says = "Worker 0: The volume is full. There is no checkpoint."
    assert [(n.kind, n.reason, n.note) for n in first.notes] == [("Warning", "CheckpointNotSaved", says)]
    assert plan(job(first.written).with_spec(**saves), sessions=(session, trains(1)), memory=first.memory).notes == ()


def test_what_was_said_of_snapshots_stays_once_the_job_has_ended() -> None:
    """Its workers go one after the other, and what the last ones say is no news."""
    done = tuple(make_session(slot, Phase.DONE, 1, told_tier="Session", told_generation=1) for slot in (0, 1))
    running = plan(snapshots(), sessions=(keeps(7), trains(1)))
    ended = plan(snapshots(running.written), sessions=done, memory=running.memory)
    assert (ended.written["phase"], taken(ended)) == ("Succeeded", ("True", "Taken"))
    later = plan(snapshots(ended.written), sessions=(keeps(None, problem="No room."), trains(1)), memory=ended.memory)
    assert (taken(later), later.notes) == (("True", "Taken"), ())


# --- commands ------------------------------------------------------------------------------------------------------


def test_generation_is_told_to_all_and_the_document_to_the_stores_host() -> None:
    pods = (make_pod(0), make_pod(1), make_pod(2, node_ready=False))
    sessions = (make_session(0), make_session(1), make_session(2))
    got = plan(job(None), pods=pods, sessions=sessions)
    assert (got.announced, got.written["membership"]["members"]) == (True, "0-1")
    bodies = {t.pod_uid: t.body for t in got.tell if isinstance(t.body, Generation)}
    assert {uid: (b.member, b.group_rank, b.rank_offset) for uid, b in bodies.items()} == {
        uid_of(0): (True, 0, 0), uid_of(1): (True, 1, 1), uid_of(2): (False, 0, 0),
    }  # fmt: skip
    assert [t.pod_uid for t in got.tell if t.body.TYPE == "document"] == [uid_of(1)]
    assert {b.document_digest for b in bodies.values()} == {got.written["membership"]["digest"]}
    assert told(got, Welcome) == [uid_of(0), uid_of(1), uid_of(2)]
    heard = tuple(replace(s, told_generation=1, told_tier="Session") for s in sessions)
    assert plan(job(got.written), pods=pods, sessions=heard, memory=got.memory).tell == ()


def test_reconnected_agent_is_told_the_newest_generation_again() -> None:
    got = plan(job(None), sessions=(make_session(0), make_session(1)))
    again = plan(
        job(got.written),
        sessions=(trains(0), make_session(1, told_tier="Session")),
        memory=got.memory,
    )
    assert told(again, Generation) == [uid_of(1)]


def test_all_who_can_be_reached_are_asked_for_progress_while_one_is_silent() -> None:
    silent = trains(1, connected=False, closed_at_s=99.5)
    got = plan(sessions=(trains(0), silent))
    assert told(got, ProgressRequest) == [uid_of(0)]
    assert got.due_s == 101.0
    asked = plan(sessions=(trains(0, asked_at_s=99.5), silent))
    assert told(asked, ProgressRequest) == []


def test_what_failed_the_job_stays_though_others_fail_a_moment_later() -> None:
    failing = job().with_recovery(maxRestarts=0)
    first = plan(failing, sessions=(exits(0, 1), trains(1)))
    assert first.written["phase"] == "Failed"
    later = plan(
        job(first.written).with_recovery(maxRestarts=0), sessions=(exits(0, 1), exits(1, 1)), memory=first.memory
    )
    message, again = (
        [c["message"] for c in got.written["conditions"] if c["type"] == "Failed"] for got in (first, later)
    )
    assert (message, later.notes) == (again, ())
    assert [n.note for n in first.notes] == message


def stalls(slot: int, **changes: Any) -> AgentSession:
    """A worker that trained ten steps a second until two seconds ago."""
    at_s = changes.pop("progress_at_s", 98.0)
    progress = {"progress": make_progress(9), "progress_generation": 1, "progress_at_s": at_s, "progress_told_s": at_s}
    return trains(slot, step_s=0.1, **progress, **changes)


def test_agents_are_pinged_when_steps_are_overdue() -> None:
    got = plan(sessions=(stalls(0), trains(1)))
    assert told(got, Ping) == [uid_of(0), uid_of(1)]
    assert got.written["phase"] == "Running"
    soon = plan(sessions=(stalls(0, asked_at_s=99.8), trains(1, asked_at_s=99.8, unanswered_since_s=99.8)))
    assert told(soon, Ping) == []
    assert soon.due_s == pytest.approx(100.3)


@pytest.mark.parametrize(
    ("size", "asked"), [pytest.param(50, 50, id="small"), pytest.param(100, 0, id="every two seconds")]
)
def test_a_large_job_is_pinged_less_often(size: int, asked: int) -> None:
    """About fifty answers a second: an evaluation between two steps stalls progress, too."""
    membership = {**MEMBERSHIP, "members": f"0-{size - 1}", "worldSize": size}
    builder = make_job().with_replicas(size).elastic(1, size).with_status({**TRAINING, "membership": membership})
    sessions = tuple((stalls if slot == 0 else trains)(slot, asked_at_s=98.9) for slot in range(size))
    got = plan(builder, pods=tuple(make_pod(slot) for slot in range(size)), sessions=sessions)
    assert len(told(got, Ping)) == asked


def test_the_job_is_looked_at_again_when_the_next_step_is_overdue() -> None:
    got = plan(sessions=(stalls(0, progress_at_s=99.5), trains(1)))
    assert told(got, Ping) == []
    assert got.progress_due is not None
    assert got.progress_due.due_s == pytest.approx(100.8)
    assert got.progress_due.generations == (1,)
    assert got.due_s is not None
    assert got.due_s > 100.8
    overdue = plan(sessions=(stalls(0), trains(1)))
    assert overdue.progress_due is None


def test_job_whose_agent_does_not_answer_is_recovering_before_it_is_lost() -> None:
    got = plan(sessions=(stalls(0, asked_at_s=99.4), trains(1, asked_at_s=99.4, unanswered_since_s=99.4)))
    assert (got.written["phase"], got.announced, told(got, ProgressRequest)) == ("Recovering", False, [])
    assert got.written["summary"]["ready"] == "1/2"
    degraded = next(c for c in got.written["conditions"] if c["type"] == "Degraded")
    assert (degraded["reason"], degraded["message"]) == ("SilentWorkers", "1 of 2 agents cannot be reached.")
    lost = plan(sessions=(stalls(0, progress_at_s=90.0), trains(1, unanswered_since_s=92.0)))
    incident = lost.written["incidents"][-1]
    assert (lost.announced, incident["cause"], incident["culprit"]) == (True, "Unresponsive", "1")
    assert (incident["detectMs"], incident["decideMs"]) == (7000.0, 3000.0)  # last step at 90, lost at 97, now 100


def test_pod_that_cannot_start_is_an_event_once() -> None:
    pods = (make_pod(0), make_pod(1, phase="Pending", waiting_reason="ErrImagePull", waiting_message="not found"))
    got = plan(job(None), pods=pods, sessions=())
    says = "1 of 2 worker pods run; digits-worker-1-0 cannot start: not found"
    assert [(n.kind, n.reason, n.note) for n in got.notes] == [("Warning", "ErrImagePull", says)]
    backing_off = (pods[0], replace(pods[1], waiting_reason="ImagePullBackOff"))
    assert plan(job(got.written), pods=backing_off, sessions=(), memory=got.memory).notes == ()


def test_pod_that_finds_a_node_and_then_cannot_start_is_another_event() -> None:
    """Its image cannot be pulled: that it had to wait for a node first must not hide it."""
    waits = make_pod(1, phase="Pending", node="", unschedulable="0/3 nodes are available")
    first = plan(job(None), pods=(make_pod(0), waits), sessions=())
    assert [n.reason for n in first.notes] == ["Unschedulable"]
    pulls = make_pod(1, phase="Pending", waiting_reason="ErrImagePull", waiting_message="not found")
    then = plan(job(first.written), pods=(make_pod(0), pulls), sessions=(), memory=first.memory)
    assert [n.reason for n in then.notes] == ["ErrImagePull"]
    again = plan(job(then.written), pods=(make_pod(0), waits), sessions=(), memory=then.memory)
    assert [n.reason for n in again.notes] == ["Unschedulable"]


def test_refused_job_makes_nothing_and_says_why() -> None:
    refusal = Verdict("InvalidTemplate", "spec.template is wrong.")
    got = plan(job(None), pods=(), sessions=(), refusal=refusal)
    accepted = next(c for c in got.written["conditions"] if c["type"] == "Accepted")
    assert (accepted["status"], accepted["reason"], accepted["message"]) == (
        "False",
        "InvalidTemplate",
        "spec.template is wrong.",
    )
    assert (got.create, got.written["summary"]["state"]) == ((), "InvalidTemplate")
    assert [n.reason for n in got.notes] == ["InvalidTemplate"]
    again = plan(job(got.written), pods=(), sessions=(), memory=got.memory, refusal=refusal)
    assert again.notes == ()


def test_refusal_of_a_job_that_runs_is_said_and_the_job_goes_on() -> None:
    got = plan(refusal=Verdict("Invalid", "spec.x is wrong."))
    accepted = next(c for c in got.written["conditions"] if c["type"] == "Accepted")
    assert (accepted["status"], accepted["message"]) == ("False", "spec.x is wrong.")
    assert (got.written["phase"], got.written["summary"]["state"], got.delete) == ("Running", "Running", ())


def test_pods_that_fail_before_they_run_come_slower_and_few_are_kept() -> None:
    """A device plugin that is broken: the kubelet refuses each pod."""
    refused = {"phase": "Failed", "running_since_s": None, "ip": ""}
    got, attempts = plan(pods=(make_pod(0),), sessions=(trains(0),)), list[int]()
    for second in range(0, 3600, 5):
        newest = max(attempts, default=0)
        pods = (make_pod(0), *(make_pod(1, attempt, **refused) for attempt in range(max(1, newest - 1), newest + 1)))
        got = plan(
            job(got.written),
            pods=pods,
            sessions=(trains(0),),
            memory=got.memory,
            clock=Clock(200.0 + second, 1e9 + second),
        )
        attempts += [attempt for slot, attempt, _ in got.create if slot == 1]
        assert [pod.attempt for pod in got.delete if pod.slot == 1] == [pod.attempt for pod in pods[1:-1]]
    assert 10 < len(attempts) < 20


def test_it_is_never_looked_at_again_in_the_past() -> None:
    for now_s in (0.5, 1.0, 99.0, 100.0, 5000.0):
        got = plan(job(FORMING), sessions=(make_session(0, Phase.FORMING, 2),), clock=Clock(now_s, 1.0))
        assert got.due_s is not None
        assert got.due_s > now_s


def groups(**sessions: Any) -> JobPlan:
    """Plan a job of four workers, in the groups 0 3 and 2 1."""
    membership = MEMBERSHIP | {"members": "0,3,2,1", "worldSize": 4}
    builder = make_job().with_replicas(4).elastic(4, 4).with_spec(workersPerGroup=2)
    given = {f"w{slot}": trains(slot) for slot in range(4)} | sessions
    members = tuple(Member(slot, f"digits-worker-{slot}-0", uid_of(slot), 1, "h", 1) for slot in (0, 3, 2, 1))
    document = Document(1, "g1", "job", "forced", members, Store("h", 1, uid_of(0)))
    return plan(
        builder.with_status(TRAINING | {"membership": membership}),
        pods=tuple(make_pod(slot) for slot in range(4)),
        sessions=tuple(given.values()),
        memory=remembered(issued=Issued(document, announced_at_s=99.0)),
    )


def test_all_of_the_group_that_read_count_as_having_failed() -> None:
    fault = Fault("checkpoint", "cannot be read")
    refused = {
        f"w{slot}": make_session(slot, Phase.BROKEN, 1, fault=fault, fault_generation=1, fault_at_s=99.0)
        for slot in range(4)
    }
    assert [uid for uid, w in groups(**refused).memory.workers.items() if w.cannot_read] == [uid_of(1), uid_of(2)]


def test_words_of_who_leaves_are_those_of_its_position() -> None:
    got = groups(w0=trains(0, draining=Draining(30.0)), w2=trains(2, draining=Draining(30.0)))
    (degraded,) = (c for c in got.written["conditions"] if c["type"] == "Degraded")
    assert degraded["reason"] == "Leaving"
    assert "training continues from step 0" in degraded["message"]
