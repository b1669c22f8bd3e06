"""Who is told of a planned generation, and when (rule JOIN)."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol.document import FORCED, PLANNED, Document, Member, Store
from regroup.protocol.state import Phase
from regroup.protocol.wire import DocumentCommand, Generation, Ping
from regroup_operator.model.records import AgentSession
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.commands import Briefing, plan_commands, script_due_s
from regroup_operator.plan.facts.stalls import SCRIPT_ANSWER_S, SCRIPT_ASK_EVERY_S
from tests.builders.plan import JOB_UID, make_pod, make_session, make_worker, uid_of

NUMBER = 2
NOW_S = 100.0


def document(kind: str, *slots: int, host: int) -> Document:
    members = tuple(Member(slot, f"digits-worker-{slot}-0", uid_of(slot), 1, f"10.0.0.{slot}", 1) for slot in slots)
    store = Store(f"10.0.0.{host}", 4000, uid_of(host))
    return Document(NUMBER, "g2", JOB_UID, kind, members, store)


def trains(slot: int) -> Worker:
    """A worker that trains in generation 1."""
    return make_worker(slot, Standing.PENDING, session=make_session(slot, Phase.TRAINING, 1))


def joins(slot: int, phase: str, generation: int = 0, **session: Any) -> Worker:
    return make_worker(slot, Standing.PENDING, session=make_session(slot, phase, generation, **session))


def told(workers: list[Worker], document: Document, tier: str = "Session") -> list[str]:
    briefing = Briefing(
        workers=workers, tier=tier, document=document, released=frozenset(), stop=None, stalled=False, now_s=0.0
    )
    commands = plan_commands(briefing)
    return [tell.pod_uid for tell in commands if isinstance(tell.body, Generation)]


JOINED = document(PLANNED, 0, 1, 2, host=2)


@pytest.mark.parametrize(
    ("joiner", "want"),
    [
        pytest.param(joins(2, Phase.READY), [2], id="the joiner hears first"),
        pytest.param(joins(2, Phase.READY, heard=NUMBER, told_generation=NUMBER), [], id="it has heard"),
        pytest.param(joins(2, Phase.FORMING, NUMBER, told_generation=NUMBER), [], id="it is on its way"),
        pytest.param(joins(2, Phase.ARRIVED, NUMBER, told_generation=NUMBER), [0, 1], id="it has arrived: the others hear"),
        pytest.param(joins(2, Phase.ADOPTING, NUMBER, told_generation=NUMBER), [0, 1], id="it is further than that"),
        pytest.param(joins(2, Phase.STARTING, told_generation=NUMBER), [], id="its process has ended"),
        pytest.param(joins(2, Phase.ARRIVED, NUMBER - 1, told_generation=NUMBER), [], id="it arrived in the one before"),
    ],
)  # fmt: skip
def test_those_that_train_hear_once_the_joiner_has_arrived(joiner: Worker, want: list[int]) -> None:
    assert told([trains(0), trains(1), joiner], JOINED) == [uid_of(slot) for slot in want]


def test_member_whose_group_broke_meanwhile_hears_at_once() -> None:
    broken = make_worker(1, Standing.PENDING, session=make_session(1, Phase.BROKEN, 1))
    assert told([trains(0), broken, joins(2, Phase.READY)], JOINED) == [uid_of(1), uid_of(2)]


def test_worker_that_leaves_hears_with_those_that_stay() -> None:
    leaver = make_worker(3, Standing.OUTSIDE, session=make_session(3, Phase.TRAINING, 1))
    arrived = joins(2, Phase.ARRIVED, NUMBER, told_generation=NUMBER)
    assert told([trains(0), trains(1), joins(2, Phase.READY), leaver], JOINED) == [uid_of(2)]
    assert told([trains(0), trains(1), arrived, leaver], JOINED) == [uid_of(0), uid_of(1), uid_of(3)]


def test_nobody_waits_where_nobody_joins_or_the_generation_is_forced_or_a_script_is_restarted() -> None:
    everybody = [trains(0), trains(1), joins(2, Phase.READY)]
    assert told([trains(0), trains(1), trains(2)], JOINED) == [uid_of(slot) for slot in (0, 1, 2)]
    assert told(everybody, document(FORCED, 0, 1, 2, host=0)) == [uid_of(slot) for slot in (0, 1, 2)]
    assert told(everybody, JOINED, tier="Script") == [uid_of(slot) for slot in (0, 1, 2)]


@pytest.mark.parametrize(
    ("lists_members", "want"),
    [
        pytest.param(False, [1], id="the store's host"),
        pytest.param(True, [0, 1], id="every member where the framework lists them, and nobody else"),
    ],
)
def test_who_gets_the_document(lists_members: bool, want: list[int]) -> None:
    briefing = Briefing(
        workers=[trains(0), trains(1), joins(2, Phase.READY)], tier="Script", document=document(FORCED, 0, 1, host=1),
        released=frozenset(), stop=None, stalled=False, now_s=0.0, lists_members=lists_members,
    )  # fmt: skip
    commands = list(plan_commands(briefing))
    assert [tell.pod_uid for tell in commands if isinstance(tell.body, DocumentCommand)] == [uid_of(w) for w in want]
    for uid in map(uid_of, want):
        bodies = [type(tell.body) for tell in commands if tell.pod_uid == uid]
        assert bodies.index(Generation) < bodies.index(DocumentCommand)


@pytest.mark.parametrize(
    ("lists_members", "entered", "want"),
    [
        pytest.param(True, 0, True, id="the list may be lost with the stream"),
        pytest.param(True, NUMBER, False, id="its processes have started"),
        pytest.param(False, 0, False, id="it needs no list"),
    ],
)
def test_member_that_has_heard_is_told_again_on_a_new_stream(lists_members: bool, entered: int, want: bool) -> None:
    briefing = Briefing(
        workers=[joins(0, Phase.READY, heard=NUMBER, entered=entered)], tier="Script",
        document=document(FORCED, 0, 1, host=1), released=frozenset(), stop=None, stalled=False, now_s=0.0,
        lists_members=lists_members,
    )  # fmt: skip
    assert any(isinstance(tell.body, DocumentCommand) for tell in plan_commands(briefing)) is want


@pytest.mark.parametrize(
    ("session", "asked"),
    [
        pytest.param(make_session(1, Phase.TRAINING, 1), True, id="who must answer is asked"),
        pytest.param(
            make_session(1, Phase.TRAINING, 1, asked_at_s=NOW_S), True, id="also if it was asked a moment ago"
        ),
        pytest.param(make_session(1, Phase.TRAINING, 1, unanswered_since_s=NOW_S), False, id="once"),
        pytest.param(make_session(1, Phase.TRAINING, 1, connected=False), False, id="nobody hears"),
    ],
)
def test_who_must_answer_before_a_generation_names_it_is_asked(session: AgentSession, asked: bool) -> None:
    others = [trains(0), make_worker(1, session=session)]
    briefing = Briefing(
        workers=others, tier="Session", document=None, released=frozenset(), stop=None, stalled=False, now_s=NOW_S,
        ask=frozenset({uid_of(1)}),
    )  # fmt: skip
    commands = plan_commands(briefing)
    assert [tell.pod_uid for tell in commands if isinstance(tell.body, Ping)] == ([uid_of(1)] if asked else [])


@pytest.mark.parametrize(
    ("session", "due_s"),
    [
        pytest.param(
            make_session(heard_at_s=40.0), 40.0 + SCRIPT_ASK_EVERY_S, id="asked when it has said nothing for a while"
        ),
        pytest.param(
            make_session(heard_at_s=40.0, unanswered_since_s=90.0),
            90.0 + SCRIPT_ANSWER_S,
            id="silent when it has not answered",
        ),
    ],
)
def test_when_the_agent_of_a_script_is_looked_at_again(session: AgentSession, due_s: float) -> None:
    assert script_due_s(session) == due_s


# --- observers -----------------------------------------------------------------------------------------------------


def on_node(slot: int, node: str, **session: Any) -> Worker:
    """A worker that trains on a node and was heard last at 90 s unless said otherwise."""
    values = {"heard_at_s": 90.0} | session
    return make_worker(slot, pod=make_pod(slot, node=node), session=make_session(slot, Phase.TRAINING, 1, **values))


def asked(workers: list[Worker], suspected: dict[str, float]) -> list[int]:
    """Return the slots of those that are asked whether they are there."""
    briefing = Briefing(
        workers=workers, tier="Session", document=None, released=frozenset(), stop=None, stalled=False, now_s=NOW_S,
        suspected=suspected,
    )  # fmt: skip
    commands = plan_commands(briefing)
    uids = [tell.pod_uid for tell in commands if isinstance(tell.body, Ping)]
    return [w.id.slot for w in workers if w.pod is not None and w.pod.uid in uids]


@pytest.mark.parametrize(
    ("others", "want"),
    [
        pytest.param([], [0], id="who is suspected is asked at once"),
        pytest.param([on_node(1, "a")], [0, 1], id="and who is on its node"),
        pytest.param(
            [on_node(1, "b")], [0, 1], id="and in a small job everybody, or the next generation waits for them"
        ),
        pytest.param([on_node(1, "b", heard_at_s=99.5)], [0], id="but nobody who has spoken since"),
        pytest.param([on_node(1, "a", unanswered_since_s=99.0)], [0], id="nor again who has not answered"),
        pytest.param([on_node(1, "a"), *(on_node(s, "b") for s in range(2, 60))], [0, 1], id="in a large job its node"),
    ],
)
def test_who_is_asked_once_an_observer_hears_nothing(others: list[Worker], want: list[int]) -> None:
    assert asked([on_node(0, "a"), *others], {uid_of(0): 99.4}) == want


@pytest.mark.parametrize(
    ("heard_s", "want"),
    [
        pytest.param(99.9, [], id="it has answered, and is not asked at every look"),
        pytest.param(98.9, [0], id="but again after a while: its node may lose its power later"),
    ],
)
def test_who_answers_and_is_suspected_is_asked_again_after_a_while(heard_s: float, want: list[int]) -> None:
    assert asked([on_node(0, "a", heard_at_s=heard_s), on_node(1, "b", heard_at_s=99.9)], {uid_of(0): 95.0}) == want


def test_generation_tells_each_member_whom_it_observes_and_others_nobody() -> None:
    workers = [
        make_worker(slot, Standing.PENDING, pod=make_pod(slot, node=f"n{slot}"),
                    session=make_session(slot, Phase.READY, observed_port=7000 + slot))
        for slot in range(4)
    ]  # fmt: skip
    briefing = Briefing(
        workers=workers, tier="Session", document=document(FORCED, 0, 1, 2, host=0), released=frozenset(), stop=None,
        stalled=False, now_s=NOW_S,
    )  # fmt: skip
    commands = plan_commands(briefing)
    told = {t.pod_uid: t.body for t in commands if isinstance(t.body, Generation)}
    observed = {uid: [one.pod_uid for one in body.observes] for uid, body in told.items()}
    assert observed == {
        uid_of(0): [uid_of(1), uid_of(2)],
        uid_of(1): [uid_of(0), uid_of(2)],
        uid_of(2): [uid_of(0), uid_of(1)],
        uid_of(3): [],
    }
