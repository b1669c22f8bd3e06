"""What one plan leaves for the next: what belongs to pods and slots that are gone is forgotten, in one place."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Clock, Counted, SlotMemory, Spell, WorkerMemory
from regroup_operator.model.pod_row import PodRow
from tests.builders.plan import counted, make_pod, remembered, uid_of
from tests.unit.plan.test_job import job, plan

ROW = PodRow(3, 2, 99.0)
GONE = "uid-of-a-pod-that-is-gone"


def test_each_pod_there_is_has_a_memory_and_no_other() -> None:
    before = remembered(
        {GONE: WorkerMemory(Counted(exits=3), (1, uid_of(0)), Spell("behind", 0.0), None, True, 1.0, True)}
    )
    got = plan(memory=before).memory
    assert got.workers.keys() == {uid_of(0), uid_of(1)}
    assert got.has_looked


def test_what_one_look_has_counted_is_counted_at_the_next() -> None:
    got = plan(memory=remembered(counted(exits=2, boot_id="first"))).memory
    assert got.workers[uid_of(0)].counted == Counted(exits=0, boot_id="first"), "as many as its session has"
    assert got.workers[uid_of(1)].counted == Counted()


@pytest.mark.parametrize(
    "slot",
    [
        pytest.param(SlotMemory(failed=ROW), id="pods that failed before they ran"),
        pytest.param(SlotMemory(disrupted=ROW), id="pods that were evicted"),
        pytest.param(SlotMemory(given_back=ROW), id="pods that found no node"),
        pytest.param(SlotMemory(failed_on="node-1"), id="the node of the last failure"),
        pytest.param(SlotMemory(bad_node=("node-1", -1e6)), id="a node that was avoided long ago"),
    ],
)
@pytest.mark.parametrize(("number", "kept"), [(1, True), (7, False)], ids=["a slot of the job", "a slot that is gone"])
def test_slot_that_the_job_has_no_more_is_forgotten(slot: SlotMemory, number: int, kept: bool) -> None:
    spec: dict[str, Any] = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4, "pendingTimeoutSeconds": 60}}
    only_one = (make_pod(0),)
    got = plan(job().with_spec(**spec), pods=only_one, memory=remembered(slots={number: slot}))
    assert got.memory.slots == ({number: slot} if kept else {})


def test_slot_that_the_job_has_no_more_still_avoids_its_node_for_a_while() -> None:
    slot = SlotMemory(bad_node=("node-1", 99.0))
    assert plan(pods=(make_pod(0),), memory=remembered(slots={7: slot})).memory.slots == {7: slot}


@pytest.mark.parametrize(
    ("pair", "kept"),
    [
        pytest.param({uid_of(0), uid_of(1)}, True, id="both are there"),
        pytest.param({uid_of(0), GONE}, True, id="the peer is gone, so that the other one may join again"),
        pytest.param({GONE, "another"}, False, id="both are gone"),
    ],
)
def test_broken_link_is_forgotten_with_both_its_ends(pair: set[str], kept: bool) -> None:
    got = plan(memory=remembered(links=frozenset({frozenset(pair)})))
    assert got.memory.links == ({frozenset(pair)} if kept else frozenset())


@pytest.mark.parametrize(
    ("member", "kept"),
    [
        pytest.param(MemberId(0, 1), True, id="it may still appear"),
        pytest.param(MemberId(0, 0), False, id="it is there"),
        pytest.param(MemberId(1, 2), False, id="another one was made instead"),
    ],
)
def test_pod_that_was_asked_for_is_waited_for_until_it_or_a_later_one_is_there(member: MemberId, kept: bool) -> None:
    pods = (make_pod(0), make_pod(1, 3))
    got = plan(pods=pods, sessions=(), memory=remembered(created=frozenset({member})))
    assert (member in got.memory.created) == kept


def test_memory_does_not_grow_while_pods_come_and_go() -> None:
    memory = remembered()
    for attempt in range(50):
        pods = tuple(make_pod(slot, attempt, phase="Failed", last_exit_code=137) for slot in (0, 1))
        memory = plan(
            pods=pods, sessions=(), memory=memory, clock=Clock(100.0 + attempt, 1_800_000_100.0 + attempt)
        ).memory
    assert (len(memory.workers), len(memory.slots)) == (2, 2)
    assert len(memory.created) <= 2
