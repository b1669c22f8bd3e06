"""Between the last step and the scripts' end: State Finishing. What one plan of a whole job makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.document import CheckpointRef
from regroup.protocol.state import Phase
from regroup.protocol.wire import Finish, Generation, Stop
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Clock, JobMemory, JobPlan, Urgency
from regroup_operator.model.records import AgentSession, Pod, ProcessExit
from regroup_operator.plan.facts.finished import Finished, read_finished
from regroup_operator.plan.lifecycle.finished import may_run, places_of, taken_over
from tests.builders.jobs import role
from tests.builders.plan import JobBuilder, make_job, make_pod, make_progress, make_session, make_worker, uid_of
from tests.unit.plan.test_completing import condition, evaluator
from tests.unit.plan.test_completing import plan as plan_with_roles
from tests.unit.plan.test_job import MEMBERSHIP, TRAINING, told
from tests.unit.plan.test_job import plan as plan_job_of

WALL = 1_800_000_000.0
CLOCK = Clock(100.0, WALL)
AT = "2027-01-15T07:50:00Z"
"""Ten minutes before the clock's time."""
CHECKPOINT = {"generation": 1, "step": 10, "directory": "step-10.g1-a"}
SAVED: dict[str, Any] = TRAINING | {"checkpoint": CHECKPOINT}
ENDS = {"generation": 1, "workers": 2, "step": 10, "members": "0-1", "done": "", "at": AT}


def ends(done: str = "", members: str = "0-1", **status: Any) -> dict[str, Any]:
    """Return the status of a job whose steps are over."""
    return SAVED | {"finished": ENDS | {"done": done, "members": members}} | status


def job(status: dict[str, Any], replicas: int = 2, **spec: Any) -> JobBuilder:
    builder = make_job().with_replicas(replicas).elastic(1, 4).with_status(status)
    return builder.with_spec(**{"checkpoint": {"volumeClaim": "ckpt"}} | spec)


def says(slot: int, phase: str = Phase.FINISHING, attempt: int = 0, **changes: Any) -> AgentSession:
    """Return what the agent of a member says; by default its script runs what follows the loop."""
    given: dict[str, Any] = {"told_tier": "Session", "told_generation": 1, "condition_at_s": 0.0, "step": 10}
    return make_session(slot, phase, 1, attempt, **given | changes)


def plan(
    builder: JobBuilder | None = None,
    *sessions: AgentSession,
    pods: Sequence[Pod] = (make_pod(0), make_pod(1)),
    clock: Clock = CLOCK,
    memory: JobMemory | None = None,
) -> JobPlan:
    """Plan a job whose scripts run on after the last step, unless said otherwise."""
    there = {pod.uid for pod in pods}
    given = [s for s in sessions or (says(0), says(1)) if s.pod_uid in there]
    return plan_job_of(builder or job(ends()), pods=tuple(pods), sessions=tuple(given), clock=clock, memory=memory)


def finish(got: JobPlan) -> dict[str, Finish]:
    return {tell.pod_uid: tell.body for tell in got.tell if isinstance(tell.body, Finish)}


def stops(got: JobPlan) -> dict[str, str]:
    return {tell.pod_uid: tell.body.outcome for tell in got.tell if isinstance(tell.body, Stop)}


# --- the end of the steps ----------------------------------------------------------------------------------------------


def test_end_of_the_steps_is_in_the_status_before_anybody_leaves_its_loop() -> None:
    builder = job(SAVED, processesPerWorker=2)
    got = plan(builder, says(0, Phase.FINISHED), says(1, Phase.FINISHED))
    assert got.written["finished"] == ENDS | {"at": CLOCK.timestamp()}
    assert (got.written["phase"], got.urgency) == ("Finishing", Urgency.NOW)
    assert (got.create, got.delete, got.announced, told(got, Generation), stops(got)) == ((), (), False, [], {})
    checkpoint = CheckpointRef(1, 10, "step-10.g1-a")
    assert finish(got) == {
        uid_of(0): Finish(1, 10, rank_offset=0, world_size=4, checkpoint=checkpoint, repeats=True),
        uid_of(1): Finish(1, 10, rank_offset=2, world_size=4, checkpoint=checkpoint, repeats=True),
    }
    again = plan(job(got.written), *(says(slot, Phase.FINISHED, told_finish=1) for slot in (0, 1)))
    assert (finish(again), stops(again)) == ({}, {})
    assert again.written["finished"] == got.written["finished"]


def test_last_checkpoint_is_kept_where_a_planned_generation_came_too_late() -> None:
    """Nobody has entered that one. The checkpoint of the one before it is all that an end could run again with."""
    late = {k: v for k, v in MEMBERSHIP.items() if k != "startStep"} | {
        "generation": 2, "uid": "g2", "kind": "planned", "adopted": False, "members": "0-2",
        "older": [{"generation": 1, "uid": "g1", "members": "0-1"}],
    }  # fmt: skip
    last: dict[str, Any] = {
        "progress": make_progress(10, checkpoint=CHECKPOINT),
        "progress_generation": 1,
        "progress_at_s": 99.0,
    }
    got = plan(job(TRAINING | {"membership": late}), says(0, Phase.FINISHED, **last), says(1, Phase.FINISHED))
    assert (got.written["phase"], got.written["finished"]["generation"]) == ("Finishing", 1)
    assert {key: got.written["checkpoint"][key] for key in CHECKPOINT} == CHECKPOINT
    assert {body.checkpoint for body in finish(got).values()} == {CheckpointRef(1, 10, "step-10.g1-a")}


def test_checkpoint_of_an_older_step_is_none_of_the_end() -> None:
    got = plan(job(ends(checkpoint=CHECKPOINT | {"step": 8})))
    assert [body.checkpoint for body in finish(got).values()] == [None, None]


def test_member_that_has_not_committed_the_last_step_keeps_the_others_in_their_loops() -> None:
    got = plan(job(SAVED), says(0, Phase.FINISHED), says(1, Phase.TRAINING))
    assert (got.written["phase"], "finished" in got.written, finish(got)) == ("Running", False, {})


@pytest.mark.parametrize(
    ("sessions", "pods", "want"),
    [
        pytest.param((says(0), says(1, Phase.FINISHED)), (make_pod(0), make_pod(1)), ("0-1", ""), id="one runs on"),
        pytest.param((says(0, Phase.DONE),), (make_pod(0),), ("0-1", "0"), id="one has returned, another pod is gone"),
        pytest.param((says(1),), (make_pod(0), make_pod(1)), ("0-1", ""), id="one has not called yet"),
        pytest.param(
            (says(0, attempt=1),), (make_pod(0, 1), make_pod(1)), ("0.1,1", ""), id="one has a lost member's place"
        ),
        pytest.param((says(0, step=0), says(1, Phase.FINISHED)), (make_pod(0), make_pod(1)), ("0-1", ""), id="by another's step"),
    ],
)  # fmt: skip
def test_end_that_a_backup_has_lost_is_written_again(
    sessions: tuple[AgentSession, ...], pods: tuple[Pod, ...], want: tuple[str, str]
) -> None:
    """Whoever has left its loop was told to, and enters no other generation."""
    got = plan(job(SAVED), *sessions, pods=pods)
    assert (got.written["phase"], got.announced, got.written["released"]) == ("Finishing", False, [])
    finished = got.written["finished"]
    assert (finished["members"], finished["done"], finished["step"]) == (*want, 10)


def test_words_and_columns() -> None:
    got = plan(job(ends("0")), says(0, Phase.DONE), says(1))
    said = condition(got, "Complete")
    assert (said["status"], said["reason"]) == ("False", "Finishing")
    assert said["message"] == (
        f"All steps of generation 1 are committed. The script still runs in 1 of 2 workers (worker 1), since {AT}."
    )
    assert (got.written["summary"]["state"], got.written["summary"]["ready"]) == ("Finishing", "")
    assert (condition(got, "Training")["status"], condition(got, "Training")["reason"]) == ("False", "Finishing")
    assert got.notes == ()


def test_end_takes_its_time() -> None:
    """No limit of ours: a script whose processes are there is no hang, and nobody asks whether they are."""
    status = plan().written
    for later_s in (1e4, 1e6):
        got = plan(
            job(status), says(0, told_finish=1), says(1, told_finish=1), clock=Clock(100.0 + later_s, WALL + later_s)
        )
        assert (got.written["phase"], got.tell, got.create, got.delete) == ("Finishing", (), (), ())


# --- who is done -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("session", "pod", "want"),
    [
        pytest.param(says(0, Phase.DONE), make_pod(0), "0", id="its agent says so"),
        pytest.param(says(0, Phase.DONE, connected=False, closed_at_s=99.0), make_pod(0), "0", id="and is gone since"),
        pytest.param(says(0), make_pod(0), "", id="the script runs"),
        pytest.param(says(0, Phase.STARTING), make_pod(0), "", id="it starts again"),
        pytest.param(says(0, Phase.STOPPED, told_outcome="Complete"), make_pod(0, phase="Succeeded"), "", id="PROOF: not its pod"),
        pytest.param(None, make_pod(0, phase="Succeeded"), "", id="PROOF: nor that of an agent that nobody has heard"),
        pytest.param(
            replace(says(0), condition=replace(says(0, Phase.DONE).condition, generation=2)), make_pod(0), "",
            id="in another generation",
        ),
    ],
)  # fmt: skip
def test_who_has_returned(session: AgentSession | None, pod: Pod, want: str) -> None:
    got = plan(job(ends()), *filter(None, [session, says(1)]), pods=(pod, make_pod(1)))
    assert got.written["finished"]["done"] == want
    assert stops(got) == {}, "STAYS: the status does not say so yet"


def test_who_has_returned_exits_once_the_status_names_it_and_its_pod_stays() -> None:
    got = plan(job(ends("0")), says(0, Phase.DONE), says(1, told_finish=1))
    assert (stops(got), got.delete) == ({uid_of(0): "Complete"}, ())
    exited = make_pod(0, phase="Succeeded", running_since_s=None)
    later = plan(job(got.written), says(1, told_finish=1), pods=(exited, make_pod(1)))
    assert (later.written["finished"]["done"], later.create, later.delete, later.tell) == ("0", (), (), ())


@pytest.mark.parametrize(
    "sessions", [(), (says(0, Phase.DONE, connected=False, closed_at_s=70.0),)], ids=["new", "old"]
)
def test_pod_of_a_slot_that_is_done_and_does_not_end_is_deleted(sessions: tuple[AgentSession, ...]) -> None:
    """A container beside the trainer runs on. Another operator has not heard its agent, which has exited."""
    got = plan(job(ends("0")), *sessions, says(1))
    assert [pod.uid for pod in got.delete] == [uid_of(0)]
    assert got.create == ()


def test_pod_of_a_slot_that_is_done_is_not_missed() -> None:
    got = plan(job(ends("0")), says(1), pods=(make_pod(1),))
    assert (got.create, got.written["phase"], got.written["finished"]["done"]) == ((), "Finishing", "0")


def test_job_is_complete_with_the_write_that_names_all() -> None:
    got = plan(job(ends("0")), says(0, Phase.DONE), says(1, Phase.DONE))
    assert (got.written["phase"], got.written["finished"]["done"], got.urgency) == ("Succeeded", "0-1", Urgency.NOW)
    assert condition(got, "Complete")["message"] == "The script has returned in all 2 workers of generation 1."
    after = plan(job(got.written), pods=())
    assert (after.written["phase"], after.create, after.written["finished"]) == (
        "Succeeded",
        (),
        got.written["finished"],
    )


def test_job_that_has_ended_is_deleted_after_its_time() -> None:
    got = plan(job(ends("0"), runPolicy={"ttlSecondsAfterFinished": 5}), says(1))
    assert (got.written["phase"], got.expired) == ("Finishing", False)
    ended = plan(job(ends("0-1"), runPolicy={"ttlSecondsAfterFinished": 5}), pods=())
    assert (ended.written["phase"], ended.expired, ended.due_s) == ("Succeeded", False, 105.0)
    late = plan(job(ended.written, runPolicy={"ttlSecondsAfterFinished": 5}), pods=(), clock=Clock(106.0, WALL + 6))
    assert late.expired


# --- pods --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_size_does_nothing(replicas: int) -> None:
    got = plan(job(ends(), replicas=replicas), says(0, told_finish=1), says(1, told_finish=1))
    assert (got.create, got.delete, got.tell, got.announced) == ((), (), (), False)
    assert (got.written["phase"], got.written["membership"]["generation"]) == ("Finishing", 1)


def test_spares_and_those_that_were_to_join_are_released() -> None:
    pods = (
        make_pod(0),
        make_pod(1),
        make_pod(1, 1),
        make_pod(2),
        make_pod(3, phase="Pending", node="", running_since_s=None),
    )
    others = (make_session(1, attempt=1, told_tier="Session"), make_session(2, told_tier="Session"))
    builder = job(SAVED, replicas=4, recovery={"spares": 1})
    got = plan(builder, says(0, Phase.FINISHED), says(1, Phase.FINISHED), *others, pods=pods)
    assert got.written["finished"]["members"] == "0-1", "of two pods of a slot the member has the place"
    assert set(got.written["released"]) == {pod.uid for pod in got.delete} == {uid_of(1, 1), uid_of(2), uid_of(3)}
    assert set(finish(got)) == {uid_of(0), uid_of(1)}
    assert stops(got) == {uid_of(1, 1): "Released", uid_of(2): "Released"}


LOST = {"node_ready": False, "terminating": True}


@pytest.mark.parametrize(
    ("pods", "session", "want"),
    [
        pytest.param((), None, [(1, 1, ())], id="deleted"),
        pytest.param((make_pod(1, terminating=True),), says(1), [], id="it drains: its script has its grace"),
        pytest.param((make_pod(1, **LOST),), None, [], id="PLACE: its node is lost, and the API has the pod"),
        pytest.param((make_pod(1, **LOST),), says(1), [], id="the kubelet is gone, and it can be reached"),
        pytest.param((make_pod(1, node_ready=False),), None, [], id="its node may come back"),
        pytest.param((make_pod(1),), None, [], id="PLACE: it cannot be reached, and may run"),
        pytest.param((make_pod(1, phase="Succeeded"),), None, [(1, 1, ())], id="it has ended without a word"),
        pytest.param((make_pod(1, phase="Failed"),), None, [(1, 1, ())], id="it has failed"),
    ],
)  # fmt: skip
def test_pod_is_made_once_the_place_is_free(
    pods: tuple[Pod, ...], session: AgentSession | None, want: list[Any]
) -> None:
    got = plan(job(ends()), says(0), *filter(None, [session]), pods=(make_pod(0), *pods))
    assert list(got.create) == want
    assert (got.written["phase"], got.delete) == ("Finishing", ())
    restarts = got.written.get("restarts", {})
    assert (restarts.get("processes", 0), restarts.get("recent", [])) == (0, []), "it does not count for maxRestarts"


def test_pod_whose_agent_has_exited_without_its_container_is_deleted() -> None:
    """A process in it hangs in the kernel: neither does the container end, nor does the kubelet start it again."""
    gone = says(1, Phase.STOPPED, connected=False, closed_at_s=90.0)
    early = plan(job(ends()), says(0), gone, clock=replace(CLOCK, now_s=109.0))
    assert (early.delete, early.create, early.due_s) == ((), (), 110.0)
    late = plan(job(ends()), says(0), gone, clock=replace(CLOCK, now_s=110.0))
    assert ([pod.uid for pod in late.delete], late.create) == ([uid_of(1)], ())


def test_pod_that_is_made_gets_the_place_and_the_finished_generation() -> None:
    pods = (make_pod(0), make_pod(1, 1))
    fresh = make_session(1, Phase.STARTING, 0, attempt=1, told_tier="Session")
    got = plan(job(ends()), says(0, told_finish=1), fresh, pods=pods)
    assert (got.written["finished"]["members"], got.urgency) == ("0,1.1", Urgency.NOW), "before it is told"
    (body,) = finish(got).values()
    assert (list(finish(got)), body.rank_offset, body.generation, body.world_size) == ([uid_of(1, 1)], 1, 1, 2)
    assert (got.create, got.delete, got.announced) == ((), (), False)
    ended = plan(job(got.written), says(0, Phase.DONE), says(1, Phase.DONE, attempt=1), pods=pods)
    assert (ended.written["phase"], ended.written["finished"]["done"]) == ("Succeeded", "0,1.1")


def test_pod_that_comes_back_after_its_place_was_given_away_is_released() -> None:
    """Its script may have returned, and the other one writes the same files at this moment."""
    pods = (make_pod(0), make_pod(1), make_pod(1, 1))
    got = plan(
        job(ends(members="0,1.1")), says(0, told_finish=1), says(1, Phase.DONE), says(1, attempt=1, told_finish=1), pods=pods
    )  # fmt: skip
    assert (got.written["finished"]["members"], got.written["finished"]["done"]) == ("0,1.1", "")
    assert ([pod.uid for pod in got.delete], stops(got)) == ([uid_of(1)], {uid_of(1): "Released"})
    assert got.create == ()


FIRST, SECOND, OTHER = MemberId(0, 0), MemberId(0, 1), MemberId(1, 0)


@pytest.mark.parametrize(
    ("members", "done", "there", "released", "want"),
    [
        pytest.param([FIRST, OTHER], [], [(0, 0), (0, 1), (1, 0)], [], [(0, 0), (1, 0)], id="the member has it"),
        pytest.param([FIRST, OTHER], [], [(0, 1), (1, 0)], [], [(0, 1), (1, 0)], id="it is gone: another pod of its slot"),
        pytest.param([FIRST, OTHER], [], [(0, 1), (1, 0)], [(0, 1)], [(0, 0), (1, 0)], id="but none that is released"),
        pytest.param([FIRST, OTHER], [], [(0, 2), (0, 3), (1, 0)], [], [(0, 2), (1, 0)], id="the oldest of two"),
        pytest.param([FIRST, OTHER], [], [(1, 0), (1, 1)], [], [(0, 0), (1, 0)], id="none of another slot"),
        pytest.param([FIRST, OTHER], [FIRST], [(0, 1), (1, 0)], [], [(0, 0), (1, 0)], id="done: nobody needs it"),
        pytest.param([FIRST, SECOND], [], [(0, 0), (0, 1)], [], [(0, 0), (0, 1)], id="HANDOVER: both are members"),
        pytest.param([FIRST, SECOND], [], [(0, 1), (0, 2)], [], [(0, 2), (0, 1)], id="and the first is gone"),
        pytest.param([FIRST, SECOND], [], [(0, 2)], [], [(0, 2), (0, 1)], id="both are gone, one pod is there"),
        pytest.param([FIRST, SECOND], [], [(0, 2), (0, 3)], [], [(0, 2), (0, 3)], id="and two"),
        pytest.param([MemberId(0, 2), SECOND], [MemberId(0, 2)], [(0, 2)], [], [(0, 2), (0, 1)], id="one pod, one place"),
    ],
)  # fmt: skip
def test_who_has_whose_place(
    members: list[MemberId], done: list[MemberId], there: list[Any], released: list[Any], want: list[Any]
) -> None:
    finished = Finished(1, tuple(members), 10, frozenset(done), AT)
    workers = [make_worker(slot, attempt=attempt) for slot, attempt in there]
    got = taken_over(finished, workers, {uid_of(*one) for one in released})
    assert list(got.members) == want
    has = places_of(got, workers)
    assert set(has) == {m for m in got.open if tuple(m) in there}
    assert all(worker.id == member for member, worker in has.items())


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        pytest.param({}, True, id="it runs"),
        pytest.param({"phase": "Pending"}, True, id="it will"),
        pytest.param({"phase": "Succeeded"}, False, id="it has ended"),
        pytest.param({"phase": "Failed"}, False, id="it has failed"),
        pytest.param({"terminating": True}, True, id="it has its grace"),
        pytest.param({"node_ready": False}, True, id="its node may come back"),
        pytest.param(LOST, True, id="its node is lost, and its kubelet has not said that it has ended"),
    ],
)
def test_which_pods_may_run(changes: dict[str, Any], want: bool) -> None:
    assert may_run(make_worker(0, pod=make_pod(0, **changes), session=None)) == want
    if changes.get("phase") is None:
        assert may_run(make_worker(0, pod=make_pod(0, **changes))), "it can be reached"
    assert not may_run(make_worker(0, pod=None))


# --- failures ----------------------------------------------------------------------------------------------------------


def fails(slot: int, code: int = 1, attempt: int = 0) -> AgentSession:
    """Return what is known of a worker whose script has just failed after its loop."""
    ended = ProcessExit(99.0, 1, 0, code, "RuntimeError: no bucket", 1)
    return says(slot, attempt=attempt, exits=(ended,), num_exits=1, incarnation=2)


def test_failure_counts_and_the_script_runs_again_in_place() -> None:
    got = plan(job(ends()), fails(0), says(1))
    assert (got.written["phase"], got.create, got.announced) == ("Finishing", (), False)
    assert (got.written["restarts"]["processes"], len(got.written["restarts"]["recent"])) == (1, 1)


def test_container_that_fails_counts_and_its_pod_is_replaced_elsewhere() -> None:
    pods = tuple(make_pod(1, attempt, phase="Failed", last_exit_code=1) for attempt in (0, 4))
    got = plan(job(ends()), says(0), pods=(make_pod(0), *pods))
    assert (got.create, got.written["phase"]) == (((1, 5, ("node-1",)),), "Finishing")
    assert (got.written["restarts"]["processes"], len(got.written["restarts"]["recent"])) == (2, 1)


def test_more_failures_than_it_may_have() -> None:
    got = plan(job(plan().written, recovery={"maxRestarts": 0}), fails(0), says(1))
    assert (got.written["phase"], condition(got, "Failed")["reason"]) == ("Failed", "TooManyRestarts")
    assert got.written["failedPod"] == "digits-worker-0-0"
    assert "RuntimeError: no bucket" in condition(got, "Failed")["message"]
    assert (condition(got, "Complete")["status"], condition(got, "Complete")["reason"]) == ("False", "Failed")
    assert set(stops(got).values()) == {"Failed"}


@pytest.mark.parametrize("finished", [True, False])
def test_rule_judges_each_workers_end_by_itself(finished: bool) -> None:
    """Worker 0 has failed in this generation before. Worker 1's end is no consequence of that, as it is while they train."""
    rules = [{"action": "Fail", "exitCodes": {"operator": "In", "values": [7]}}]
    judged: dict[str, Any] = {"restarts": {"total": 1, "judged": {"generation": 1, "failed": {"0": 1}}}}
    status = ends(**judged) if finished else SAVED | judged
    phase = Phase.FINISHING if finished else Phase.TRAINING
    got = plan(job(status, recovery={"onExit": rules}), says(0, phase), fails(1, 7))
    assert (condition(got, "Failed").get("reason") == "ExitRule") == finished


def test_rule_that_ignores_a_failure() -> None:
    rules = [{"action": "Ignore", "exitCodes": {"operator": "In", "values": [7]}}]
    got = plan(job(ends(), recovery={"maxRestarts": 0, "onExit": rules}), fails(0, 7), says(1))
    assert (got.written["phase"], got.written["restarts"].get("ignored")) == ("Finishing", 1)


@pytest.mark.parametrize(
    ("sessions", "pods", "says_what"),
    [
        pytest.param((fails(0), says(1)), (make_pod(0), make_pod(1)), "RuntimeError: no bucket", id="a script fails"),
        pytest.param((says(0),), (make_pod(0),), "The pod of worker 1 has gone before its script returned", id="a pod goes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("checkpoint", [None, CHECKPOINT | {"step": 8}], ids=["none", "older"])
def test_end_that_cannot_be_repeated_fails_with_a_sentence(
    sessions: tuple[AgentSession, ...], pods: tuple[Pod, ...], says_what: str, checkpoint: dict[str, Any] | None
) -> None:
    status = {k: v for k, v in ends(checkpoint=checkpoint).items() if v is not None}
    got = plan(job(status), *sessions, pods=pods)
    assert (got.written["phase"], condition(got, "Failed")["reason"]) == ("Failed", "EndFailed")
    message = condition(got, "Failed")["message"]
    assert says_what in message
    assert got.written.get("failedPod") == ("digits-worker-0-0" if "kubectl logs" in message else None)
    assert "the state of step 10, the last one, is in no checkpoint, so it cannot run again" in message


# --- suspension, deadlines, roles --------------------------------------------------------------------------------------


def test_suspension_ends_the_scripts_that_run_and_keeps_what_is_done() -> None:
    first = plan(job(ends("0"), runPolicy={"suspend": True}), says(0, Phase.DONE), says(1))
    assert (first.written["phase"], stops(first)) == ("Suspending", {uid_of(0): "Complete", uid_of(1): "Suspended"})
    assert "restarts" not in first.written or not first.written["restarts"].get("processes")
    said = condition(first, "Complete")
    assert (said["reason"], said["message"]) == (
        "Finishing",
        "All steps of generation 1 are committed. The script has not returned in 1 of 2 workers (worker 1). It runs again there "
        "once the job is resumed.",
    )
    done = plan(job(first.written, runPolicy={"suspend": True}), pods=())
    assert (done.written["phase"], done.written["finished"]["done"]) == ("Suspended", "0")
    assert "resumed, the rest of its scripts runs" in condition(done, "Suspended")["message"]
    resumed = plan(job(done.written), pods=())
    assert (resumed.written["phase"], resumed.create, resumed.announced) == ("Finishing", ((1, 1, ()),), False)
    assert resumed.written["membership"]["generation"] == 1
    runs = plan(job(resumed.written), make_session(1, Phase.STARTING, attempt=1), pods=(make_pod(1, 1),))
    (body,) = finish(runs).values()
    assert (body.rank_offset, body.world_size, body.checkpoint) == (1, 2, CheckpointRef(1, 10, "step-10.g1-a"))


def test_worker_that_returns_as_the_job_is_suspended_is_told_once_that_is_kept() -> None:
    """It has not obeyed the stop that crossed its word."""
    status, crossing = (
        plan(job(ends(), runPolicy={"suspend": True})).written,
        says(0, Phase.DONE, told_outcome="Suspended"),
    )
    crossed = plan(job(status, runPolicy={"suspend": True}), crossing, says(1, told_outcome="Suspended"))
    assert (crossed.written["finished"]["done"], stops(crossed)) == ("0", {})
    kept = plan(job(crossed.written, runPolicy={"suspend": True}), crossing, says(1, told_outcome="Suspended"))
    assert stops(kept) == {uid_of(0): "Complete"}


@pytest.mark.parametrize("in_groups", [False, True])
def test_workers_that_have_returned_go_when_a_job_is_suspended_that_waits_for_its_roles(in_groups: bool) -> None:
    """No worker of a group runs its end again once all have returned: nobody stays for the others."""
    waits = {"roles": [role() | {"requiredForCompletion": True}], "runPolicy": {"suspend": True}}
    spec = waits | (GROUPS if in_groups else {})
    crossed = plan(job(ends("0"), **spec), says(0, Phase.DONE), says(1, Phase.DONE))
    assert (crossed.written["phase"], crossed.written["finished"]["done"]) == ("Suspending", "0-1")
    assert stops(crossed) == ({} if in_groups else {uid_of(0): "Complete"})
    kept = plan(job(crossed.written, **spec), says(0, Phase.DONE), says(1, Phase.DONE))
    assert stops(kept) == {uid_of(0): "Complete", uid_of(1): "Complete"}


def test_resumed_job_without_a_checkpoint_fails() -> None:
    done = plan(job(ends("0"), runPolicy={"suspend": True}), pods=()).written
    del done["checkpoint"]
    got = plan(job(done), pods=())
    assert (got.written["phase"], condition(got, "Failed")["reason"]) == ("Failed", "EndFailed")


RESUMED = {
    "type": "Suspended",
    "status": "False",
    "reason": "Resumed",
    "message": "",
    "lastTransitionTime": "2027-01-15T07:55:00Z",
}


@pytest.mark.parametrize(
    ("policy", "status", "reason"),
    [
        pytest.param({"finishSeconds": 601}, ends(), None, id="not over yet"),
        pytest.param({"finishSeconds": 600}, ends(), "FinishDeadlineExceeded", id="since the last step"),
        pytest.param({"finishSeconds": 600}, ends(conditions=[RESUMED]), None, id="it was resumed since"),
        pytest.param({"finishSeconds": 300}, ends(conditions=[RESUMED]), "FinishDeadlineExceeded", id="since the resumption"),
        pytest.param({"finishSeconds": 1}, ends("0-1"), None, id="all have returned"),
        pytest.param({"finishSeconds": 1}, SAVED, None, id="it trains"),
        pytest.param({"activeDeadlineSeconds": 1}, ends(startTime="2027-01-15T07:00:00Z"), "DeadlineExceeded", id="the job's own"),
        pytest.param({"startDeadlineSeconds": 1}, ends(), None, id="the one for its start is met"),
    ],
)  # fmt: skip
def test_deadlines(policy: dict[str, int], status: dict[str, Any], reason: str | None) -> None:
    phase = Phase.FINISHING if "finished" in status else Phase.TRAINING
    got = plan(job(status, runPolicy=policy), says(0, phase), says(1, phase))
    assert condition(got, "Failed").get("reason") == reason
    if reason is None and policy == {"finishSeconds": 601}:
        assert got.due_s == 101.0


BACK = {"generation": 1, "step": 10, "at": AT}
GROUPS: dict[str, Any] = {"workersPerGroup": 2, "elasticPolicy": {"minReplicas": 2, "maxReplicas": 4}}


def again(start_step: int | None, number: int = 2, **status: Any) -> dict[str, Any]:
    """Return the status of a job of one model group whose end was taken back, with the generation in which all run it again."""
    membership = MEMBERSHIP | {"generation": number, "uid": f"g{number}", "startStep": start_step}
    membership = {k: v for k, v in membership.items() if v is not None} | {"adopted": start_step is not None}
    return SAVED | {"endTakenBack": BACK, "membership": membership} | status


def in_again(phase: str) -> tuple[AgentSession, ...]:
    return tuple(make_session(slot, phase, 2, told_tier="Session", told_generation=2, step=10) for slot in (0, 1))


def test_end_that_is_taken_back_keeps_its_time() -> None:
    """Nothing else of it: all members run their end again."""
    got = plan(job(ends("0"), **GROUPS), says(0, Phase.DONE), pods=(make_pod(0),))
    assert ("finished" in got.written, got.written["endTakenBack"]) == (False, BACK)
    waits = plan(job(got.written, **GROUPS), says(0, Phase.DONE), pods=(make_pod(0),))
    assert (waits.written["phase"], waits.written["endTakenBack"]) == ("Waiting", BACK)
    suspended = plan(job(ends("0"), runPolicy={"suspend": True}, **GROUPS), pods=())
    assert (suspended.written["phase"], suspended.written["endTakenBack"]) == ("Suspended", BACK)


@pytest.mark.parametrize(
    ("status", "tier", "kept"),
    [
        pytest.param(again(None, number=1), "Session", True, id="enough workers are waited for"),
        pytest.param(again(None), "Session", True, id="the next generation forms"),
        pytest.param(again(10), "Session", True, id="it begins at the last step"),
        pytest.param(again(8), "Session", False, id="it trains steps again"),
        pytest.param(again(None, endTakenBack=BACK | {"step": 0}, number=1), "Script", True, id="Script: as before"),
        pytest.param(again(None, endTakenBack=BACK | {"step": 0}), "Script", False, id="Script: it begins anew"),
        pytest.param(SAVED, "Session", False, id="no end was taken back"),
    ],
)
def test_deadline_of_an_end_that_all_run_again_counts_on_unless_steps_are_trained(
    status: dict[str, Any], tier: str, kept: bool
) -> None:
    """It began anew each time, so that a job whose end was taken back again and again had none."""
    number = status["membership"]["generation"]
    sessions = tuple(
        make_session(slot, Phase.STARTING, number, told_tier=tier, told_generation=number, session=tier == "Session")
        for slot in (0, 1)
    )
    for seconds, is_over in ((600, kept), (601, False)):
        got = plan(job(status | {"tier": tier}, runPolicy={"finishSeconds": seconds}, **GROUPS), *sessions)
        assert (condition(got, "Failed").get("reason") == "FinishDeadlineExceeded") == is_over
    assert ("endTakenBack" in got.written) == kept
    if kept:
        assert got.due_s == 101.0


@pytest.mark.parametrize(("start_step", "since"), [(10, AT), (8, CLOCK.timestamp())], ids=["no step", "two steps"])
def test_last_step_that_is_trained_again_is_committed_anew(start_step: int, since: str) -> None:
    got = plan(job(again(start_step), **GROUPS), *in_again(Phase.FINISHED))
    assert got.written["finished"] == ENDS | {"generation": 2, "at": since}
    assert "endTakenBack" not in got.written


@pytest.mark.parametrize(
    ("pod", "connected", "named"),
    [
        pytest.param(make_pod(1, node_ready=False), False, True, id="its node does not answer"),
        pytest.param(make_pod(1, node_ready=False, terminating=True), False, True, id="and Kubernetes has it deleted"),
        pytest.param(make_pod(1, node_ready=False), True, False, id="the agent is connected"),
        pytest.param(make_pod(1), False, False, id="its node is ready: the agent is on its way"),
    ],
)
def test_worker_on_a_node_that_does_not_answer_is_named_with_what_to_do(pod: Pod, connected: bool, named: bool) -> None:
    closed_at_s = None if connected else 50.0
    got = plan(job(ends()), says(0), says(1, connected=connected, closed_at_s=closed_at_s), pods=(make_pod(0), pod))
    words = (
        "Node node-1 of worker 1 does not answer, and the script may still run there, so it runs nowhere else while the pod "
        "exists. If the node comes back, do nothing. If it is off, remove the pod, and the script runs again in another one: "
        "kubectl delete pod --force --namespace=default digits-worker-1-0"
    )
    assert condition(got, "Complete")["message"].endswith(words) == named
    assert ("does not answer" in condition(got, "Complete")["message"]) == named


def test_required_role_runs_on_and_is_awaited_afterwards() -> None:
    roles = [role("eval") | {"requiredForCompletion": True}]
    builder = job(ends("0"), roles=roles)
    runs = plan_with_roles(builder, evaluator(builder), sessions=(says(0, Phase.DONE), says(1)))
    assert (runs.written["phase"], runs.create_roles, runs.delete) == ("Finishing", (), ())
    gone = plan_with_roles(builder, sessions=(says(0, Phase.DONE), says(1)))
    assert gone.create_roles == (("eval", 0, 0),)
    done = plan_with_roles(
        job(runs.written, roles=roles), evaluator(builder), sessions=(says(0, Phase.DONE), says(1, Phase.DONE))
    )
    assert (done.written["phase"], done.written["finished"]["done"]) == ("Completing", "0-1")
    assert [note.reason for note in done.notes] == ["Completing"]


def test_reason_that_the_last_checkpoint_is_missing_survives_the_end() -> None:
    unsaved = {"type": "CheckpointsSaved", "status": "False", "reason": "NotSaved", "message": "The volume is full.",
               "lastTransitionTime": AT}  # fmt: skip
    status = plan(job(ends(conditions=[unsaved]))).written
    assert condition(plan(job(status)), "CheckpointsSaved")["reason"] == "NotSaved"
    assert "The volume is full." in next(c["message"] for c in status["conditions"] if c["type"] == "Complete")
    got = plan(job(status), says(0, Phase.DONE), says(1, Phase.DONE))
    assert (condition(got, "Complete")["status"], condition(got, "Complete")["reason"]) == ("True", "FinishedUnsaved")


# --- another operator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sessions", "pods"),
    [
        pytest.param(
            (says(0, Phase.FINISHED), says(1, Phase.FINISHED)), (make_pod(0), make_pod(1)), id="told by nobody"
        ),
        pytest.param((says(0), says(1)), (make_pod(0), make_pod(1)), id="the scripts run"),
        pytest.param((says(0, Phase.DONE), says(1)), (make_pod(0), make_pod(1)), id="one has returned"),
        pytest.param((says(0),), (make_pod(0),), id="a pod is gone"),
        pytest.param((says(0), says(1, attempt=1)), (make_pod(0), make_pod(1, 1)), id="one was made"),
        pytest.param((), (), id="all are gone"),
    ],
)
def test_new_operator_reads_all_of_it_from_the_status(
    sessions: tuple[AgentSession, ...], pods: tuple[Pod, ...]
) -> None:
    first = plan(job(ends()), *sessions, pods=pods)
    same = plan(job(first.written), *sessions, pods=pods, memory=first.memory)
    other = plan(job(first.written), *sessions, pods=pods)
    counted = {"restarts": same.written.get("restarts")}  # a pod that is not there yet is counted again
    assert other.written | counted == same.written | counted
    assert (other.create, other.delete, other.tell) == (same.create, same.delete, same.tell)
    known, kept = read_finished(first.status), read_finished(other.status)
    assert (known, known and known.members) == (kept, kept and kept.members)


# --- a script without the library ----------------------------------------------------------------------------------------

SCRIPT = {"tier": "Script"}
OF_SCRIPT = ENDS | {"step": 0, "done": "0"}


def plain(slot: int, phase: str = Phase.TRAINING, **changes: Any) -> AgentSession:
    given: dict[str, Any] = {"told_tier": "Script", "session": False, "step": 0}
    return says(slot, phase, **given | changes)


def test_script_is_at_its_end_with_the_first_member_that_returns() -> None:
    got = plan(job(TRAINING | SCRIPT), plain(0, Phase.DONE), plain(1))
    assert got.written["finished"] == OF_SCRIPT | {"at": CLOCK.timestamp()}
    assert (got.written["phase"], stops(got), finish(got)) == ("Finishing", {}, {})
    assert condition(got, "Complete")["message"].startswith(
        "Some scripts have returned. The script still runs in 1 of 2"
    )


@pytest.mark.parametrize(
    "pods", [(make_pod(1),), (make_pod(0, terminating=True), make_pod(1))], ids=["gone", "leaving"]
)
def test_script_member_that_has_returned_is_not_lost_with_its_pod(pods: tuple[Pod, ...]) -> None:
    got = plan(job(TRAINING | SCRIPT | {"finished": OF_SCRIPT}), plain(0, Phase.DONE), plain(1), pods=pods)
    assert (got.written["phase"], got.announced, got.create) == ("Finishing", False, ())
    assert (got.written["membership"]["generation"], got.written["finished"]["done"]) == (1, "0")
    ended = plan(job(got.written), plain(0, Phase.DONE), plain(1, Phase.DONE), pods=pods)
    assert ended.written["phase"] == "Succeeded"


def test_script_of_which_a_member_fails_before_all_have_returned_runs_again_in_all() -> None:
    ended = ProcessExit(99.0, 1, 0, 1, "boom", 1)
    failed = plain(1, Phase.READY, exits=(ended,), num_exits=1, cause="exit", heard=1, entered=1, adopted_to=1)
    status = plan(job(TRAINING | SCRIPT | {"finished": OF_SCRIPT}), plain(0, Phase.DONE), plain(1)).written
    got = plan(job(status), plain(0, Phase.DONE), failed)
    assert got.written.get("finished") is None
    assert (got.announced, got.written["membership"]["members"], got.written["membership"]["generation"]) == (
        True,
        "0-1",
        2,
    )
    assert (got.written["phase"], condition(got, "Complete")) == ("Recovering", {}), (
        "nothing says that it is at its end"
    )


def test_script_in_which_all_have_returned_is_taken_back_by_nothing() -> None:
    gone = job(TRAINING | SCRIPT | {"finished": OF_SCRIPT | {"done": "0-1"}, "membership": MEMBERSHIP})
    assert plan(gone, pods=()).written["phase"] == "Succeeded"
