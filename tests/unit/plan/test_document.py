"""The document of the next generation: what it carries of those before (rule 2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.document import CheckpointRef, Document, LineageEntry, MemberSeal, Store
from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId, format_members, parse_members
from regroup_operator.model.worker import Announce, Current, Standing, Worker
from regroup_operator.plan.facts.peers import with_peers
from regroup_operator.plan.generation.document import Header, build_document
from tests.builders.plan import (
    make_current,
    make_fault,
    make_older,
    make_pod,
    make_seal,
    make_session,
    make_worker,
    uid_of,
)

A, B, C = make_worker(0), make_worker(1), make_worker(2)
NEW_A, NEW_B = (make_worker(slot, session=make_session(slot)) for slot in (0, 1))


def build(
    members: tuple[Worker, ...] = (A, B), current: Current | None = None, workers: Any = None, **given: Any
) -> Document:
    announce = given.pop("announce", Announce("forced", members, "MemberLost", "why"))
    values: dict[str, Any] = {
        "job_uid": "job",
        "uid": "fresh",
        "processes": 2,
        "checkpoint": None,
        "session_tier": True,
    }
    return build_document(announce, current, workers or members, Header(**values | given))


def test_first_document() -> None:
    got = build((NEW_A, NEW_B))
    assert (got.number, got.uid, got.older, got.lost, got.world_size) == (1, "fresh", (), (), 4)
    assert [(m.slot, m.pod, m.pod_uid, m.incarnation, m.host, m.processes) for m in got.members] == [
        (0, "digits-worker-0-0", uid_of(0), 1, "10.0.0.0", 2), (1, "digits-worker-1-0", uid_of(1), 1, "10.0.0.1", 2),
    ]  # fmt: skip


def test_document_names_a_port_for_each_process_where_the_framework_lists_them() -> None:
    workers = tuple(make_worker(slot, session=make_session(slot, ports=(7000 + slot, 7100 + slot))) for slot in (0, 1))
    assert [member.ports for member in build(workers, has_ports=True).members] == [(7000, 7100), (7001, 7101)]
    assert [member.ports for member in build(workers).members] == [None, None]
    with pytest.raises(ValueError, match="no port for each of its processes"):
        build((workers[0], NEW_B), has_ports=True)


def test_document_carries_checkpoint_and_lineage() -> None:
    ref, lineage = CheckpointRef(1, 5, "step-5.g1-x"), (LineageEntry(1, 0),)
    got = build(current=make_current((0, 1), lineage=lineage), checkpoint=ref)
    assert (got.number, got.checkpoint, got.lineage, got.imported) == (2, ref, lineage, None)


OLD = make_older(1, uid_of(0), uid_of(1), uid_of(2))


@pytest.mark.parametrize(
    ("current", "workers", "older", "lost"),
    [
        pytest.param(make_current(), (A, B, C), [1], (), id="the newest, once all have adopted it, is the only older one"),
        pytest.param(make_current(number=3, adopted=False, older=(OLD,)), (A, B, C), [3, 1], (), id="else those before it, too"),
        pytest.param(make_current(), (A, B), [1], ("gone/2.0",), id="a member whose pod is gone is lost"),
        pytest.param(
            make_current(), (A, B, make_worker(2, pod=make_pod(2, phase="Failed"))), [1], (uid_of(2),), id="and one that failed"
        ),
        pytest.param(
            make_current((0, 1), number=3, adopted=False, older=(make_older(1, uid_of(0), "gone/4.2"),)), (A, B), [3, 1],
            ("gone/4.2",), id="of older generations, too",
        ),
    ],
)  # fmt: skip
def test_older_and_lost(current: Current, workers: tuple[Worker, ...], older: list[int], lost: tuple[str, ...]) -> None:
    got = build(current=current, workers=workers)
    assert ([o.number for o in got.older], got.lost) == (older, lost)


def sealed(slot: int, left: int, adopted: int, state: tuple[int, int] | None = None, **changes: Any) -> Worker:
    seal = make_seal(
        left, state, adopted=adopted, state_adopted=adopted if state else 0, is_backup=changes.pop("is_backup", False)
    )
    session = make_session(slot, Phase.BROKEN, left, seal=seal, connected=changes.pop("connected", True))
    return make_worker(slot, Standing.BROKEN, session=session, **changes)


GROUP_3 = make_current((0, 1), number=3, adopted=False, older=(make_older(1, uid_of(0), uid_of(1)),))


@pytest.mark.parametrize(
    ("workers", "older"),
    [
        pytest.param(
            (sealed(0, 3, 1), sealed(1, 3, 1)), [1], id="all left it without having adopted: it never stepped"
        ),
        pytest.param((sealed(0, 3, 1), sealed(1, 3, 3)), [3, 1], id="one adopted it: it may have"),
        pytest.param((sealed(0, 3, 1), B), [3, 1], id="one has promised nothing"),
        pytest.param((sealed(0, 2, 1), sealed(1, 3, 1)), [3, 1], id="a promise of an older one is none for this"),
        pytest.param((sealed(0, 3, 1),), [1], id="the other is gone with what it may have held"),
        pytest.param((sealed(2, 3, 1),), [3, 1], id="nobody of it is left: it may have stepped"),
    ],
)
def test_generation_that_never_stepped_is_not_carried_on(workers: tuple[Worker, ...], older: list[int]) -> None:
    """So that a group which fails to form for hours does not fill the status."""
    got = build(members=workers, current=GROUP_3, workers=workers)
    assert [o.number for o in got.older] == older


def test_seals_are_of_all_who_can_be_reached_and_of_older_members_who_cannot() -> None:
    away = sealed(1, 3, 1, (1, 9), connected=False)
    stranger = sealed(7, 3, 1, (1, 9), is_backup=True)
    strange_and_away = sealed(8, 3, 1, (1, 9), connected=False)
    got = build(members=(A,), current=GROUP_3, workers=(A, away, stranger, strange_and_away))
    state = make_seal(3, (1, 9)).state
    assert got.seals == (MemberSeal(uid_of(1), 3, state, 1, 1), MemberSeal(uid_of(7), 3, state, 1, 1, is_backup=True))


def test_workers_that_have_not_told_what_they_hold_are_named() -> None:
    """Rule BEST. Members bring what they hold themselves."""
    silent, member = replace(C, silent_until_s=110.0), replace(A, silent_until_s=110.0)
    got = build(members=(member, B), current=make_current(), workers=(member, B, silent))
    assert got.silent == (uid_of(2),)


def test_number_is_above_what_any_agent_has_heard() -> None:
    """A status that was restored from a backup names an older generation than there has been."""
    heard = make_worker(2, session=make_session(2, heard=7))
    assert build(current=make_current(number=3), workers=(A, B, heard)).number == 8


@pytest.mark.parametrize(
    ("newest", "session_tier", "host"),
    [
        pytest.param(1, True, 0, id="an even generation of two workers: rank 0's hosts the store"),
        pytest.param(2, True, 1, id="the next number moves it, as after a form that failed"),
        pytest.param(3, True, 0, id="and back"),
        pytest.param(2, False, 0, id="a script's MASTER_ADDR is always rank 0's"),
    ],
)
def test_store_host(newest: int, session_tier: bool, host: int) -> None:
    got = build(current=make_current((0, 1), number=newest, adopted=False), session_tier=session_tier)
    assert (got.store.pod_uid, got.store.port, got.store.host) == (uid_of(host), 4000 + host, f"10.0.0.{host}")


@pytest.mark.parametrize("newest", [1, 2])
def test_one_that_joins_hosts_the_store_of_a_planned_generation(newest: int) -> None:
    """Rule JOIN: the joiners meet there before the others leave their group."""
    joiner = make_worker(2, Standing.OUTSIDE)
    planned = Announce("planned", (A, B, joiner), "Resized", "why")
    got = build((A, B, joiner), current=make_current((0, 1), number=newest), announce=planned)
    assert got.store.pod_uid == uid_of(2)


@pytest.mark.parametrize(
    ("before", "members", "host"),
    [
        pytest.param(Store("10.0.0.0", 4000, uid_of(0)), (A, B), 1, id="the other one, whose turn it is not"),
        pytest.param(Store("10.0.0.0", 3999, uid_of(0)), (A, B), 0, id="its agent has said the port of the next one"),
        pytest.param(Store("10.0.0.0", 4000, uid_of(2)), (A, B), 0, id="the same port of another pod"),
        pytest.param(Store("10.0.0.0", 4000, uid_of(0)), (A,), 0, id="there is no other"),
    ],
)
def test_socket_of_the_newest_store_may_be_given_away_already(
    before: Store, members: tuple[Worker, ...], host: int
) -> None:
    current = make_current((0, 1), number=1, adopted=False)
    newest = replace(build(current=current), store=before)
    assert build(members, current=current, workers=(A, B), before=newest).store.pod_uid == uid_of(host)


def test_only_joiner_hosts_the_store_although_its_socket_may_be_given_away() -> None:
    """Rule JOIN: it has to arrive before the others leave."""
    joiner = make_worker(2, Standing.OUTSIDE)
    planned = Announce("planned", (A, joiner), "Drained", "why")
    newest = replace(build(), store=Store("10.0.0.2", 4002, uid_of(2)))
    got = build((A, joiner), current=make_current((0, 1)), announce=planned, before=newest)
    assert got.store.pod_uid == uid_of(2)


NO_PORT = make_worker(0, session=make_session(0, store_port=0))
NO_IP = make_worker(0, pod=make_pod(0, ip=""))


@pytest.mark.parametrize("worker", [NO_PORT, NO_IP], ids=["no socket", "no address yet"])
def test_store_needs_a_socket_and_an_address(worker: Worker) -> None:
    assert build(members=(worker, B)).store.pod_uid == uid_of(1)
    with pytest.raises(ValueError, match="no member has a socket"):
        build(members=(worker,))
    with pytest.raises(ValueError, match="no member has a socket"):
        build(members=(worker, B), session_tier=False)


def test_peers_of_faults_get_their_uid_and_keep_it() -> None:
    document = build((NEW_A, NEW_B))
    fault = make_fault(peer_rank=3)
    sessions = {uid_of(0): make_session(0, fault=fault, fault_generation=1), uid_of(1): make_session(1)}
    named, peers = with_peers(sessions, document, {})
    assert named[uid_of(0)].fault == make_fault(peer_rank=3, peer=uid_of(1))
    assert peers == {uid_of(0): (1, uid_of(1))}
    later, _ = with_peers(sessions, None, peers)  # the document is not known any more
    assert later[uid_of(0)].fault == named[uid_of(0)].fault
    newer, _ = with_peers(sessions, replace(document, number=2), peers)
    assert newer[uid_of(0)].fault == fault, "nobody asks whom it lost before"
    assert with_peers({uid_of(1): make_session(1)}, None, peers)[1] == {}


@pytest.mark.parametrize(
    ("members", "text"),
    [
        pytest.param([], "", id="nobody"),
        pytest.param([(0, 0), (1, 0), (2, 0)], "0-2", id="a range"),
        pytest.param([(0, 0), (1, 0), (3, 0)], "0-1,3", id="a hole"),
        pytest.param([(0, 0), (1, 2), (2, 0), (3, 0)], "0,1.2,2-3", id="a later pod of a slot"),
        pytest.param([(5, 1)], "5.1", id="one"),
    ],
)
def test_members_are_spelled_shortly(members: list[tuple[int, int]], text: str) -> None:
    ids = [MemberId(*m) for m in members]
    assert format_members(reversed(ids)) == text
    assert list(parse_members(text)) == ids


def test_positions_of_all_that_may_hold_a_state_are_in_the_document() -> None:
    """Slot 3 has no pod any more; 5 has sealed and 4 says nothing."""
    sealed = make_worker(5, Standing.OUTSIDE, session=make_session(5, seal=make_seal(0, None)))
    silent = make_worker(4, Standing.OUTSIDE, silent_until_s=200.0)
    workers = (make_worker(0), make_worker(1), sealed, silent)
    current = make_current((0, 3, 2, 1))
    got = build(workers[:2], current, workers, per_group=2)
    assert [(uid, got.older[0].position(uid)) for uid in got.older[0].pod_uids] == [
        (uid_of(0), 0), ("gone/3.0", 1), ("gone/2.0", 0), (uid_of(1), 1)
    ]  # fmt: skip
    assert [(s.pod_uid, s.position) for s in got.seals] == [(uid_of(5), 1)]
    assert (got.silent, got.silent_positions) == ((uid_of(4),), (0,))
    alone = build(workers[:2], current, workers)
    assert (alone.older[0].positions, alone.seals[0].position, alone.silent_positions) == (None, None, None)


def test_members_of_groups_are_written_in_their_order() -> None:
    ids = [MemberId(0, 0), MemberId(3, 0), MemberId(4, 0), MemberId(2, 1), MemberId(1, 0)]
    assert format_members(ids, in_order=True) == "0,3-4,2.1,1"
    assert list(parse_members("0,3-4,2.1,1")) == ids
