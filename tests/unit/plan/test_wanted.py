"""Which pods are made, released and deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from _regroup_agent import ending
from regroup.protocol.state import Phase
from regroup.protocol.wire import Draining
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import CreateWorker
from regroup_operator.model.records import Pod
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.facts.current import outdated
from regroup_operator.plan.pods.wanted import (
    ENDS_WITHIN_S,
    SLOW_STOP_S,
    Roster,
    WorkerChanges,
    plan_ended,
    plan_workers,
)
from tests.builders.plan import make_pod, make_session, make_worker, uid_of

A, B, C = make_worker(0), make_worker(1), make_worker(2)


def outside(slot: int, attempt: int = 0, **changes: Any) -> Worker:
    return make_worker(slot, Standing.OUTSIDE, attempt, **changes)


def changes(*workers: Worker, **given: Any) -> WorkerChanges:
    values: dict[str, Any] = {
        "released": frozenset(), "named": (), "bad_nodes": {}, "now_s": 100.0, "hello_timeout_s": 20.0,
    }  # fmt: skip
    values |= {key: given.pop(key) for key in [*given] if key in Roster.__dataclass_fields__}
    roster = Roster(workers=workers, **values)
    if given.pop("ended", False):
        return plan_ended(roster, given.pop("read_until_s", {}))
    return plan_workers(roster, **{"slots": 3, "settled": True} | given)


def made(got: WorkerChanges) -> list[tuple[int, int]]:
    return [(c.slot, c.attempt) for c in got.create]


def stopped(at_s: float, **session: Any) -> Worker:
    said = make_session(1, Phase.STOPPED, connected=False, condition_at_s=at_s, **session)
    return make_worker(1, Standing.LOST, session=said)


ASKED = make_worker(1, session=make_session(1, Phase.TRAINING, 1, draining=Draining(20.0)))
LEAVES = outside(2, session=make_session(2, draining=Draining(20.0)))
SILENT_ON_DEAD_NODE = make_worker(1, Standing.SILENT, pod=make_pod(1, node_ready=False), session=None)


@pytest.mark.parametrize(
    ("workers", "given", "want"),
    [
        pytest.param((), {}, [(0, 0), (1, 0), (2, 0)], id="a new job gets all its pods"),
        pytest.param((A, B, C), {}, [], id="nothing is missing"),
        pytest.param((A, C), {}, [(1, 0)], id="a slot without a pod gets one"),
        pytest.param((A, C), {"named": [MemberId(1, 0)]}, [(1, 1)], id="a number that the status names is not used again"),
        pytest.param((A, C), {"counted": [MemberId(1, 2)]}, [(1, 3)], id="nor is that of a pod that failed and is gone"),
        pytest.param((A, make_worker(1, pod=make_pod(1, phase="Failed")), C), {}, [(1, 1)], id="a failed pod is replaced"),
        pytest.param((A, make_worker(1, pod=make_pod(1, terminating=True)), C), {}, [(1, 1)], id="one that is going, too"),
        pytest.param((A, ASKED, C), {}, [(1, 1)], id="one whose agent got SIGTERM, from a kubelet that evicts it"),
        pytest.param((A, ASKED, outside(1, 1), C), {}, [], id="its replacement is there"),
        pytest.param((A, B, C), {"released": frozenset({uid_of(1)})}, [(1, 1)], id="a released one serves no more"),
        pytest.param((A, SILENT_ON_DEAD_NODE, C), {}, [(1, 1)], id="silent on a node that is not ready: replaced"),
        pytest.param(
            (A, make_worker(1, pod=make_pod(1, node_ready=False)), C), {}, [], id="a node that is not ready proves nothing alone"
        ),
        pytest.param(
            (A, make_worker(1, Standing.SILENT, session=None), C), {}, [], id="silence on a ready node proves nothing alone"
        ),
        pytest.param(
            (A, SILENT_ON_DEAD_NODE, outside(1, 1, session=None, available=False), C), {}, [],
            id="its replacement is on the way",
        ),
        pytest.param((A, stopped(100.0 - 19), C), {}, [], id="an agent that exited a moment ago comes back"),
        pytest.param((A, stopped(100.0 - 20), C), {}, [(1, 1)], id="an agent that exited long ago does not"),
        pytest.param((A, stopped(0.0, told_outcome="Complete"), C), {}, [], id="one that was told to"),
        pytest.param((A, B, C), {"slots": 1}, [], id="fewer wanted: nothing is made"),
        pytest.param((A,), {"ended": True}, [], id="a job that has ended gets nothing"),
    ],
)  # fmt: skip
def test_creation(workers: tuple[Worker, ...], given: Any, want: list[tuple[int, int]]) -> None:
    assert made(changes(*workers, **given)) == want


def test_replacement_avoids_the_nodes_on_which_the_slot_failed() -> None:
    got = changes(A, C, bad_nodes={1: ("node-7",), 2: ("node-8",)})
    assert got.create == (CreateWorker(1, 0, ("node-7",)),)


@pytest.mark.parametrize(
    ("workers", "given", "want"),
    [
        pytest.param((A, B, outside(2)), {"slots": 2}, [uid_of(2)], id="a slot that is not wanted any more"),
        pytest.param((A, B, C), {"slots": 2}, [], id="not while it is a member"),
        pytest.param((A, B, outside(2)), {"slots": 2, "settled": False}, [], id="not before all have adopted (RELEASE)"),
        pytest.param((A, B, outside(2)), {"slots": 2, "on_trial": True}, [], id="not while the smaller size is on trial"),
        pytest.param((A, B, LEAVES), {"slots": 2, "on_trial": True}, [uid_of(2)], id="but one that drains must leave"),
        pytest.param((A, B, LEAVES), {"slots": 2, "on_trial": True, "settled": False}, [], id="which waits for RELEASE, too"),
        pytest.param(
            (A, B, outside(2)), {"slots": 2, "released": frozenset({uid_of(2)})}, [], id="what is released is released once"
        ),
        pytest.param((A, B, outside(2)), {}, [], id="a joiner of a wanted slot stays"),
        pytest.param(
            (A, B, outside(2, session=None)), {"given_back": frozenset({uid_of(2)}), "settled": False}, [uid_of(2)],
            id="one that no node has room for: nobody waits for it",
        ),
        pytest.param(
            (A, B, outside(2, pod=make_pod(2, terminating=True))), {}, [uid_of(2)],
            id="one that is being deleted and is no member: it may go early",
        ),
        pytest.param(
            (A, B, outside(2, session=make_session(2, draining=Draining(20.0)))), {}, [uid_of(2)],
            id="one whose agent got SIGTERM, and that is no member any more",
        ),
        pytest.param(
            (A, B, outside(2, session=None, pod=make_pod(2, node_ready=False)), outside(2, 1)), {}, [uid_of(2)],
            id="the old pod of a dead node, once the new one serves",
        ),
        pytest.param((A, B, C, outside(2, 1)), {}, [uid_of(2, 1)], id="the member serves, its double goes"),
        pytest.param((A, B, outside(3, pod=make_pod(3, phase="Failed"))), {}, [], id="a dead pod is nobody"),
        pytest.param((A, outside(2)), {"slots": 2, "ended": True}, [], id="a job that has ended releases nobody"),
    ],
)  # fmt: skip
def test_release(workers: tuple[Worker, ...], given: Any, want: list[str]) -> None:
    got = changes(*workers, **given)
    assert [p.uid for p in got.release] == want


def pulls(slot: int, attempt: int = 0, **pod: Any) -> Worker:
    """A pod whose image is being pulled: its agent has not called."""
    starting = make_pod(slot, attempt, phase="Pending", running_since_s=None, **pod)
    return outside(slot, attempt, session=None, available=False, pod=starting)


def on_unready_node(since_s: float) -> Worker:
    return pulls(2, node_ready=False, node_unready_since_s=since_s)


@pytest.mark.parametrize(
    ("workers", "made_for", "let_go", "due_s"),
    [
        pytest.param((on_unready_node(95.0),), [], [], 155.0, id="its node has been unready for a moment"),
        pytest.param((on_unready_node(40.0),), [(2, 1)], [], None, id="for longer than a blip"),
        pytest.param((on_unready_node(40.0), pulls(2, 1)), [], [uid_of(2)], None, id="its double serves"),
        pytest.param((pulls(2), pulls(2, 1)), [], [uid_of(2, 1)], None, id="the node is back: the first is further on its way"),
        pytest.param(
            (pulls(2), outside(2, 1, session=None)), [], [uid_of(2)], None, id="the node is back, but the double runs already"
        ),
    ],
)  # fmt: skip
def test_node_that_is_unready_for_a_moment_costs_no_image_pull(
    workers: tuple[Worker, ...], made_for: list[tuple[int, int]], let_go: list[str], due_s: float | None
) -> None:
    got = changes(A, B, *workers, blip_s=60.0)
    assert (made(got), [p.uid for p in got.release], got.due_s) == (made_for, let_go, due_s)


def rebooted(since_s: float, *, starts: bool = True) -> Worker:
    """A member whose agent was lost with its node, and whose node is not ready since then."""
    pod = make_pod(2, node_ready=False, node_unready_since_s=since_s, node_starts=starts)
    return make_worker(2, Standing.LOST, pod=pod, session=make_session(2, connected=False))


@pytest.mark.parametrize(
    ("worker", "made_for", "due_s"),
    [
        pytest.param(rebooted(95.0), [], 115.0, id="its kubelet has started, and says not ready yet"),
        pytest.param(rebooted(80.0), [(2, 1)], None, id="its kubelet has said so for too long"),
        pytest.param(rebooted(95.0, starts=False), [(2, 1)], None, id="its kubelet is silent"),
    ],
)
def test_node_that_boots_keeps_its_workers(
    worker: Worker, made_for: list[tuple[int, int]], due_s: float | None
) -> None:
    got = changes(A, B, worker, blip_s=60.0, hello_timeout_s=20.0)
    assert (made(got), got.due_s) == (made_for, due_s)


def test_slot_that_is_put_off_has_no_pod_yet() -> None:
    assert made(changes(A, unmade=frozenset({2}))) == [(1, 0)]


def test_slot_whose_pods_fail_before_they_run_is_held_back() -> None:
    got = changes(A, B, held={2: 130.0, 7: 120.0})
    assert (made(got), got.due_s) == ([], 130.0)
    assert made(changes(A, B, held={2: 100.0})) == [(2, 0)]


GIVEN_UP = outside(1, available=False, session=make_session(1, Phase.READY, connected=False, entered=0, adopted_to=0))
UNSETTLED: dict[str, Any] = {"settled": False, "abandoned": frozenset({uid_of(1)})}


@pytest.mark.parametrize(
    ("worker", "given", "want"),
    [
        pytest.param(GIVEN_UP, {}, [uid_of(1)], id="given up, and took part in nothing"),
        pytest.param(GIVEN_UP, {"abandoned": frozenset()}, [], id="waited for"),
        pytest.param(GIVEN_UP, {"named": [MemberId(1, 0)]}, [], id="what it did in a generation that names it is not known (H9)"),
        pytest.param(
            outside(1, available=False, session=make_session(1, Phase.READY, connected=False, entered=2, adopted_to=0)), {}, [],
            id="its seal may be asked for",
        ),
        pytest.param(
            outside(1, available=False, session=make_session(1, Phase.READY, connected=False, entered=2, adopted_to=2)), {}, [],
            id="it may hold the state",
        ),
        pytest.param(outside(1, available=False, session=None), {}, [], id="it has told this operator nothing"),
    ],
)  # fmt: skip
def test_release_of_a_pod_that_was_given_up_before_all_have_adopted(
    worker: Worker, given: Any, want: list[str]
) -> None:
    got = changes(A, worker, outside(1, 1), **UNSETTLED | given)
    assert [p.uid for p in got.release] == want


NEW = make_session(1, Phase.READY, entered=0, adopted_to=0)


@pytest.mark.parametrize(
    ("first", "second", "given", "want"),
    [
        pytest.param(B, outside(1, 1, session=NEW), {}, [uid_of(1, 1)], id="it may hold the room that another slot waits for"),
        pytest.param(B, outside(1, 1, session=None, pod=make_pod(1, 1, phase="Pending", node="")), {}, [uid_of(1, 1)],
                     id="it has no node"),
        pytest.param(B, outside(1, 1, session=None), {}, [], id="it has one, and has told this operator nothing"),
        pytest.param(B, outside(1, 1, session=NEW), {"named": [MemberId(1, 1)]}, [], id="a generation names it"),
        pytest.param(B, outside(1, 1, session=make_session(1, Phase.READY, entered=2, adopted_to=0)), {}, [],
                     id="its seal may be asked for"),
        pytest.param(make_worker(1, available=False), outside(1, 1, session=NEW), {}, [], id="who has the slot may not come back"),
        pytest.param(make_worker(1, Standing.FORMING), outside(1, 1, session=NEW), {}, [], id="its generation may not form"),
        pytest.param(B, outside(1, 1, session=NEW), {"unsure": [uid_of(1)]}, [], id="it cannot reach others, or was set back"),
    ],
)  # fmt: skip
def test_release_of_a_pod_whose_slot_another_one_serves_before_all_have_adopted(
    first: Worker, second: Worker, given: Any, want: list[str]
) -> None:
    got = changes(A, first, second, **{"settled": False} | given)
    assert [p.uid for p in got.release] == want


def told(at_s: float) -> Worker:
    return make_worker(1, session=make_session(1, Phase.TRAINING, 1, told_outcome="Complete", told_stop_at_s=at_s))


def test_agent_that_was_told_to_stop_ends_within_its_own_bound_or_its_pod_is_deleted() -> None:
    """It is frozen, with an open stream."""
    assert ending.AFTER_SUSPEND_S >= ending.AFTER_STOP_S
    assert ENDS_WITHIN_S == ending.AFTER_SUSPEND_S + ending.AFTER_TERM_S + ending.UNKILLABLE_S
    least_s = ENDS_WITHIN_S + 20.0
    assert [p.uid for p in changes(A, told(100.0 - least_s), ended=True).delete] == [uid_of(1)]
    got = changes(A, told(100.0 - least_s + 1.0), ended=True)
    assert (got.delete, got.due_s) == ((), 101.0)
    assert changes(A, told(99.0), ended=True).due_s == 99.0 + SLOW_STOP_S, "it is named then"


def dead(closed_at_s: float | None = None, **of_pod: Any) -> Worker:
    """A worker whose trainer container does not run and whose agent is not connected, unless said otherwise."""
    session = None if closed_at_s is None else make_session(1, connected=False, closed_at_s=closed_at_s)
    return make_worker(1, Standing.SILENT, session=session, pod=make_pod(1, **{"running_since_s": None} | of_pod))


def called(at_s: float) -> Worker:
    """A worker whose agent has reported, and has opened no stream."""
    session = make_session(1, connected=False, condition_at_s=at_s)
    return make_worker(1, Standing.SILENT, session=session, pod=make_pod(1, running_since_s=None))


PULLING = outside(3, session=None, pod=make_pod(3, phase="Pending", running_since_s=None))
PENDING = outside(3, session=None, pod=make_pod(3, phase="Pending", node="", running_since_s=None))


@pytest.mark.parametrize(
    ("workers", "given", "want"),
    [
        pytest.param((A, outside(2)), {"released": frozenset({uid_of(2)})}, [uid_of(2)], id="released and still there"),
        pytest.param(
            (A, outside(2, pod=make_pod(2, terminating=True))), {"released": frozenset({uid_of(2)})}, [], id="going already"
        ),
        pytest.param(
            (A, outside(2, pod=make_pod(2, phase="Succeeded"))), {"released": frozenset({uid_of(2)})}, [uid_of(2)],
            id="ended before the deletion came through",
        ),
        pytest.param((A, PENDING), {"ended": True}, [uid_of(3)], id="never started and its job has ended"),
        pytest.param((A, PULLING), {"ended": True}, [uid_of(3)], id="its image is pulled and its job has ended"),
        pytest.param((A, PULLING), {"ended": True, "term_began_s": 81.0}, [], id="its agent may have called the one before"),
        pytest.param((A, replace(PULLING, pod=make_pod(3, phase="Pending", running_since_s=81.0))), {"ended": True}, [],
                     id="the image of its sidecar cannot be pulled, and its container runs"),
        pytest.param((A, PENDING), {}, [], id="not started yet"),
        pytest.param((A, B), {"ended": True}, [], id="an agent that is there is told, and exits"),
        pytest.param((dead(phase="Succeeded"),), {"ended": True}, [], id="what has ended keeps its logs"),
        pytest.param((dead(phase="Failed"),), {"ended": True}, [], id="what has failed, too"),
        pytest.param((dead(terminating=True),), {"ended": True}, [], id="going already though its job has ended"),
        pytest.param((dead(),), {"ended": True}, [uid_of(1)], id="its container waits to crash again, its agent is nowhere"),
        pytest.param((dead(),), {"ended": True, "term_began_s": 81.0}, [], id="its agent may have exited before this operator"),
        pytest.param((make_worker(1, pod=make_pod(1, phase="Pending")),), {"ended": True}, [],
                     id="Pending says the API yet, and its agent is there"),
        pytest.param((dead(closed_at_s=81.0, phase="Pending"),), {"ended": True}, [],
                     id="Pending says the API yet, and its agent has just stopped"),
        pytest.param((dead(running_since_s=81.0),), {"ended": True}, [], id="its container runs: its agent may call yet"),
        pytest.param((dead(running_since_s=80.0),), {"ended": True}, [uid_of(1)], id="its agent does not call"),
        pytest.param(
            (dead(running_since_s=1.0),), {"ended": True, "term_began_s": 81.0}, [], id="its agent may call this operator yet"
        ),
        pytest.param(
            (dead(running_since_s=1.0),), {"ended": True, "term_began_s": 80.0}, [uid_of(1)], id="it does not call this one, either"
        ),
        pytest.param((dead(closed_at_s=81.0),), {"ended": True}, [], id="its agent has just stopped"),
        pytest.param((dead(closed_at_s=80.0),), {"ended": True}, [uid_of(1)], id="its agent has stopped, a sidecar runs on"),
        pytest.param((called(81.0),), {"ended": True}, [], id="its agent has called a moment ago, and has no stream yet"),
        pytest.param((called(80.0),), {"ended": True}, [uid_of(1)], id="it never had one, and says nothing new"),
        pytest.param((dead(closed_at_s=80.0),), {}, [], id="nobody is given up while the job runs"),
    ],
)  # fmt: skip
def test_deletion(workers: tuple[Worker, ...], given: Any, want: list[str]) -> None:
    assert [p.uid for p in changes(*workers, **given).delete] == want


def test_ended_job_is_looked_at_when_the_next_pod_is_given_up() -> None:
    late = make_worker(2, Standing.SILENT, session=None, pod=make_pod(2, running_since_s=99.0))
    assert changes(A, dead(closed_at_s=90.0), late, ended=True).due_s == 110.0
    assert changes(A, dead(closed_at_s=80.0), ended=True).due_s is None
    assert changes(A, dead(running_since_s=1.0), ended=True, term_began_s=95.0).due_s == 115.0


@pytest.mark.parametrize(
    ("pod", "want"),
    [
        pytest.param(make_pod(1, spec_digest="new"), [], id="made from the spec as it is"),
        pytest.param(make_pod(1, spec_digest="old"), [uid_of(1)], id="made from an earlier one"),
        pytest.param(make_pod(1, spec_digest="old", phase="Pending"), [uid_of(1)], id="its image cannot be pulled"),
        pytest.param(
            make_pod(1, spec_digest="old", terminating=True), [uid_of(1)], id="going, but its agent may be ready"
        ),
        pytest.param(make_pod(1, spec_digest="old", phase="Failed"), [], id="dead: replaced anyway, its logs stay"),
        pytest.param(make_pod(1), [], id="of unknown origin"),
    ],
)
def test_outdated(pod: Pod, want: list[str]) -> None:
    assert outdated([pod], "new") == want
