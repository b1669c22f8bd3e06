"""What must hold for every decision, over all small inputs: three slots, every standing, every bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from regroup.protocol.document import FORCED, PLANNED
from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.records import Settings
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Announce, Bounds, Current, Keep, Refusal, Situation, Standing, Wait, Worker
from regroup_operator.plan.generation.decision import next_generation
from regroup_operator.plan.pods.wanted import Roster, plan_workers
from tests.builders.plan import make_current, make_fault, make_pod, make_seal, make_session, make_worker, uid_of

NOW_S = 100.0
STANDINGS = ["training", "pending", "starting", "forming", "finished", "broken", "broken link", "died", "back", "silent",
             "unknown", "lost", "draining"]  # fmt: skip
JOINERS = ["none", "ready", "coming", "double"]


def member(slot: int, kind: str) -> Worker:
    other = uid_of((slot + 1) % 3)
    if kind == "silent":
        session = make_session(slot, Phase.TRAINING, 1, connected=False)
        return make_worker(slot, Standing.SILENT, session=session, lost_at_s=101.0)
    if kind == "unknown":
        return make_worker(slot, Standing.SILENT, session=None, since_s=97.0, lost_at_s=117.0)
    if kind == "lost":
        return make_worker(slot, Standing.LOST, pod=None, session=None, why="PodDeleted")
    if kind == "draining":
        return make_worker(slot, Standing.TRAINING, pod=make_pod(slot, terminating=True))
    if kind == "died":
        return make_worker(slot, Standing.DIED, why="ProcessExited")
    if kind == "back":
        return make_worker(slot, Standing.DIED, available=True, why="ProcessExited")
    if kind.startswith("broken"):
        fault = make_fault(peer=other if kind == "broken link" else None)
        session = make_session(
            slot, Phase.BROKEN, 1, fault=fault, fault_generation=1, fault_at_s=90.0, seal=make_seal(1, (1, slot))
        )
        return make_worker(slot, Standing.BROKEN, session=session, since_s=90.0)
    return make_worker(slot, kind)


def joiners(kind: str) -> list[Worker]:
    if kind == "ready":
        return [make_worker(3, Standing.OUTSIDE), make_worker(1, Standing.OUTSIDE, 1)]
    if kind == "coming":
        return [make_worker(3, Standing.OUTSIDE, available=False)]
    if kind == "double":
        return [
            make_worker(0, Standing.OUTSIDE, 1),
            make_worker(0, Standing.OUTSIDE, 2),
            make_worker(4, Standing.OUTSIDE),
        ]
    return []


CURRENTS = [
    make_current(),
    make_current(adopted=False, announced_at_s=99.0),
    make_current(adopted=False, announced_at_s=10.0, attempts=3),
    make_current(adopted=False, announced_at_s=10.0, kind=PLANNED),
    make_current(adopted=False, announced_at_s=99.0, has_document=False),
]
BOUNDS = [
    Bounds(3, 2, True),
    Bounds(5, 1, True, rejoin_s=2.0),
    Bounds(2, 1, True),
    Bounds(3, 3, False),
    Bounds(2, 1, True, spares=1),
    Bounds(2, 2, False, spares=1),
    Bounds(4, 2, True, permitted=(2, 4)),
    Bounds(3, 1, True, permitted=(1, 3, 8)),
    Bounds(4, 2, True, session=False, permitted=range(2, 9, 2)),
]
SETTINGS = Settings()


def check(current: Current, workers: tuple[Worker, ...], bounds: Bounds, refused: frozenset[str] | None) -> None:
    refusal = None if refused is None else Refusal(refused)
    known = Situation(workers=workers, bounds=bounds, refusal=refusal, now_s=NOW_S, settings=SETTINGS)
    got = next_generation(current, known)
    if isinstance(got, Wait | Keep):
        assert isinstance(got.until, UntilEvent) or got.until > NOW_S, "it would be looked at again at once"
        return
    assert isinstance(got, Announce)
    members = got.members
    assert bounds.minimum <= len(members) <= bounds.replicas, "between minReplicas and replicas"
    assert len({w.id.slot for w in members}) == len(members), "one pod of a slot"
    assert list(members) == sorted(members, key=lambda w: w.id)
    hands_over = got.kind == PLANNED and bounds.session and all(w.draining for w in workers if w.is_member)
    assert hands_over or bounds.fitting(len(members)) == len(members), "a size that the job may train with"
    if got.kind == FORCED:
        assert all(w.connected and w.available for w in members), "forced: only members with an open stream"
    else:
        old = [w for w in workers if w.is_member]
        assert current.adopted, "planned: only from a generation that all have adopted"
        assert not any(w.standing in (Standing.FINISHED, Standing.LOST, Standing.DIED, Standing.BROKEN) for w in old)
        assert any(w.is_member for w in members), "planned: somebody holds the state"
        assert all(w.is_member or w.available for w in members), "planned: joiners are ready"
        assert {w.id for w in members} != {w.id for w in old}, "planned: something changes"


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("current", CURRENTS, ids=["adopted", "young", "old", "planned", "unknown"])
def test_every_decision_keeps_the_rules(current: Current, bounds: Bounds) -> None:
    kinds = [STANDINGS, STANDINGS, ("training", "broken link", "lost")]
    tables = [[member(slot, kind) for kind in kinds[slot]] for slot in range(3)]
    for members in product(*tables):
        for kind in JOINERS:
            workers = tuple(sorted([*members, *joiners(kind)], key=lambda w: w.id))
            check(current, workers, bounds, None)
        check(current, members, bounds, frozenset({"tried"}))


def test_no_number_is_used_twice_and_nobody_is_released_early() -> None:
    """plan_workers over all small inputs."""
    pods = [
        None,
        make_pod(1),
        make_pod(1, phase="Failed"),
        make_pod(1, terminating=True),
        make_pod(1, node_ready=False),
        make_pod(1, 2),
    ]
    named_sets: list[tuple[MemberId, ...]] = [(), (MemberId(1, 0),), (MemberId(1, 4), MemberId(0, 0))]
    for pod, standing, named, settled, slots in product(
        pods, (Standing.TRAINING, Standing.SILENT, Standing.OUTSIDE), named_sets, (True, False), (1, 2, 3)
    ):
        worker = make_worker(1, standing, pod=pod)
        if pod is not None:
            worker = replace(worker, id=pod.id)
        if standing == Standing.SILENT:
            worker = replace(worker, session=None)
        workers = (make_worker(0), worker)
        roster = Roster(
            workers=workers, released=frozenset(), named=named, bad_nodes={}, now_s=100.0, hello_timeout_s=20.0
        )
        got = plan_workers(roster, slots=slots, settled=settled)
        used = {w.id for w in workers if w.pod} | set(named)
        for create in got.create:
            assert create.slot < slots
            assert all(create.attempt > attempt for slot, attempt in used if slot == create.slot)
        assert settled or not got.release
        for gone in got.release:
            assert worker.pod == gone
            assert not worker.is_member
        assert not got.delete
