"""Who holds a job up, and what is done about it: waited for, restarted in place, replaced. Ids are sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Busy, Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Setback, Spell
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.allowances import ENTER_STEPS
from regroup_operator.plan.generation.lateness import (
    MAX_SETBACKS,
    SETBACK_S,
    Attendance,
    Lateness,
    longest_start,
    see_lateness,
    with_setbacks,
)
from tests.builders.plan import make_current, make_pod, make_seal, make_session, make_worker, uid_of

NOW_S = 1000.0
SETTINGS = Settings()
LATE_S, REPLACE_S, START_S = SETTINGS.late_timeout_s, SETTINGS.replace_after_s, SETTINGS.start_timeout_s
SECOND = make_current(number=2, adopted=False)


def see(workers: list[Worker], current: Current | None = SECOND, **given: Any) -> Lateness:
    values: dict[str, Any] = {"spells": {}, "setbacks": {}, "released": frozenset(), "step_s": 0.0, "now_s": NOW_S}
    return see_lateness(Attendance(workers=workers, current=current, settings=SETTINGS, **values | given))


def spell(kind: str, ago_s: float, restarted_ago_s: float | None = None) -> Spell:
    return Spell(kind, NOW_S - ago_s, None if restarted_ago_s is None else NOW_S - restarted_ago_s)


def holder(slot: int) -> Worker:
    """Return a worker that waits, in no group, with a state."""
    seal = make_seal(1, (1, 9), adopted=1, state_adopted=1)
    return make_worker(slot, Standing.OUTSIDE, session=make_session(slot, Phase.BROKEN, 1, seal=seal))


BEHIND = make_worker(2, Standing.PENDING, session=make_session(2, Phase.TRAINING, 1))
LEFT_OUT = make_worker(2, Standing.OUTSIDE, session=make_session(2, Phase.TRAINING, 1))
HALF_OUT = make_worker(2, Standing.OUTSIDE, session=make_session(2, Phase.BROKEN, 1, heard=2))
"""One of its processes waits, another is still in generation 1: the worker has no seal."""
FORMS = make_worker(2, Standing.FORMING, session=make_session(2, Phase.FORMING, 2))
AT_STORE = make_worker(1, Standing.FORMING, session=make_session(1, Phase.ARRIVED, 2))
STARTS = make_worker(2, Standing.OUTSIDE, session=make_session(2, Phase.STARTING, condition_at_s=0.0), available=False)
GONE_DARK = make_worker(2, Standing.LOST, session=make_session(2, connected=False), available=False)
FROZEN = make_worker(2, Standing.OUTSIDE, session=make_session(2, unanswered_since_s=1.0), available=False)
KEEPS = holder(0)
READY = make_worker(2, Standing.PENDING, session=make_session(2, Phase.READY))


def planned(ago_s: float) -> Current:
    """Return a planned generation of so long ago that not all have adopted."""
    return replace(SECOND, kind=PLANNED, announced_at_s=NOW_S - ago_s)


@pytest.mark.parametrize(
    ("worker", "current", "kind"),
    [
        pytest.param(BEHIND, SECOND, "behind", id="a member that is still in the generation before"),
        pytest.param(BEHIND, planned(29.0), None, id="planned: it trains on until all know"),
        pytest.param(BEHIND, planned(31.0), None, id="planned and overdue: too few are left, and it holds the state"),
        pytest.param(
            READY, replace(planned(61.0), has_document=False), None, id="planned by another operator: nobody was told"
        ),
        pytest.param(FORMS, planned(29.0), None, id="planned: the others have time to come"),
        pytest.param(FORMS, planned(31.0), "behind", id="planned and overdue: it does not arrive"),
        pytest.param(READY, planned(31.0), "behind", id="planned and overdue: it does not enter"),
        pytest.param(LEFT_OUT, SECOND, "behind", id="who was left out and does not leave"),
        pytest.param(
            make_worker(2, Standing.OUTSIDE, session=make_session(2, Phase.FINISHED, 1)),
            SECOND,
            "behind",
            id="who has finished the one before and does not come",
        ),
        pytest.param(HALF_OUT, SECOND, "behind", id="who was left out, and only some of its processes leave"),
        pytest.param(
            replace(HALF_OUT, session=make_session(2, Phase.BROKEN, 1, heard=1)),
            replace(SECOND, has_document=False),
            None,
            id="it has not heard of the newest one",
        ),
        pytest.param(
            replace(HALF_OUT, session=make_session(2, Phase.BROKEN, 1, heard=2, seal=make_seal(1, (1, 9)))),
            SECOND,
            None,
            id="all of its processes have left",
        ),
        pytest.param(make_worker(2, Standing.PENDING), SECOND, "behind", id="a member that waits and does not enter"),
        pytest.param(FORMS, SECOND, "behind", id="it has entered, the others wait at the store"),
        pytest.param(replace(FORMS, standing=Standing.TRAINING), SECOND, None, id="it trains"),
        pytest.param(STARTS, SECOND, "start", id="its processes start"),
        pytest.param(GONE_DARK, SECOND, "unreachable", id="a lost member whose pod is there"),
        pytest.param(
            replace(GONE_DARK, standing=Standing.SILENT), SECOND, None, id="a silent one: progress may prove it"
        ),
        pytest.param(FROZEN, SECOND, "unreachable", id="a frozen agent behind an open stream"),
        pytest.param(make_worker(2, Standing.OUTSIDE, session=None), SECOND, None, id="an agent that has never called"),
        pytest.param(replace(BEHIND, pod=make_pod(2, terminating=True)), SECOND, None, id="who leaves anyway"),
    ],
)
def test_who_is_late(worker: Worker, current: Current, kind: str | None) -> None:
    spells = see([KEEPS, AT_STORE, worker], current).spells or {}
    assert {uid: s.kind for uid, s in spells.items()} == ({uid_of(2): kind} if kind else {})


@pytest.mark.parametrize(
    ("worker", "known", "restarted", "replaced"),
    [
        pytest.param(BEHIND, spell("behind", LATE_S - 1), False, False, id="in time"),
        pytest.param(BEHIND, spell("behind", LATE_S), True, False, id="restarted in place"),
        pytest.param(BEHIND, spell("behind", 90, 1), False, False, id="once"),
        pytest.param(BEHIND, spell("behind", 200, LATE_S), False, True, id="nothing came of it: replaced"),
        pytest.param(BEHIND, spell("start", 200, LATE_S), False, False, id="it was late in another way: that is over"),
        pytest.param(STARTS, None, True, False, id="a start of which nobody knows how long it takes"),
        pytest.param(GONE_DARK, spell("unreachable", REPLACE_S - 1), False, False, id="it may come back"),
        pytest.param(GONE_DARK, spell("unreachable", REPLACE_S), False, True, id="it does not: another pod"),
    ],
)
def test_what_is_done_about_it(worker: Worker, known: Spell | None, restarted: bool, replaced: bool) -> None:
    got = see([KEEPS, worker], spells={uid_of(2): known} if known else {})
    assert ([w.id.slot for w, _ in got.restart], got.replace) == (
        [2] if restarted else [],
        frozenset({uid_of(2)} if replaced else ()),
    )
    if not replaced and known is not None and known.kind != "start":
        assert got.due_s is not None
        assert got.due_s > NOW_S


@pytest.mark.parametrize(
    ("node_ready", "at_fault", "ago_s", "replaced"),
    [
        pytest.param(True, False, REPLACE_S, True, id="it alone cannot be reached"),
        pytest.param(True, True, REPLACE_S, False, id="many of all jobs cannot: the operator suspects itself"),
        pytest.param(True, True, 10 * REPLACE_S, True, id="not for ever"),
        pytest.param(False, True, REPLACE_S, True, id="its node is not ready: that explains it"),
    ],
)
def test_who_is_replaced_while_many_cannot_be_reached(
    node_ready: bool, at_fault: bool, ago_s: float, replaced: bool
) -> None:
    gone = replace(GONE_DARK, pod=make_pod(2, node_ready=node_ready))
    got = see([KEEPS, gone], spells={uid_of(2): spell("unreachable", ago_s)}, at_fault=at_fault)
    assert got.replace == frozenset({uid_of(2)} if replaced else ())


def test_start_is_measured_by_the_starts_before_it() -> None:
    started = replace(STARTS, session=make_session(2, Phase.STARTING, condition_at_s=NOW_S - LATE_S))
    assert not see([KEEPS, started]).restart, "no start has been seen"
    assert see([KEEPS, started], longest_start_s=3.0).restart
    assert not see([KEEPS, started], longest_start_s=100.0).restart
    assert see([KEEPS, started], longest_start_s=100.0, now_s=NOW_S + 340.0).restart


@pytest.mark.parametrize(
    ("known_s", "starts_s", "want"),
    [
        pytest.param(None, (), None, id="none was seen"),
        pytest.param(None, (None,), None, id="it starts still"),
        pytest.param(None, (0.2, None), 1, id="the shortest counts as a second"),
        pytest.param(7, (), 7, id="seen by another operator, or of a pod that is gone"),
        pytest.param(7, (3.0, 9.1), 10, id="rounded up: the longest"),
        pytest.param(7, (86_400.0,), int(START_S), id="a container that was stopped for a day"),
    ],
)
def test_longest_start(known_s: int | None, starts_s: tuple[float | None, ...], want: int | None) -> None:
    sessions = [make_session(slot, Phase.READY, start_s=start_s) for slot, start_s in enumerate(starts_s)]
    assert longest_start(known_s, sessions, SETTINGS) == want


def test_steps_that_took_long_once_are_no_longer_than_the_user_says_a_hang_is() -> None:
    """The duration of a step may hold half a minute in which nobody read a log (walk 30972)."""
    known = {uid_of(2): spell("behind", 100)}
    assert not see([KEEPS, BEHIND], spells=known, step_s=24.0).restart
    assert see([KEEPS, BEHIND], spells=known, step_s=24.0, alone_s=90.0).restart
    assert not see([KEEPS, BEHIND], spells=known, step_s=24.0, alone_s=120.0).restart


def test_long_steps_make_nobody_late() -> None:
    known = {uid_of(2): spell("behind", 100)}
    assert see([KEEPS, BEHIND], spells=known, step_s=1.0).restart
    assert not see([KEEPS, BEHIND], spells=known, step_s=10.0).restart


def busy(worker: Worker, what: Busy, *, ago_s: float) -> Worker:
    """Return the worker with processes that have been at something for so long."""
    assert worker.session is not None
    condition = replace(worker.session.condition, busy=(what,))
    return replace(worker, session=replace(worker.session, condition=condition, busy_since_s=(NOW_S - ago_s,)))


PAUSE = Busy(Busy.PAUSE, "eval", 1800.0)


@pytest.mark.parametrize(
    ("what", "began_ago_s", "missed_ago_s", "late"),
    [
        pytest.param(PAUSE, 1799, 1500, False, id="in a pause, as long as the script has said"),
        pytest.param(PAUSE, 1800, 1500, True, id="in a pause for longer than it has said"),
        pytest.param(PAUSE, 10, 1799, False, id="a pause that began while it was missed, ..."),
        pytest.param(PAUSE, 10, 1800, True, id="... which counts from then: pauses in a row end"),
        pytest.param(replace(PAUSE, max_s=5.0), 59, LATE_S - 1, False, id="a short pause: in time like everybody"),
        pytest.param(replace(PAUSE, max_s=5.0), 60, LATE_S, True, id="a short pause is no earlier end"),
        pytest.param(replace(PAUSE, max_s=None), 299, 200, False, id="a pause of no stated length: like a long step"),
        pytest.param(replace(PAUSE, max_s=None), 300, 200, True, id="and no longer"),
        pytest.param(Busy(Busy.FIRST_STEP), 1799, 1700, False, id="its first step compiles"),
        pytest.param(Busy(Busy.FIRST_STEP), 1800, 1700, True, id="its first step has had its time"),
        pytest.param(Busy(Busy.CHECKPOINT), 1799, 1700, False, id="it waits for a checkpoint"),
        pytest.param(Busy(Busy.CHECKPOINT), 1800, 1700, True, id="the checkpoint has had its time"),
        pytest.param(Busy(Busy.CHECKPOINT, max_s=90.0), 90, 70, True, id="by the bound that its process has said"),
    ],
)
def test_who_is_at_something_longer_than_a_step_is_late_after_its_allowance(
    what: Busy, began_ago_s: float, missed_ago_s: float, late: bool
) -> None:
    got = see([KEEPS, busy(BEHIND, what, ago_s=began_ago_s)], spells={uid_of(2): spell("behind", missed_ago_s)})
    assert bool(got.restart) is late
    assert got.due_s is not None
    assert got.due_s > NOW_S


def rehearses(since_s: float) -> Worker:
    """Return a worker whose processes have started, and rehearsed a minute later; nothing has come of it by now."""
    starts = replace(STARTS, session=make_session(2, Phase.STARTING, condition_at_s=since_s))
    return busy(starts, Busy(Busy.FIRST_STEP), ago_s=NOW_S - since_s - 60.0)


@pytest.mark.parametrize(
    ("known", "started_ago_s", "restarted", "replaced"),
    [
        pytest.param(None, 1799, False, False, id="it may compile for as long as a first step"),
        pytest.param(None, 1800, True, False, id="and no longer: its processes are restarted"),
        pytest.param(spell("start", 3600, 1799), 1799, False, False, id="the new ones may, too"),
        pytest.param(spell("start", 3600, 1800), 1800, False, True, id="nothing came of it: another pod"),
    ],
)
def test_rehearsal_is_a_start_that_may_take_as_long_as_a_first_step(
    known: Spell | None, started_ago_s: float, restarted: bool, replaced: bool
) -> None:
    spells = {uid_of(2): known} if known else {}
    got = see([KEEPS, rehearses(NOW_S - started_ago_s)], spells=spells, longest_start_s=3.0)
    assert (bool(got.restart), bool(got.replace)) == (restarted, replaced)
    if not replaced:
        assert got.due_s is not None
        assert got.due_s > NOW_S


def test_setbacks_replace_nobody_before_its_allowance_is_over() -> None:
    often = {uid_of(2): Setback(MAX_SETBACKS, NOW_S - 1000, NOW_S, 1.0)}
    assert see([KEEPS, busy(BEHIND, PAUSE, ago_s=1799)], setbacks=often).replace == frozenset()
    assert see([KEEPS, busy(BEHIND, PAUSE, ago_s=1800)], setbacks=often).replace == {uid_of(2)}


def test_only_holder_gets_longer() -> None:
    lost_all = replace(holder(0), session=make_session(0, Phase.BROKEN, 1, seal=make_seal(1, None, adopted=1)))
    known = {uid_of(2): spell("behind", 4 * LATE_S)}
    assert not see([lost_all, BEHIND], spells=known).restart
    assert see([KEEPS, BEHIND], spells=known).restart
    assert see([lost_all, BEHIND], spells={uid_of(2): spell("behind", 5 * LATE_S)}).restart


def test_only_holder_gets_no_longer_than_a_hang_that_the_user_has_bounded() -> None:
    lost_all = replace(holder(0), session=make_session(0, Phase.BROKEN, 1, seal=make_seal(1, None, adopted=1)))
    known = {uid_of(2): spell("behind", 90)}
    assert see([lost_all, BEHIND], spells=known, alone_s=90.0).restart
    assert not see([lost_all, BEHIND], spells=known, alone_s=91.0).restart
    assert not see([lost_all, BEHIND], spells={uid_of(2): spell("behind", LATE_S - 1)}, alone_s=1.0).restart
    assert see([lost_all, BEHIND], spells={uid_of(2): spell("behind", 5 * LATE_S)}, alone_s=1e6).restart


def test_where_nobody_can_be_reached_nobody_is_replaced_in_haste() -> None:
    """The operator's own network is the likelier cause."""
    others = [replace(GONE_DARK, id=MemberId(slot, 0), pod=make_pod(slot)) for slot in (0, 1)]
    known = {uid_of(slot): spell("unreachable", REPLACE_S) for slot in (0, 1, 2)}
    assert see([*others, GONE_DARK], spells=known).replace == frozenset()
    later = {uid_of(slot): spell("unreachable", 10 * REPLACE_S) for slot in (0, 1, 2)}
    assert len(see([*others, GONE_DARK], spells=later).replace) == 3


def test_setbacks_bar_for_longer_each_time_and_end_with_an_adoption() -> None:
    first_s, last_s = SETBACK_S
    once = with_setbacks({}, [BEHIND], frozenset({BEHIND.id}), NOW_S)
    assert once == {uid_of(2): Setback(1, NOW_S, NOW_S + first_s, first_s)}
    needed = with_setbacks(once, [BEHIND], frozenset({BEHIND.id}), NOW_S + 1)
    assert (needed[uid_of(2)].count, needed[uid_of(2)].until_s) == (2, NOW_S + first_s)
    again = with_setbacks(once, [BEHIND], frozenset({BEHIND.id}), NOW_S + first_s)
    assert again[uid_of(2)].until_s == NOW_S + 3 * first_s
    much = with_setbacks({uid_of(2): Setback(9, 0.0, 0.0, last_s)}, [BEHIND], frozenset({BEHIND.id}), NOW_S)
    assert much[uid_of(2)].until_s == NOW_S + last_s
    assert with_setbacks(once, [make_worker(2)], frozenset(), NOW_S) == {}
    assert with_setbacks(once, [KEEPS], frozenset(), NOW_S) == {}


def test_worker_that_keeps_generation_after_generation_from_forming_is_replaced() -> None:
    often = {uid_of(2): Setback(MAX_SETBACKS, NOW_S - LATE_S, NOW_S, 1.0)}
    waits = make_worker(2, Standing.BROKEN)
    assert see([KEEPS, waits], setbacks=often).replace == {uid_of(2)}
    assert (
        see([KEEPS, waits], setbacks={uid_of(2): replace(often[uid_of(2)], since_s=NOW_S - 1)}).replace == frozenset()
    )
    assert see([KEEPS, waits], setbacks={uid_of(2): replace(often[uid_of(2)], count=1)}).replace == frozenset()


def test_question_that_is_on_its_way_begins_no_other_spell() -> None:
    """A worker that hangs has an agent that answers: it is asked every second, and was never late for long enough."""
    asked = replace(LEFT_OUT, session=make_session(2, Phase.TRAINING, 1, unanswered_since_s=NOW_S - 0.02))
    seen = see([KEEPS, asked], spells={uid_of(2): spell("behind", LATE_S + 1.0)})
    assert [worker.id for worker, _ in seen.restart] == [asked.id]


def test_worker_alone_whose_processes_wait_for_each_other_is_late() -> None:
    """One of its two processes has entered and the other hangs in the generation before: nobody else is there to be late."""
    alone = replace(FORMS, session=make_session(2, Phase.FORMING, 2, entered=2, heard=2, adopted_to=1, step=9))
    soon = see([alone], spells={uid_of(2): spell("behind", LATE_S + 1.0)})
    assert not soon.restart, "it may be the only one to hold the state"
    late = see([alone], spells={uid_of(2): spell("behind", LATE_S + 1.0)}, alone_s=LATE_S)
    assert [worker.id for worker, _ in late.restart] == [alone.id]
    missing = make_worker(1, Standing.LOST, session=make_session(1, connected=False), available=False)
    assert not see([alone, missing], alone_s=0.0, spells={uid_of(2): spell("behind", LATE_S + 1.0)}).restart


SET_BACK = {uid_of(2): Setback(1, NOW_S - 80.0, NOW_S - 20.0, 60.0)}
MISSED = {uid_of(2): spell("behind", LATE_S + 40.0)}
"""Worker 2 did not enter a generation, and was left out of the next ones for a while, which is over."""


def test_worker_that_is_left_out_because_it_did_not_come_is_missed_until_it_comes() -> None:
    """Generations with the only holder of the state, whose process hangs, and without it followed each other."""
    left_out = make_worker(2, Standing.OUTSIDE)
    assert see([KEEPS, left_out], spells=MISSED, setbacks=SET_BACK).spells == MISSED
    assert see([KEEPS, left_out], spells=MISSED).spells == {}, "it has trained since, or never was set back"
    named = replace(left_out, standing=Standing.PENDING)
    for announced_s, restarted in ((4.0, []), (6.0, [named.id])):
        again = replace(SECOND, announced_at_s=NOW_S - announced_s)
        seen = see([KEEPS, named], again, spells=MISSED, setbacks=SET_BACK)
        assert [worker.id for worker, _ in seen.restart] == restarted


@pytest.mark.parametrize(
    ("worker", "kept"),
    [
        pytest.param(READY, True, id="it does not enter this one either"),
        pytest.param(FORMS, True, id="it enters, and does not arrive at the store"),
        pytest.param(
            replace(FORMS, session=make_session(2, Phase.ARRIVED, 2, entered=2)), False, id="it arrives at the store"
        ),
        pytest.param(holder(2), True, id="it waits outside"),
        pytest.param(
            make_worker(2, Standing.BROKEN, session=make_session(2, Phase.BROKEN, 2)), False,
            id="it was in this one, which broke",
        ),
    ],
)  # fmt: skip
def test_how_long_a_worker_that_did_not_come_is_missed(worker: Worker, kept: bool) -> None:
    trains = make_worker(1, Standing.PENDING, session=make_session(1, Phase.TRAINING, 1))
    got = see([KEEPS, trains, worker], planned(1.0), spells=MISSED, setbacks=SET_BACK)
    assert (got.spells == MISSED) is kept


@pytest.mark.parametrize(
    ("worker", "announced_ago_s", "restarted"),
    [
        pytest.param(READY, 4.0, False, id="it has a moment to enter"),
        pytest.param(READY, 6.0, True, id="it does not: nobody waits for the deadline of the generation"),
        pytest.param(
            replace(READY, session=make_session(2, Phase.TRAINING, 1)), 6.0, False, id="it trains in the one before"
        ),
    ],
)
def test_joiner_that_did_not_come_before_is_restarted_when_it_does_not_come_again(
    worker: Worker, announced_ago_s: float, restarted: bool
) -> None:
    """Planned generations with a joiner whose process was stopped, and forced ones without it, followed each other (walk 11782)."""
    got = see([KEEPS, AT_STORE, worker], planned(announced_ago_s), spells=MISSED, setbacks=SET_BACK)
    assert [w.id for w, _ in got.restart] == ([worker.id] if restarted else [])
    assert not see([KEEPS, AT_STORE, worker], planned(announced_ago_s)).restart, "the first time it has all its time"


@pytest.mark.parametrize("step_s", [0.0, 2.0, 20.0])
def test_joiner_is_missed_at_the_latest_when_a_planned_generation_is_given_up_for_it(step_s: float) -> None:
    """At that moment the next generation is announced without it: later nobody would know that it was missed."""
    given_up_s = max(SETTINGS.planned_timeout_s, ENTER_STEPS * step_s)
    assert see([KEEPS, READY], planned(given_up_s - 1.0), step_s=step_s).spells == {}
    assert uid_of(2) in (see([KEEPS, READY], planned(given_up_s), step_s=step_s).spells or {})


def test_worker_that_was_restarted_in_place_may_enter_before_it_is_replaced() -> None:
    tried = {uid_of(2): spell("behind", 300.0, 200.0)}
    for announced_s, replaced in ((4.0, False), (6.0, True)):
        again = replace(SECOND, announced_at_s=NOW_S - announced_s)
        got = see([KEEPS, READY], again, spells=tried, setbacks=SET_BACK)
        assert bool(got.replace) is replaced


def test_of_holders_that_are_all_late_one_is_spared() -> None:
    """An evaluation that nobody has declared takes all of them as long: restarted together, they would lose the state."""
    late = [make_worker(s, Standing.PENDING, session=make_session(s, Phase.TRAINING, 1)) for s in (0, 1, 2)]
    seen = see(late, spells={uid_of(s): spell("behind", LATE_S + 1.0) for s in (0, 1, 2)})
    assert [worker.id.slot for worker, _ in seen.restart] == [1, 2]


def test_fresh_process_that_forms_is_no_other_holder() -> None:
    fresh = make_worker(
        1, Standing.FORMING, session=make_session(1, Phase.ARRIVED, 2, entered=2, heard=2, adopted_to=1)
    )
    late = make_worker(0, Standing.PENDING, session=make_session(0, Phase.TRAINING, 1))
    assert not see([late, fresh], spells={uid_of(0): spell("behind", LATE_S + 1.0)}).restart
    brings = replace(fresh, session=make_session(1, Phase.ARRIVED, 2, entered=2, heard=2, adopted_to=1, step=9))
    assert see([late, brings], spells={uid_of(0): spell("behind", LATE_S + 1.0)}).restart
