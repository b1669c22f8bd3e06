"""The next generation: who, why, or what is waited for. Ids are sentences; the reason is part of the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.document import FORCED, PLANNED
from regroup.protocol.state import Busy, Phase, StatePair
from regroup_operator.api.members import MemberId
from regroup_operator.model.records import Settings
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import (
    Announce,
    Bounds,
    Current,
    Decision,
    Keep,
    Refusal,
    Situation,
    Standing,
    Wait,
    Worker,
)
from regroup_operator.plan.facts.allowances import entry_s
from regroup_operator.plan.generation.decision import next_generation
from regroup_operator.plan.generation.forced import RECONNECT_S
from regroup_operator.plan.generation.links import Links
from regroup_operator.plan.generation.retry import RETRY_S, names_of
from tests.builders.plan import (
    make_bounds,
    make_current,
    make_fault,
    make_older,
    make_pod,
    make_seal,
    make_session,
    make_worker,
    uid_of,
)

NOW_S = 100.0
SETTINGS = Settings()


def decide(
    workers: list[Worker],
    current: Current | None = None,
    bounds: Bounds | None = None,
    refused: frozenset[str] | None = None,
    first: bool = False,
    now_s: float = NOW_S,
    unreadable: bool = False,
    have_all_tried: bool = False,
    step_s: float = 0.0,
    links: Links = frozenset(),
) -> Decision:
    known = Situation(
        workers=tuple(workers),
        bounds=bounds or make_bounds(),
        refusal=None if refused is None else Refusal(refused, unreadable, have_all_tried=have_all_tried),
        now_s=now_s,
        settings=SETTINGS,
        step_s=step_s,
        links=links,
    )
    return next_generation(None if first else current or make_current(), known)


def words(decision: Decision) -> tuple[Any, ...]:
    """Return what a table compares: (kind, reason, members) or (wait, reason) or (keep,)."""
    if isinstance(decision, Announce):
        ids = ",".join(f"{w.id.slot}" + (f".{w.id.attempt}" if w.id.attempt else "") for w in decision.members)
        return (decision.kind, decision.reason, ids)
    return ("wait", decision.reason) if isinstance(decision, Wait) else ("keep",)


def out(slot: int, attempt: int = 0, **changes: Any) -> Worker:
    return make_worker(slot, Standing.OUTSIDE, attempt, **{"since_s": 0.0} | changes)


def lost(slot: int, why: str = "PodDeleted") -> Worker:
    return make_worker(slot, Standing.LOST, pod=None, session=None, why=why)


def died(slot: int, **changes: Any) -> Worker:
    return make_worker(slot, Standing.DIED, why="ProcessExited", **changes)


HELD = make_worker(0, Standing.OUTSIDE, pod=make_pod(0, terminating=True),
                   session=make_session(0, adopted_to=1, seal=make_seal(1, (1, 9), adopted=1, state_adopted=1)))  # fmt: skip


def broken(slot: int, peer: int | None = None, **changes: Any) -> Worker:
    fault = make_fault(peer=uid_of(peer) if peer is not None else None)
    session = make_session(slot, Phase.BROKEN, 1, fault=fault, fault_generation=1, fault_at_s=90.0)
    return make_worker(
        slot, Standing.BROKEN, **{"session": session, "why": "CollectiveFailed", "since_s": 90.0, **changes}
    )


def silent(slot: int, lost_at_s: float = 104.0, **changes: Any) -> Worker:
    session = make_session(slot, Phase.TRAINING, 1, connected=False)
    return make_worker(slot, Standing.SILENT, **{"session": session, "lost_at_s": lost_at_s, **changes})


def unheard(slot: int, asked_s: float | None = None, phase: str = Phase.TRAINING, **changes: Any) -> Worker:
    """A worker with an open stream that has said nothing for 20 s, and has not answered since `asked_s`."""
    session = make_session(slot, phase, int(phase != Phase.READY), heard_at_s=80.0, unanswered_since_s=asked_s)
    return make_worker(slot, **{"session": session} | changes)


def cut(slot: int, closed_s: float | None = 95.0, asked_s: float | None = None) -> Worker:
    """A worker that is lost because its stream closed, or because it has not answered since `asked_s`."""
    why = "Disconnected" if asked_s is None else "Unresponsive"
    session = make_session(
        slot, Phase.TRAINING, 1, connected=asked_s is not None, closed_at_s=closed_s, unanswered_since_s=asked_s
    )
    return make_worker(slot, Standing.LOST, session=session, why=why, available=False)


def draining(slot: int, **changes: Any) -> Worker:
    return make_worker(slot, pod=make_pod(slot, terminating=True), **changes)


A, B, C = make_worker(0), make_worker(1), make_worker(2)
ALL_LEAVE = [draining(0), draining(1), draining(2)]


# --- the first generation ------------------------------------------------------------------------------------------

FIXED = make_bounds(3, 3, elastic=False)
WAITING_FOR_MORE = ("wait", "WaitingForMore")


@pytest.mark.parametrize(
    ("ready_since", "bounds", "want"),
    [
        pytest.param([0, 0, 0], None, (FORCED, "Started", "0,1,2"), id="all are ready"),
        pytest.param([0, 0, 0, 0], None, (FORCED, "Started", "0,1,2"), id="more than all: the lowest slots"),
        pytest.param([95, 96], None, WAITING_FOR_MORE, id="the minimum has been ready for 4 s"),
        pytest.param([0, 70], None, (FORCED, "StartedSmaller", "0,1"), id="the minimum has been ready for 30 s"),
        pytest.param([0, 70.5], None, WAITING_FOR_MORE, id="30 s count from when the minimum was reached"),
        pytest.param([0], None, ("wait", "TooFewReady"), id="fewer than the minimum"),
        pytest.param([0, 0], FIXED, ("wait", "TooFewReady"), id="fixed size waits for all"),
        pytest.param([0, 0, 0], FIXED, (FORCED, "Started", "0,1,2"), id="fixed size with all"),
        pytest.param([], None, ("wait", "TooFewReady"), id="nobody"),
    ],
)
def test_first_generation(ready_since: list[float], bounds: Bounds | None, want: Any) -> None:
    workers = [out(slot, since_s=since) for slot, since in enumerate(ready_since)]
    assert words(decide(workers, bounds=bounds, first=True)) == want


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        pytest.param([], "needed.", id="no agent has called"),
        pytest.param([Phase.IDLE],
                     "needed; 1 has not started its processes yet (imports such as torch take time).", id="one is idle"),
        pytest.param([Phase.IDLE, Phase.IDLE, Phase.STARTING],
                     "needed; 2 have not started their processes yet (imports such as torch take time); of 1 not all processes "
                     "have come to Regroup's session yet.", id="two are idle, and one has processes"),
    ],
)  # fmt: skip
def test_wait_for_the_first_workers_says_what_they_do(phases: list[str], says: str) -> None:
    workers = [out(n, session=make_session(n, phase), available=False) for n, phase in enumerate(phases)]
    got = decide(workers, first=True)
    assert isinstance(got, Wait)
    assert (got.reason, got.message.endswith(says)) == ("TooFewReady", True), got.message


def test_first_generation_of_one_worker_speaks_of_one() -> None:
    found = decide([out(0)], bounds=make_bounds(1, 1), first=True)
    assert isinstance(found, Announce)
    assert found.message == "The worker is ready."


def test_first_generation_has_one_worker_of_a_slot_and_nobody_who_leaves() -> None:
    workers = [out(0), out(0, 1), out(1, pod=make_pod(1, terminating=True)), out(2)]
    assert words(decide(workers, bounds=make_bounds(2, 2), first=True)) == (FORCED, "Started", "0,2")
    assert words(decide(workers, first=True)) == (FORCED, "StartedSmaller", "0,2")


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        pytest.param({}, "1", id="it trains on"),
        pytest.param({"pod": make_pod(1, terminating=True)}, "1", id="and hands its state over if it is about to end"),
        pytest.param({"available": False}, "0", id="it cannot be reached"),
    ],
)
def test_first_generation_of_a_restored_status_has_who_has_a_state(changes: dict[str, Any], want: str) -> None:
    """The backup is older than the first generation, and a spare had come first."""
    holder = out(1, session=make_session(1, Phase.TRAINING, 1), **changes)
    assert words(decide([out(0), holder], bounds=make_bounds(1, 1), first=True)) == (FORCED, "Started", want)


# --- a broken group ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "given", "want"),
    [
        pytest.param([A, B, C], {}, ("keep",), id="a healthy group is kept"),
        pytest.param([A, B, lost(2)], {}, (FORCED, "MemberLost", "0,1"), id="a lost worker: the survivors form at once"),
        pytest.param([A, B, died(2)], {}, (FORCED, "MemberLost", "0,1"), id="a lost process: without its worker"),
        pytest.param(
            [A, B, died(2, available=True)], {}, (FORCED, "MemberLost", "0,1,2"), id="a lost process that is back already"
        ),
        pytest.param([A, broken(1), C], {}, (FORCED, "MemberLost", "0,1,2"), id="a broken group without a culprit: all again"),
        pytest.param(
            [A, broken(1, since_s=99.9), C], {}, ("wait", "Settling"), id="the culprit's own report is waited for a moment"
        ),
        pytest.param([A, B, lost(2), out(2, 1)], {}, (FORCED, "MemberLost", "0,1,2.1"), id="a joiner that is ready comes along"),
        pytest.param(
            [A, lost(1), lost(2)], {}, ("wait", "TooFewMembers"), id="fewer than the minimum wait with their state"
        ),
        pytest.param([A, B, died(2)], {"bounds": FIXED}, ("wait", "TooFewMembers"), id="fixed size always waits"),
        pytest.param(
            [A, B, died(2, since_s=99.0)], {"bounds": make_bounds(rejoin_s=3.0)}, ("wait", "Rejoining"), id="rejoinSeconds wait"
        ),
        pytest.param(
            [A, B, died(2, since_s=96.0)], {"bounds": make_bounds(rejoin_s=3.0)}, (FORCED, "MemberLost", "0,1"),
            id="rejoinSeconds are over",
        ),
        pytest.param(
            [A, B, lost(2)], {"bounds": make_bounds(rejoin_s=3.0)}, (FORCED, "MemberLost", "0,1"),
            id="rejoinSeconds are for processes, not for pods",
        ),
        pytest.param([A, silent(1), lost(2)], {"bounds": make_bounds(minimum=1)}, (FORCED, "MemberLost", "0"),
                     id="forced ones name only members with an open stream (FORCED)"),
        pytest.param([A, draining(1), lost(2)], {"bounds": make_bounds(minimum=1)}, (FORCED, "MemberLost", "0"),
                     id="who is leaving is not asked again"),
        pytest.param([A, draining(1), lost(2)], {}, (FORCED, "MemberLost", "0,1"), id="unless too few would be left"),
        pytest.param([draining(0), died(1)], {"bounds": make_bounds(2, 1)}, (FORCED, "MemberLost", "0"), id="or nobody"),
        pytest.param(
            [draining(0), lost(1), out(1, 1)], {"bounds": make_bounds(2, 1)}, (FORCED, "MemberLost", "0,1.1"),
            id="or none that holds the state",
        ),
        pytest.param(
            [HELD, lost(1), out(0, 1)], {"bounds": make_bounds(1, 1)}, (FORCED, "MemberLost", "0"),
            id="who holds it comes before its own successor",
        ),
        pytest.param(
            [draining(0), lost(1), out(1, 1)], {"bounds": make_bounds(2, 1, session=False)}, (FORCED, "MemberLost", "1.1"),
            id="a script has no state to hold",
        ),
        pytest.param([A, B, lost(2)], {"bounds": make_bounds(1, 1)}, (FORCED, "MemberLost", "0"), id="never more than wanted"),
        pytest.param([A, B, lost(2), out(2, 1), out(2, 2)], {"bounds": make_bounds(5)}, (FORCED, "MemberLost", "0,1,2.2"),
                     id="one pod of a slot: the youngest"),
    ],
)  # fmt: skip
def test_broken_group(workers: list[Worker], given: Any, want: Any) -> None:
    assert words(decide(workers, **given)) == want


@pytest.mark.parametrize(
    ("workers", "bounds", "want"),
    [
        pytest.param([A, draining(1)], make_bounds(2, 1), (FORCED, "Hung", "0"), id="not with who is leaving"),
        pytest.param(
            [draining(0), draining(1)], make_bounds(2, 1), (FORCED, "Hung", "0,1"), id="unless nobody would be left"
        ),
    ],
)
def test_new_groups_after_a_hang_of_all(workers: list[Worker], bounds: Bounds, want: Any) -> None:
    known = Situation(workers=tuple(workers), bounds=bounds, now_s=NOW_S, settings=SETTINGS, hang="x")
    got = next_generation(make_current((0, 1)), known)
    assert words(got) == want


NEWER = make_current(number=2, adopted=False, announced_at_s=99.0)
PENDING_0 = make_worker(0, Standing.PENDING, session=make_session(0, Phase.TRAINING, 1, heard=2))
PENDING_1 = make_worker(1, Standing.PENDING, session=make_session(1, Phase.READY, heard=2))
FORMS_2 = make_worker(2, Standing.FORMING, session=make_session(2, Phase.FORMING, 2), since_s=71.0)
WAITS_2 = make_worker(2, Standing.FORMING, session=make_session(2, Phase.ARRIVED, 2), since_s=71.0)
ADOPTS_1 = make_worker(1, Standing.FORMING, session=make_session(1, Phase.ADOPTING, 2), since_s=71.0)
FORMS_0 = make_worker(0, Standing.FORMING, session=make_session(0, Phase.FORMING, 2), since_s=71.0)
STARTS_0 = make_worker(0, Standing.STARTING, session=make_session(0, Phase.STARTING, heard=2))
LATE = replace(NEWER, announced_at_s=70.0)


@pytest.mark.parametrize(
    ("workers", "current", "want"),
    [
        pytest.param([PENDING_0, PENDING_1, FORMS_2], NEWER, ("keep",), id="it has just been announced"),
        pytest.param([STARTS_0, FORMS_2], replace(LATE, launches=True), ("keep",), id="a script's start takes its time"),
        pytest.param([STARTS_0, FORMS_2], LATE, (FORCED, "GenerationOverdue", "2"), id="a session's has begun before"),
        pytest.param([PENDING_1, FORMS_2, A], LATE, (FORCED, "GenerationOverdue", "0,2"), id="who did not answer goes"),
        pytest.param(
            [PENDING_0, PENDING_1, FORMS_2], replace(LATE, kind=PLANNED), (FORCED, "GenerationOverdue", "0,2"),
            id="planned: who heard and trains on is not the one that is late",
        ),
        pytest.param(
            [PENDING_0, silent(1), FORMS_2], replace(LATE, kind=PLANNED), (FORCED, "GenerationOverdue", "0,2"),
            id="planned: who is silent is",
        ),
        pytest.param([silent(0), B, FORMS_2], LATE, (FORCED, "GenerationOverdue", "1,2"), id="forced: who is silent goes"),
        pytest.param([FORMS_0, WAITS_2, B], LATE, (FORCED, "GenerationOverdue", "1,2"), id="who is not at the store goes"),
        pytest.param([FORMS_2, A], LATE, (FORCED, "GenerationOverdue", "0,2"), id="nobody is at the store: the same again"),
        pytest.param([ADOPTS_1, A], LATE, ("keep",), id="to adopt may take longer"),
        pytest.param([ADOPTS_1, A], replace(LATE, attempts=2, announced_at_s=0.0), ("keep",), id="and longer each time"),
        pytest.param(
            [replace(ADOPTS_1, since_s=39.0), A], LATE, (FORCED, "GenerationOverdue", "0,1"), id="but not for ever"
        ),
        pytest.param([PENDING_0, B, died(2)], NEWER, (FORCED, "MemberLost", "0,1"), id="another loss in between"),
        pytest.param(
            [make_worker(0, Standing.PENDING, session=make_session(0, Phase.BROKEN, 1)), B], replace(NEWER, has_document=False),
            (FORCED, "GenerationOverdue", "0,1"), id="another operator's, and somebody has not heard: the next number (PERSIST)",
        ),
        pytest.param(
            [replace(FORMS_2, since_s=95.0)], replace(NEWER, has_document=False), ("keep",),
            id="another operator's, and all have heard",
        ),
    ],
)  # fmt: skip
def test_generation_in_the_making(workers: list[Worker], current: Current, want: Any) -> None:
    assert words(decide(workers, current, make_bounds(3, 1))) == want


def test_entering_waits_for_the_end_of_a_long_step() -> None:
    """Four workers in a step of 25 s, one dies: the others are no later than their step."""
    workers, current = [PENDING_0, PENDING_1, FORMS_2], replace(LATE, announced_at_s=50.0)
    assert words(decide(workers, current, make_bounds(3, 1), step_s=25.0)) == ("keep",)
    assert words(decide(workers, current, make_bounds(3, 1), step_s=16.0)) == (FORCED, "GenerationOverdue", "2")


@pytest.mark.parametrize(
    ("began_s", "now_s", "want"),
    [
        pytest.param(None, 79.9, ("keep",), id="it has 30 s"),
        pytest.param(None, 80.0, (FORCED, "GenerationOverdue", "0,1"), id="30 s are over"),
        pytest.param(51.0, 125.9, ("keep",), id="its script saves, which may take 75 s"),
        pytest.param(51.0, 126.0, (FORCED, "GenerationOverdue", "0,1"), id="75 s are over"),
    ],
)
def test_entering_waits_for_the_planned_end_of_a_scripts_processes(
    began_s: float | None, now_s: float, want: tuple[str, ...]
) -> None:
    busy = () if began_s is None else (Busy(Busy.PARTING, max_s=75.0),)
    starts = make_session(2, Phase.STARTING, 1, busy_since_s=() if began_s is None else (began_s,))
    starts = replace(starts, condition=replace(starts.condition, busy=busy))
    current = replace(NEWER, kind=PLANNED, announced_at_s=50.0)
    workers = [make_worker(0), make_worker(1), make_worker(2, Standing.STARTING, session=starts)]
    assert words(decide(workers, current, make_bounds(3, 1), now_s=now_s)) == want


@pytest.mark.parametrize(
    ("kind", "step_s", "want_s"),
    [
        pytest.param(FORCED, 0.0, SETTINGS.form_timeout_s, id="no step is known"),
        pytest.param(FORCED, 6.0, SETTINGS.form_timeout_s, id="a short step"),
        pytest.param(FORCED, 60.0, 180.0, id="three steps of a minute"),
        pytest.param(PLANNED, 0.0, SETTINGS.planned_timeout_s, id="planned, no step is known"),
        pytest.param(PLANNED, 9.0, SETTINGS.planned_timeout_s, id="planned, a short step"),
        pytest.param(PLANNED, 60.0, 180.0, id="planned, three steps of a minute"),
    ],
)
def test_time_to_enter_a_generation_grows_with_the_step(kind: str, step_s: float, want_s: float) -> None:
    assert entry_s(kind, step_s, SETTINGS) == want_s


@pytest.mark.parametrize(
    ("workers", "since_s"),
    [
        pytest.param([PENDING_0, FORMS_2], 99.0, id="to enter: from the announcement"),
        pytest.param([FORMS_2, A], 71.0, id="to form: from when the last one entered"),
    ],
)
def test_every_deadline_is_looked_at_again(workers: list[Worker], since_s: float) -> None:
    assert decide(workers, NEWER, make_bounds(3, 1), now_s=72.0) == Keep(since_s + SETTINGS.form_timeout_s)


@pytest.mark.parametrize(
    ("phase", "barred_until_s", "minimum", "want"),
    [
        pytest.param(
            Phase.TRAINING, 150.0, 1, ("wait", "NoWitness"), id="it hangs in its last group: it is not asked again"
        ),
        pytest.param(Phase.BROKEN, 150.0, 1, (FORCED, "MemberLost", "0,1"), id="it has come out"),
        pytest.param(Phase.TRAINING, 0.0, 1, (FORCED, "MemberLost", "0,1"), id="it was not asked yet"),
        pytest.param(Phase.TRAINING, 150.0, 2, (FORCED, "MemberLost", "0,1"), id="too few without it"),
    ],
)
def test_holder_that_does_not_come_is_not_asked_again_and_again(
    phase: str, barred_until_s: float, minimum: int, want: tuple[str, ...]
) -> None:
    held = make_worker(0, Standing.OUTSIDE, session=make_session(0, phase, 1), barred_until_s=barred_until_s)
    refuses = holding(1, None, 0)
    current = make_current((1,), number=3, adopted=False, older=(make_older(1, uid_of(0)),))
    got = decide(
        [held, refuses], current, make_bounds(2, minimum), refused=names_of(current, [held, refuses], [refuses])
    )
    assert words(got) == want


def test_joiner_that_did_not_come_is_named_not_those_that_train_on() -> None:
    """Rule JOIN: they have not been told of the planned generation yet, or wait for the others to hear."""
    untold, heard = (
        make_worker(slot, Standing.PENDING, session=make_session(slot, Phase.TRAINING, 1, heard=1 + slot))
        for slot in (0, 1)
    )
    joiner = make_worker(2, Standing.PENDING, session=make_session(2, Phase.READY, told_generation=2))
    planned = replace(LATE, kind=PLANNED, announced_at_s=NOW_S - SETTINGS.planned_timeout_s)
    got = decide([untold, heard, joiner], planned, make_bounds(3, 1))
    assert words(got) == (FORCED, "GenerationOverdue", "0,1")
    assert isinstance(got, Announce)
    assert got.culprit == "2"
    assert got.set_back == {MemberId(2, 0)}


def test_who_holds_up_a_generation_is_set_back() -> None:
    got = decide([PENDING_1, FORMS_2, A], LATE, make_bounds(3, 1))
    assert isinstance(got, Announce)
    assert got.set_back == {MemberId(1, 0)}


@pytest.mark.parametrize(
    ("attempts", "ago_s", "want"),
    [
        pytest.param(1, 0.0, FORCED, id="the second attempt comes at once"),
        pytest.param(2, 0.0, FORCED, id="the third, too"),
        pytest.param(3, 0.1, "wait", id="then 0.2 s"),
        pytest.param(3, 0.2, FORCED, id="after 0.2 s"),
        pytest.param(30, 4.9, "wait", id="5 s at most"),
        pytest.param(30, 5.0, FORCED, id="after 5 s"),
    ],
)
def test_generations_that_do_not_form_come_slower_and_slower(attempts: int, ago_s: float, want: str) -> None:
    current = replace(NEWER, attempts=attempts, announced_at_s=NOW_S - ago_s)
    got = decide([A, B, died(2, available=True)], current)
    assert words(got)[0] == want
    if isinstance(got, Wait):
        assert got.reason == "BackingOff"
        assert not isinstance(got.until, UntilEvent)
        assert got.until > NOW_S
        assert got.message == (
            f"{attempts} generations in a row did not form, the last one because worker 2 lost a process; trying again."
        )


@pytest.mark.parametrize(
    ("minimum", "want"),
    [
        pytest.param(3, " Worker 1 and another member cannot reach each other, and without worker 1 too few are left.",
                     id="the link that keeps the same set from forming"),
        pytest.param(2, "", id="one of the two can go"),
    ],
)  # fmt: skip
def test_missing_link_is_named_while_nobody_can_be_spared(minimum: int, want: str) -> None:
    current = make_current((0, 1, 2), adopted=False, attempts=9, announced_at_s=NOW_S - 1.0)
    got = decide([broken(0, 1), broken(1), broken(2)], current, make_bounds(3, minimum))
    assert isinstance(got, Wait)
    first, _, rest = got.message.partition("trying again.")
    assert first == "9 generations in a row did not form, the last one because worker 0 reported a failed collective; "
    assert rest == want


# --- a fresh operator ----------------------------------------------------------------------------------------------

UNKNOWN_1 = make_worker(1, Standing.SILENT, session=None, since_s=NOW_S - 1.0, lost_at_s=119.0)


def test_fresh_operator_waits_for_those_on_their_way() -> None:
    assert words(decide([A, UNKNOWN_1, lost(2)], bounds=make_bounds(3, 1))) == ("wait", "Reconnecting")
    later = replace(UNKNOWN_1, since_s=NOW_S - RECONNECT_S)
    assert words(decide([A, later, lost(2)], bounds=make_bounds(3, 1))) == (FORCED, "MemberLost", "0")
    assert words(decide([A, UNKNOWN_1, C])) == ("keep",)
    waiting = make_worker(2, Standing.SILENT, session=None, since_s=NOW_S)
    both = decide([A, later, waiting, lost(3)], current=make_current((0, 1, 2, 3)), bounds=make_bounds(4, 1))
    assert words(both) == ("wait", "Reconnecting")
    assert isinstance(both, Wait)
    assert both.until == NOW_S + RECONNECT_S


# --- who must answer first -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "given", "want", "asked"),
    [
        pytest.param([A, unheard(1), cut(2)], {}, ("wait", "Asking"), [1], id="one cannot be reached: another may be on its node"),
        pytest.param([A, unheard(1, 99.7), cut(2)], {}, ("wait", "Asking"), [1], id="it may still answer"),
        pytest.param([A, unheard(1, 99.0), cut(2)], {"bounds": make_bounds(minimum=1)}, (FORCED, "MemberLost", "0"), [],
                     id="it does not answer: without it"),
        pytest.param([A, unheard(1, 99.0), cut(2)], {}, (FORCED, "MemberLost", "0,1"), [], id="unless too few are left"),
        pytest.param([A, B, cut(2)], {}, (FORCED, "MemberLost", "0,1"), [], id="both have spoken since: at once"),
        pytest.param([A, unheard(1), cut(2, None, 90.0)], {}, ("wait", "Asking"), [1], id="one does not answer: another may not"),
        pytest.param([A, unheard(1), cut(2, None, 79.0)], {}, (FORCED, "MemberLost", "0,1"), [],
                     id="it has spoken after the question that the lost one did not answer"),
        pytest.param([A, unheard(1), cut(2, 79.0), cut(3)], {"bounds": make_bounds(4, 1)}, ("wait", "Asking"), [1],
                     id="it has spoken after one was lost, and not after the other"),
        pytest.param([A, unheard(1, 99.0), cut(2), draining(3)], {"bounds": make_bounds(4, 2)},
                     (FORCED, "MemberLost", "0,1"), [], id="who leaves is not counted as enough"),
        pytest.param([A, unheard(1), cut(2, closed_s=79.0)], {}, (FORCED, "MemberLost", "0,1"), [],
                     id="it has spoken after the last sign of the lost one"),
        pytest.param([A, unheard(1), broken(2)], {}, ("wait", "Asking"), [1], id="nobody knows why the group broke"),
        pytest.param([A, unheard(1), lost(2)], {}, (FORCED, "MemberLost", "0,1"), [], id="a pod was deleted: no node is suspect"),
        pytest.param([A, unheard(1), died(2, since_s=95.0)], {}, (FORCED, "MemberLost", "0,1"), [], id="a process died: nor here"),
        pytest.param([A, unheard(1), died(2, since_s=95.0)], {"bounds": make_bounds(session=False)}, ("wait", "Asking"), [1],
                     id="a script's process: the next one may have died before it"),
        pytest.param([A, unheard(1, 99.0), died(2, since_s=95.0)], {"bounds": make_bounds(session=False)}, ("wait", "Asking"), [1],
                     id="a script is started once more for who is left out: longer"),
        pytest.param([A, unheard(1, 97.0), died(2, since_s=95.0)], {"bounds": make_bounds(minimum=1, session=False)},
                     (FORCED, "MemberLost", "0"), [], id="not for ever"),
    ],
)  # fmt: skip
def test_who_must_answer_before_it_is_named(
    workers: list[Worker], given: dict[str, Any], want: tuple[str, ...], asked: list[int]
) -> None:
    got = decide(workers, **given)
    assert words(got) == want
    assert getattr(got, "ask", frozenset()) == {uid_of(slot) for slot in asked}


@pytest.mark.parametrize(
    ("size", "culprit", "asked"),
    [
        pytest.param(50, cut(0), range(1, 50), id="all of a small job"),
        pytest.param(51, cut(0), [1], id="of a large one those of its node"),
        pytest.param(51, broken(0), range(1, 51), id="all, where nobody knows why the group broke"),
        pytest.param(51, lost(0), [], id="a deleted pod says nothing of its node"),
    ],
)
def test_whom_the_loss_of_a_worker_casts_doubt_on(size: int, culprit: Worker, asked: Iterable[int]) -> None:
    """Of the workers 0 and 1 are on one node."""
    there = [unheard(slot, pod=make_pod(slot, node=f"node-{max(1, slot)}")) for slot in range(1, size)]
    first = replace(culprit, pod=replace(culprit.pod, node="node-1")) if culprit.pod is not None else culprit
    got = decide([first, *there], make_current(range(size)), make_bounds(size, 1))
    assert getattr(got, "ask", frozenset()) == {uid_of(slot) for slot in asked}


@pytest.mark.parametrize(("size", "answer_s"), [(100, 0.5), (1000, 0.5), (4000, 2.0)])
def test_thousands_have_longer_to_answer(size: int, answer_s: float) -> None:
    """All of them are asked at once, and heard one after the other."""
    there = [broken(0, since_s=80.5), *(unheard(slot, NOW_S - answer_s) for slot in range(1, size - 1))]
    there.append(make_worker(size - 1, session=make_session(size - 1, Phase.TRAINING, 1, heard_at_s=NOW_S)))
    given: dict[str, Any] = {"current": make_current(range(size)), "bounds": make_bounds(size, 1)}
    assert words(decide(there, **given, now_s=NOW_S - 0.01)) == ("wait", "Asking")
    assert words(decide(there, **given, now_s=NOW_S)) == (FORCED, "MemberLost", f"0,{size - 1}")


def test_agents_are_asked_while_the_cause_is_looked_for() -> None:
    got = decide([A, broken(1, since_s=99.9), unheard(2)])
    assert words(got) == ("wait", "Settling")
    assert isinstance(got, Wait)
    assert got.ask == {uid_of(2)}


def test_members_that_have_not_called_a_new_operator_are_waited_for_before_a_resize() -> None:
    """The document left them out, the status named them: nobody trained with them, and 30 s later they were called overdue."""
    two = make_current((0, 1))
    expected = make_worker(1, Standing.SILENT, session=None, lost_at_s=104.0)
    got = decide([A, expected, out(2)], two)
    assert isinstance(got, Keep)
    assert got.until == 104.0
    assert words(decide([A, silent(1), out(2)], two)) == (PLANNED, "Resized", "0,1,2")


@pytest.mark.parametrize(
    ("members", "ready_s", "joins_s"),
    [
        pytest.param(3, [99.5], 100.5, id="a moment after the last one"),
        pytest.param(3, [96.0, 99.5], 100.5, id="both in one generation"),
        pytest.param(3, [95.5, 99.9], 100.5, id="not longer than five seconds after the first one"),
        pytest.param(500, [99.5], 100.5, id="500 members"),
        pytest.param(2000, [99.5], 103.5, id="each generation costs 2,000 members: four times as long"),
        pytest.param(2000, [81.0, 99.5], 101.0, id="four times as long after the first one, too"),
    ],
)
def test_how_long_workers_wait_to_join_together(members: int, ready_s: list[float], joins_s: float) -> None:
    there = [make_worker(slot) for slot in range(members)]
    joiners = [out(members + index, since_s=since_s) for index, since_s in enumerate(ready_s)]
    current, bounds = make_current(range(members)), make_bounds(members + 5, 1)
    got = decide([*there, *joiners], current, bounds)
    assert isinstance(got, Keep)
    assert got.until == joins_s
    assert isinstance(decide([*there, *joiners], current, bounds, now_s=joins_s), Announce)


def test_joiner_that_does_not_answer_is_not_planned_in() -> None:
    """It was left out a moment ago because it did not answer: a script was started for it at once (adr/0017)."""
    two = make_current((0, 1))
    outside: dict[str, Any] = {"standing": Standing.OUTSIDE, "since_s": 0.0}
    assert words(decide([A, B, unheard(2, 99.0, Phase.READY, **outside)], two)) == ("keep",)
    assert words(decide([A, B, unheard(2, None, Phase.READY, **outside)], two)) == (PLANNED, "Resized", "0,1,2")


# --- links (rule CLIQUE) -------------------------------------------------------------------------------------------

UNFORMED = make_current(adopted=False)


@pytest.mark.parametrize(
    ("workers", "current", "want"),
    [
        pytest.param(
            [broken(0, 2), broken(1), broken(2, 0)],
            UNFORMED,
            "0,1",
            id="of a pair without a link the younger slot goes",
        ),
        pytest.param(
            [broken(0, 1), broken(1), broken(2, 1)],
            UNFORMED,
            "0,2",
            id="who is in the most broken links leaves the largest group",
        ),
        pytest.param([broken(0, 2), broken(1), broken(2)], UNFORMED, "0,1", id="one side's word is enough"),
        pytest.param(
            [broken(0, 2), broken(1), broken(2)], None, "0,1,2", id="once, after it trained, the same set is tried"
        ),
        pytest.param(
            [broken(0, 2), broken(1), died(2, available=True)],
            UNFORMED,
            "0,1,2",
            id="a peer that lost a process is no broken link",
        ),
        pytest.param([broken(0, 7), broken(1), broken(2)], UNFORMED, "0,1,2", id="a peer that nobody knows"),
    ],
)
def test_broken_links(workers: list[Worker], current: Current | None, want: str) -> None:
    assert words(decide(workers, current)) == (FORCED, "MemberLost", want)


@pytest.mark.parametrize(
    ("others", "want"),
    [
        pytest.param([out(2)], "1,2", id="another worker comes in"),
        pytest.param([out(0, 1)], "0.1,1", id="another pod of its slot does"),
        pytest.param([out(2, available=False)], "0,1", id="nobody else can: the same set"),
    ],
)
def test_others_take_the_place_of_who_cannot_reach_a_holder(others: list[Worker], want: str) -> None:
    """Two of two are needed, and the same two were tried for ever beside a third (walk 27233)."""
    state = make_seal(1, (1, 9), adopted=1, state_adopted=1)
    older, holder = broken(0, 1), broken(1, 0)
    assert holder.session is not None
    holder = replace(holder, session=replace(holder.session, seal=state))
    current = make_current((0, 1), adopted=False)
    got = decide([older, holder, *others], current, make_bounds(2, 2))
    assert words(got) == (FORCED, "MemberLost", want)
    assert isinstance(got, Announce)
    assert got.set_back == {MemberId(0, 0)}


def test_broken_link_that_would_leave_too_few_is_tried_again() -> None:
    workers = [broken(0, 1), broken(1, 0)]
    current = make_current((0, 1), adopted=False)
    got = decide(workers, current, make_bounds(2, 2, elastic=False))
    assert words(got) == (FORCED, "MemberLost", "0,1")
    assert isinstance(got, Announce)
    assert got.set_back == {MemberId(1, 0)}  # and replaced, in the end (test_lateness.py)


@pytest.mark.parametrize(
    ("late", "want"),
    [
        pytest.param(0, "1", id="the holder heard of it first"),
        pytest.param(1, "1", id="the holder heard of it last"),
    ],
)
def test_of_a_pair_without_a_link_the_holder_stays(late: int, want: str) -> None:
    holder = broken(1, 0)
    assert holder.session is not None
    seal = make_seal(1, (1, 9), adopted=1, state_adopted=1)
    workers = [broken(0, 1, since_s=90.0 + late), replace(holder, session=replace(holder.session, seal=seal))]
    got = decide(workers, make_current((0, 1), adopted=False), make_bounds(2, 1))
    assert words(got) == (FORCED, "MemberLost", want)


def test_worker_that_kept_a_generation_from_forming_is_not_planned_in_before_its_time() -> None:
    barred = out(2, barred_until_s=150.0)
    current = make_current((0, 1), number=2)
    assert decide([A, B, barred], current) == Keep(150.0)
    assert words(decide([A, B, barred], current, now_s=150.0)) == (PLANNED, "Resized", "0,1,2")
    # A forced generation does without it where it can, and takes it where it cannot.
    assert words(decide([A, died(1), barred], current, make_bounds(3, 1))) == (FORCED, "MemberLost", "0")
    assert words(decide([A, died(1), barred], current, make_bounds(3, 2))) == (FORCED, "MemberLost", "0,2")


def test_worker_that_is_still_in_an_earlier_group_is_not_planned_in() -> None:
    inside = out(2, session=make_session(2, Phase.TRAINING, 1))
    assert decide([A, B, inside], make_current((0, 1), number=2)) == Keep(UntilEvent.CHANGE)


def test_another_pod_takes_the_place_of_one_that_is_given_up() -> None:
    workers = [broken(0, 1), broken(1, 0, abandoned=True), out(1, 1)]
    got = decide(workers, make_current((0, 1), adopted=False, attempts=9), make_bounds(2, 2, elastic=False))
    assert words(got) == (FORCED, "MemberLost", "0,1.1")


# --- rule WITNESS --------------------------------------------------------------------------------------------------


def holding(
    slot: int, state: tuple[int, int] | None, adopted: int, *, is_backup: bool = False, attempt: int = 0, **changes: Any
) -> Worker:
    seal = make_seal(2, state, adopted=adopted, state_adopted=adopted if state else 0, is_backup=is_backup)
    session = make_session(slot, Phase.BROKEN, 2, attempt, adopted_to=adopted, seal=seal)
    values: dict[str, Any] = {"standing": Standing.BROKEN, "session": session, "why": "CollectiveFailed"}
    return make_worker(slot, attempt=attempt, **values | changes)


REFUSED = make_current((1, 2), number=2, adopted=False, older=(make_older(1, uid_of(0), uid_of(1), uid_of(2)),))


def test_refused_set_is_not_announced_again() -> None:
    workers = [holding(1, None, 1), holding(2, None, 0)]
    tried = names_of(REFUSED, workers, workers)
    got = decide(workers, REFUSED, make_bounds(3, 1), refused=tried)
    assert words(got) == ("wait", "NoWitness")
    assert isinstance(got, Wait)
    assert got.until == UntilEvent.HOLDER


@pytest.mark.parametrize(
    ("change", "want"),
    [
        pytest.param(lambda w: [*w, holding(0, (1, 9), 1, standing=Standing.OUTSIDE)], "0,1,2", id="the holder is reached again"),
        pytest.param(
            lambda w: [*w, holding(0, (1, 9), 1, standing=Standing.OUTSIDE, pod=make_pod(0, terminating=True))], "0,1,2",
            id="the holder is there, but leaving: taken all the same",
        ),
        pytest.param(
            lambda w: [*w, out(0, available=False, session=make_session(0, connected=False, seal=make_seal(1, None, adopted=1)))],
            "1,2", id="its seal says that its copy is gone",
        ),
    ],
)  # fmt: skip
def test_refused_set_is_tried_again_when_something_is_new(change: Any, want: str) -> None:
    holder_away = out(0, available=False, session=make_session(0, connected=False))
    workers = [holding(1, None, 1), holding(2, None, 0)]
    tried = names_of(REFUSED, [*workers, holder_away], workers)
    got = decide(change(workers), REFUSED, make_bounds(3, 1), refused=tried)
    assert words(got) == (FORCED, "MemberLost", want)


def test_refused_set_is_tried_again_when_the_holders_pod_is_deleted() -> None:
    holder_away = out(0, available=False, session=make_session(0, connected=False))
    workers = [holding(1, None, 1), holding(2, None, 0)]
    tried = names_of(REFUSED, [*workers, holder_away], workers)
    gone = replace(REFUSED, older=(make_older(1, "gone/0.0", uid_of(1), uid_of(2)),))
    assert words(decide(workers, gone, make_bounds(3, 1), refused=tried)) == (FORCED, "MemberLost", "1,2")


def test_holders_come_first_when_a_set_has_refused() -> None:
    """Two are wanted; the holder has the highest slot, and a double of slot 1 holds nothing."""
    workers = [holding(0, None, 0), holding(1, None, 0), holding(3, (1, 9), 1, standing=Standing.OUTSIDE)]
    got = decide(workers, REFUSED, make_bounds(2, 1), refused=frozenset({"x"}))
    assert words(got) == (FORCED, "MemberLost", "0,3")


@pytest.mark.parametrize(
    ("workers", "want"),
    [
        pytest.param([holding(0, (1, 9), 1, is_backup=True), holding(2, (1, 9), 1)], "2", id="of the same state"),
        pytest.param([holding(0, (1, 9), 1, is_backup=True), holding(2, (1, 5), 1)], "2", id="of a newer one"),
        pytest.param([holding(0, (1, 9), 1), holding(2, (2, 12), 2, is_backup=True)], "2", id="not of a later generation"),
        pytest.param(
            [holding(0, (1, 5), 1, is_backup=True), holding(2, (1, 9), 1, is_backup=True)], "2", id="of two the newest"
        ),
        pytest.param([holding(0, None, 1), holding(2, (1, 9), 1, is_backup=True)], "2", id="a backup before nothing"),
    ],
)  # fmt: skip
def test_live_holder_goes_before_a_backup(workers: list[Worker], want: str) -> None:
    """Rule BACKUP: only the live state says for certain what its worker has committed."""
    got = decide(workers, REFUSED, make_bounds(1, 1), refused=frozenset({"x"}))
    assert words(got) == (FORCED, "MemberLost", want)


CUT = frozenset({frozenset({uid_of(0), uid_of(1)})})
"""Pods 0.0 and 1.0 cannot reach each other."""
OLD_SET = [
    holding(0, (1, 5), 1, standing=Standing.OUTSIDE, is_backup=True, abandoned=True),
    holding(1, (1, 9), 1, standing=Standing.OUTSIDE, abandoned=True),
]


@pytest.mark.parametrize(
    ("workers", "current", "want"),
    [
        pytest.param([*OLD_SET, holding(0, None, 0, attempt=1), holding(1, None, 0, attempt=1), holding(2, None, 0)],
                     ((0, 1), (1, 1), 2), "0.1,1,2", id="the holder of the newest state, and none that it cannot reach"),
        pytest.param([*OLD_SET, holding(2, None, 0), holding(3, None, 0)], (2, 3), "1,2,3", id="another slot comes in"),
        pytest.param([*OLD_SET, holding(2, None, 0)], (2,), "0,1,2", id="too few without: the link may heal"),
        pytest.param([holding(0, (1, 5), 1, is_backup=True), holding(1, None, 0), holding(2, None, 0),
                      holding(3, (1, 9), 1, standing=Standing.OUTSIDE)], (0, 1, 2), "0,1,3",
                     id="two that have formed this generation can reach each other again"),
    ],
)  # fmt: skip
def test_set_with_a_broken_link_is_not_announced_again_after_another_that_refused(
    workers: list[Worker], current: tuple[Any, ...], want: str
) -> None:
    """Three are needed. A set with a broken link, and one without the newest state, followed each other (walk 11038)."""
    refused = make_current(current, number=2, adopted=False, attempts=9)
    got = decide(workers, refused, make_bounds(3, 3), refused=frozenset({"x"}), links=CUT)
    assert words(got) == (FORCED, "MemberLost", want)


def test_broken_link_between_two_that_hold_one_copy_of_the_model_drops_neither() -> None:
    """A group is two workers. Each holds its part of the newest state: nobody can train without them, and their link may heal."""
    workers = [holding(0, (1, 9), 1), holding(1, (1, 9), 1, standing=Standing.OUTSIDE, abandoned=True)]
    workers.append(holding(1, None, 0, attempt=1))
    refused = make_current((0, (1, 1)), number=2, adopted=False, attempts=9)
    got = decide(workers, refused, make_bounds(2, 2, per_group=2), refused=frozenset({"x"}), links=CUT)
    assert words(got) == (FORCED, "MemberLost", "0,1")


def test_set_that_refused_waits_where_the_only_other_one_has_a_broken_link() -> None:
    """The holder cannot be reached: the wait is named, and ends with a word of the holder's (walk 18001)."""
    backups = [holding(slot, (1, 5), 1, standing=Standing.OUTSIDE, is_backup=True) for slot in (0, 1)]
    older = (make_older(1, uid_of(0), uid_of(1), uid_of(4)),)
    away = out(4, available=False, session=make_session(4, connected=False))
    member = replace(backups[0], standing=Standing.BROKEN)
    workers = [member, backups[1], holding(1, None, 0, attempt=1), holding(2, None, 0), away]
    refused = make_current((0, (1, 1), 2), number=2, adopted=False, attempts=9, older=older)
    tried = names_of(refused, workers, [workers[0], workers[2], workers[3]])
    got = decide(workers, refused, make_bounds(3, 3), refused=tried, links=CUT)
    assert words(got) == ("wait", "NoWitness")


def test_set_that_could_not_read_its_checkpoint_is_tried_again_after_a_pause() -> None:
    workers = [holding(1, None, 1), holding(2, None, 0)]
    tried = names_of(REFUSED, workers, workers)
    first = replace(REFUSED, announced_at_s=99.5, attempts=1)
    got = decide(workers, first, make_bounds(3, 1), refused=tried, unreadable=True)
    assert words(got) == ("wait", "CheckpointUnreadable")
    assert isinstance(got, Wait)
    assert got.until == 99.5 + RETRY_S[0]
    after = decide(workers, first, make_bounds(3, 1), refused=tried, unreadable=True, now_s=101.0)
    assert words(after) == (FORCED, "MemberLost", "1,2")
    much_later = replace(first, attempts=40)
    got = decide(workers, much_later, make_bounds(3, 1), refused=tried, unreadable=True)
    assert isinstance(got, Wait)
    assert got.until == 99.5 + RETRY_S[1]


@pytest.mark.parametrize(
    ("attempts", "have_all_tried", "want"),
    [
        pytest.param(1, False, (FORCED, "MemberLost", "1"), id="another reader, at once"),
        pytest.param(
            9, False, ("wait", "CheckpointUnreadable"), id="another reader, after the pause of any generation"
        ),
        pytest.param(1, True, ("wait", "CheckpointUnreadable"), id="all have tried"),
    ],
)
def test_other_set_reads_the_checkpoint_at_once_as_long_as_somebody_has_not_tried(
    attempts: int, have_all_tried: bool, want: tuple[str, ...]
) -> None:
    """One is wanted, and two took turns with a generation every five seconds (walk 25281)."""
    workers = [holding(1, None, 1), holding(2, None, 0)]
    current = replace(REFUSED, announced_at_s=99.5, attempts=attempts)
    got = decide(
        workers, current, make_bounds(1, 1), refused=frozenset({"x"}), unreadable=True, have_all_tried=have_all_tried
    )
    assert words(got) == want


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(
            {"seal": make_seal(2, None, adopted=1)}, id="it promises to have left a generation that it was in"
        ),
        pytest.param({"seal": make_seal(1, (1, 9), adopted=1, state_adopted=1)}, id="it tells of a state"),
        pytest.param({"seal": make_seal(1, None, adopted=2)}, id="it tells that it adopted a later one"),
    ],
)
def test_refused_set_is_tried_again_on_any_word_that_the_verdict_is_made_of(changed: Any) -> None:
    """Rule WORDS: the first trace of the liveness rules waited for ever, since the promise was none of the words."""
    older = (make_older(2, uid_of(0)), make_older(1, uid_of(1)))
    current = make_current((1,), number=3, adopted=False, older=older)
    session = make_session(0, Phase.STARTING, seal=make_seal(1, None, adopted=1))
    other = out(0, available=False, session=session)
    workers = [holding(1, None, 1), other]
    tried = names_of(current, workers, workers[:1])
    assert words(decide(workers, current, make_bounds(1, 1), refused=tried)) == ("wait", "NoWitness")
    workers[1] = replace(other, session=replace(session, **changed))
    assert words(decide(workers, current, make_bounds(1, 1), refused=tried)) == (FORCED, "MemberLost", "1")


@pytest.mark.parametrize("role", ["member", "seal"])
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"state": StatePair(1, 8)}, id="which state it holds"),
        pytest.param({"state_adopted": 2}, id="where that was adopted"),
        pytest.param({"adopted": 2}, id="what it adopted last"),
        pytest.param({"is_backup": True}, id="that it is a backup"),
    ],
)
def test_names_of_a_set_have_every_word_of_a_seal_that_holds_a_state(role: str, changed: Any) -> None:
    """Rule WORDS: each of them is an input of `adoption.decide`."""
    names = []
    unchanged: dict[str, Any] = {}
    for given in (unchanged, changed):
        holder = holding(1, (1, 9), 1)
        assert holder.session is not None
        assert holder.session.seal is not None
        holder = replace(holder, session=replace(holder.session, seal=replace(holder.session.seal, **given)))
        names.append(names_of(REFUSED, [holder], [holder] if role == "member" else []))
    assert names[0] != names[1]


def test_names_of_a_set_do_not_change_with_the_number_of_the_refusal() -> None:
    """Or the same set would be announced, refused and announced for ever."""
    before = [holding(1, (1, 5), 1), holding(2, None, 0)]
    later = [
        replace(w, session=replace(w.session, seal=replace(w.session.seal, left_up_to=9)))
        for w in before
        if w.session and w.session.seal
    ]
    newer = replace(REFUSED, number=9, older=(make_older(2, uid_of(1), uid_of(2)), *REFUSED.older))
    assert names_of(REFUSED, before, before) == names_of(newer, later, later)


# --- a healthy group: planned changes ------------------------------------------------------------------------------

FRESH: dict[str, Any] = {"since_s": 99.9}


@pytest.mark.parametrize(
    ("workers", "bounds", "want"),
    [
        pytest.param([A, B, C, out(3)], make_bounds(4), (PLANNED, "Resized", "0,1,2,3"), id="the last joiner comes at once"),
        pytest.param([A, B, C, out(3, **FRESH)], make_bounds(5), ("keep",), id="joiners are collected for a second"),
        pytest.param([A, B, C, out(3, since_s=98.9)], make_bounds(5), (PLANNED, "Resized", "0,1,2,3"), id="a second is over"),
        pytest.param(
            [A, B, C, out(3, since_s=94.9), out(4, **FRESH)], make_bounds(6), (PLANNED, "Resized", "0,1,2,3,4"),
            id="but no longer than five",
        ),
        pytest.param([A, B, C, out(3, available=False)], make_bounds(4), ("keep",), id="only who is ready joins"),
        pytest.param([A, B, C, out(3, pod=make_pod(3, terminating=True))], make_bounds(4), ("keep",), id="not who is leaving"),
        pytest.param([A, B, C], make_bounds(2), (PLANNED, "Resized", "0,1"), id="the highest slots are drained"),
        pytest.param([A, B, C, out(3)], make_bounds(2, 1), (PLANNED, "Resized", "0,1"), id="a scale-down takes nobody in"),
        pytest.param([A, silent(1), C, out(3)], make_bounds(4), (PLANNED, "Resized", "0,1,2,3"), id="may name silent members"),
        pytest.param(
            [A, draining(1), C, out(1, 1)], make_bounds(3), (PLANNED, "Drained", "0,1.1,2"), id="a drained one hands its slot over"
        ),
        pytest.param([A, draining(1), C], make_bounds(3), (PLANNED, "Drained", "0,2"), id="or leaves it empty"),
        pytest.param([A, draining(1), C], FIXED, ("wait", "ReplacingFirst"), id="unless too few would be left"),
        pytest.param([A, B, make_worker(2, Standing.FINISHED), out(3)], make_bounds(4), ("keep",), id="not while one has finished"),
        pytest.param(
            [draining(0), draining(1), out(0, 1), out(1, 1)], make_bounds(2, 1), (PLANNED, "Drained", "0,1.1"),
            id="all are leaving: one stays until another has its state",
        ),
        pytest.param(
            [draining(0), out(0, 1)], make_bounds(1, 1), (PLANNED, "Drained", "0,0.1"), id="the only holder hands over first"
        ),
        pytest.param([draining(0), out(0, 1)], make_bounds(1, 1, session=False), ("keep",), id="a script has nothing to hand over"),
        pytest.param([draining(0), make_worker(0, attempt=1)], make_bounds(1, 1), (PLANNED, "Drained", "0.1"), id="then it leaves"),
        pytest.param(
            [draining(0), draining(1), out(0, 1)], make_bounds(2, 1), (PLANNED, "Drained", "0.1,1"),
            id="who stays is not of the slot of who comes",
        ),
        pytest.param(ALL_LEAVE, FIXED, ("keep",), id="fixed size: all are leaving and nobody comes"),
        pytest.param(
            [*ALL_LEAVE, out(0, 1)], FIXED, (PLANNED, "Drained", "0.1,1,2"), id="the first to come gets the state at once"
        ),
        pytest.param([*ALL_LEAVE, out(0, 1), out(1, 1)], FIXED, (PLANNED, "Drained", "0.1,1.1,2"), id="and so does the second"),
        pytest.param(
            [*ALL_LEAVE, out(0, 1), out(1, 1), out(2, 1)], FIXED, (PLANNED, "Drained", "0,1.1,2.1"), id="all come: one stays"
        ),
        pytest.param(
            [draining(2), out(0)], make_bounds(1, 1), (PLANNED, "Drained", "0,2"), id="the only holder has an unwanted slot"
        ),
        pytest.param(
            [draining(0), draining(2), out(0, 1)], make_bounds(1, 1), (PLANNED, "Drained", "0,0.1"), id="who has one goes first"
        ),
        pytest.param(
            [silent(0, pod=make_pod(0, terminating=True)), draining(1), out(2)], make_bounds(3, 1), (PLANNED, "Drained", "1,2"),
            id="who can be reached stays",
        ),
        pytest.param(
            [draining(2), out(0), out(1)], make_bounds(2, 1), (PLANNED, "Drained", "0,2"), id="never more than wanted"
        ),
        pytest.param(
            [*ALL_LEAVE, out(0, 1), out(0, 2)], FIXED, (PLANNED, "Drained", "0.2,1,2"), id="two pods of a slot are one that comes"
        ),
        pytest.param([A, B, out(1, 1), out(1, 2)], make_bounds(3), ("keep",), id="nobody joins a slot that is taken"),
        pytest.param([A, out(1), out(1, 1)], make_bounds(2), (PLANNED, "Resized", "0,1.1"), id="the youngest pod of a slot"),
        pytest.param(
            [B, C, out(0)], make_bounds(2, 1), (PLANNED, "Resized", "0,1"), id="wanted slots replace unwanted ones"
        ),
        pytest.param([C, make_worker(3), out(0), out(1)], make_bounds(2, 1), (PLANNED, "Resized", "0,2"), id="but a holder stays"),
        pytest.param([C, out(0)], make_bounds(1, 1), ("keep",), id="and the only one, too"),
    ],
)  # fmt: skip
def test_planned_change(workers: list[Worker], bounds: Bounds, want: Any) -> None:
    members = [w.id for w in workers if w.is_member]
    assert words(decide(workers, make_current(members), bounds)) == want


def test_nothing_is_planned_before_the_newest_has_adopted() -> None:
    current = make_current(adopted=False, announced_at_s=95.0)
    assert words(decide([A, B, C, out(3)], current, make_bounds(4))) == ("keep",)


def pending(slot: int, phase: str = Phase.TRAINING, leaves: bool = False, **changes: Any) -> Worker:
    """A member of generation 2 that has not entered it; `leaves`: it is asked to."""
    session = make_session(slot, phase, 1, heard=changes.pop("heard", 1))
    standing = changes.pop("standing", Standing.PENDING)
    return make_worker(slot, standing, session=session, pod=make_pod(slot, terminating=leaves), **changes)


def joins(slot: int, phase: str = Phase.ARRIVED, attempt: int = 0, leaves: bool = False) -> Worker:
    """A member of generation 2 that was in none before."""
    session = make_session(slot, phase, 2 if phase != Phase.READY else 0, attempt)
    standing = Standing.PENDING if phase == Phase.READY else Standing.FORMING
    return make_worker(slot, standing, attempt, session=session, pod=make_pod(slot, attempt, terminating=leaves))


@pytest.mark.parametrize(
    ("workers", "bounds", "want"),
    [
        pytest.param([pending(0), pending(1, leaves=True)], make_bounds(3, 1), (PLANNED, "Drained", "0"), id="a second one leaves"),
        pytest.param(
            [pending(0, heard=2), pending(1, leaves=True, heard=2)], make_bounds(3, 1), (PLANNED, "Drained", "0"),
            id="they have heard of the first, and finish their step",
        ),
        pytest.param([pending(0), pending(1)], make_bounds(3, 1), ("keep",), id="nobody leaves"),
        pytest.param([pending(0), pending(1, leaves=True)], make_bounds(3, 2), ("keep",), id="too few would be left"),
        pytest.param(
            [pending(0), joins(1, Phase.READY), pending(2, leaves=True)], make_bounds(3, 1), (PLANNED, "Drained", "0"),
            id="a joiner that has not entered is not waited for",
        ),
        pytest.param(
            [pending(0), joins(1, Phase.FORMING), pending(2, leaves=True)], make_bounds(3, 1), (PLANNED, "Drained", "0"),
            id="nor one that has not arrived",
        ),
        pytest.param(
            [pending(0), joins(1), pending(2, leaves=True)], make_bounds(3, 1), (PLANNED, "Drained", "0,1"), id="one that has is in"
        ),
        pytest.param(
            [pending(0), joins(1, Phase.READY), pending(2, leaves=True)], make_bounds(3, 2), ("keep",), id="unless it is needed"
        ),
        pytest.param(
            [pending(0), joins(1, leaves=True), pending(2)], make_bounds(3, 1), (PLANNED, "Drained", "0,2"), id="a joiner leaves"
        ),
        pytest.param(
            [pending(0, leaves=True), joins(0, Phase.READY, attempt=1)], make_bounds(1, 1), ("keep",), id="a hand-over has its time"
        ),
        pytest.param(
            [pending(0, Phase.BROKEN), pending(1, leaves=True)], make_bounds(3, 1), ("keep",), id="somebody has left who trained"
        ),
        pytest.param(
            [pending(0, Phase.FINISHED), pending(1, leaves=True)], make_bounds(3, 1), ("keep",), id="who has finished ignores it"
        ),
        pytest.param(
            [pending(0, standing=Standing.SILENT, available=False), pending(1, leaves=True)], make_bounds(3, 1), ("keep",),
            id="one cannot be reached",
        ),
        pytest.param(
            [pending(0), pending(1, leaves=True)], make_bounds(3, 1, session=False), ("keep",), id="a script starts anew in each"
        ),
    ],
)  # fmt: skip
def test_who_leaves_does_not_wait_for_a_change_that_has_not_begun(
    workers: list[Worker], bounds: Bounds, want: Any
) -> None:
    """Generation 2 is planned; 0, 1 and 2 train in generation 1 as far as they are not said to join."""
    joining = {w.id for w in workers if w.session is not None and w.session.condition.generation != 1}
    before = [uid_of(*m) for m in [(0, 0), (1, 0), (2, 0)] if MemberId(*m) not in joining]
    current = make_current(
        [w.id for w in workers], number=2, kind=PLANNED, adopted=False, announced_at_s=99.0, older=(make_older(1, *before),)
    )  # fmt: skip
    assert words(decide(workers, current, bounds)) == want
    unknown = replace(current, has_document=False)
    assert words(decide(workers, unknown, bounds))[0] != PLANNED, "who was told what is not known"


def test_sentences_name_numbers_and_culprits() -> None:
    forced = decide([A, B, lost(2)])
    assert isinstance(forced, Announce)
    assert (forced.message, forced.cause, forced.culprit) == (
        "worker 2 was lost with its pod; 2 workers go on.", "PodDeleted", "2",
    )  # fmt: skip
    alone = decide([A, lost(1), lost(2)], bounds=make_bounds(3, 1))
    assert isinstance(alone, Announce)
    assert alone.message == "worker 1 was lost with its pod; 1 worker goes on."
    waits = decide([A, lost(1), lost(2)])
    assert isinstance(waits, Wait)
    assert waits.message == "1 worker ready, 2 needed: worker 1 was lost with its pod; the others keep their state."
    planned = decide([A, draining(1), C, out(1, 1)])
    assert isinstance(planned, Announce)
    assert (planned.cause, planned.culprit) == ("Drained", "1")
    assert planned.message == "1 worker joins, 1 worker leaves: 3 workers train."


@pytest.mark.parametrize(
    ("ready", "session", "says"),
    [
        pytest.param([A], True, "; the others keep their state.", id="it trained"),
        pytest.param([], True, ".", id="nobody is left"),
        pytest.param([out(1, 1)], True, ".", id="one that has joined since holds no state"),
        pytest.param([A], False, "; once enough are, the script starts again in all workers.", id="tier Script"),
        *(
            pytest.param(
                [make_worker(0, session=make_session(0, phase, 1))],
                True,
                "; once enough are, the script starts again in all workers.",
                id=f"an end that is taken back: {phase}",
            )
            for phase in (Phase.FINISHING, Phase.DONE)
        ),
        pytest.param(
            [make_worker(0, session=make_session(0, Phase.FINISHED, 1))],
            True,
            "; the others keep their state.",
            id="its last step is committed, and it waits in its loop",
        ),
    ],
)
def test_sentence_of_a_wait_says_what_becomes_of_the_state(ready: list[Worker], session: bool, says: str) -> None:
    gone = {0, 1, 2} - {w.id.slot for w in ready if w.id.attempt == 0}
    waits = decide([*ready, *map(lost, sorted(gone))], bounds=replace(make_bounds(), session=session))
    assert isinstance(waits, Wait)
    assert waits.message.endswith(f" was lost with its pod{says}")


def test_among_spares_a_whole_group_goes_before_a_broken_one_of_lower_slots() -> None:
    """All slots are equal: four workers of which two train, of two groups; one of the first group is lost."""
    workers = [lost(1), make_worker(0), make_worker(2), make_worker(3)]
    current = make_current(members=(0, 1, 2, 3))
    assert words(decide(workers, current, make_bounds(2, 2, per_group=2, spares=2)))[2] == "2,3"


def test_pause_between_generations_that_do_not_form_has_no_end_of_numbers() -> None:
    """A volume that cannot be read for a night: at the 1026th attempt the pause was no float any more, and each plan failed."""
    members = [make_worker(slot, Standing.BROKEN, since_s=NOW_S - 60.0) for slot in (0, 1, 2)]
    current = make_current(adopted=False, attempts=100_000, announced_at_s=NOW_S - 60.0)
    assert isinstance(decide(members, current=current), Announce)


# --- sizes (spec.elasticPolicy.sizes) ------------------------------------------------------------------------------

EVEN = make_bounds(4, 2, permitted=(2, 4, 8))


@pytest.mark.parametrize(
    ("ready", "want"),
    [
        pytest.param([0, 1, 2, 3], (FORCED, "Started", "0,1,2,3"), id="all"),
        pytest.param([0, 1, 3], (FORCED, "StartedSmaller", "0,1"), id="three are ready, and two of them start"),
        pytest.param([2], ("wait", "TooFewReady"), id="one is no size"),
    ],
)
def test_first_generation_has_a_permitted_size(ready: list[int], want: Any) -> None:
    assert words(decide([out(slot) for slot in ready], bounds=EVEN, first=True)) == want


@pytest.mark.parametrize(
    ("workers", "members", "want"),
    [
        pytest.param([A, B, C, lost(3)], 4, (FORCED, "MemberLost", "0,1"), id="three are left, and two go on"),
        pytest.param([A, B, lost(2), lost(3)], 4, (FORCED, "MemberLost", "0,1"), id="two are left, and both go on"),
        pytest.param([A, lost(1)], 2, ("wait", "TooFewMembers"), id="one is left, and waits"),
        pytest.param([A, B, out(2)], 2, ("keep",), id="a third that comes waits for a fourth"),
        pytest.param([A, B, out(2), out(3)], 2, (PLANNED, "Resized", "0,1,2,3"), id="two that come join together"),
        pytest.param([A, lost(1), out(2)], 2, (FORCED, "MemberLost", "0,2"), id="who waits takes the place of who is lost"),
        pytest.param([A, B, C], 3, (PLANNED, "Resized", "0,1"), id="a list that no longer has the size"),
        pytest.param([A, B, C, draining(3)], 4, (PLANNED, "Drained", "0,1"), id="one of four leaves, and two go on"),
        pytest.param(
            [A, B, C, draining(3), out(3, 1)], 4, (PLANNED, "Drained", "0,1,2,3.1"), id="its replacement is ready"
        ),
        pytest.param([draining(0), draining(1), out(0, 1)], 2, (PLANNED, "Drained", "0.1,1"), id="a session hands over"),
    ],
)  # fmt: skip
def test_later_generations_have_a_permitted_size(workers: list[Worker], members: int, want: Any) -> None:
    assert words(decide(workers, make_current(range(members)), EVEN)) == want


def test_session_is_handed_over_at_any_size() -> None:
    """Rule HANDOVER: what only the leaving worker holds would be lost."""
    bounds = make_bounds(1, 1, permitted=(1, 4))
    got = decide([draining(0), out(0, 1)], make_current([0]), bounds)
    assert words(got) == (PLANNED, "Drained", "0,0.1")


def test_wait_says_how_many_of_the_ready_workers_may_train() -> None:
    got = decide([out(0), out(1), out(2)], bounds=EVEN, first=True, now_s=1.0)
    assert isinstance(got, Wait)
    assert got.message.startswith(
        "3 workers ready, of which 2 may train (the next size of spec.elasticPolicy is 4), 4 wanted; starting"
    )
