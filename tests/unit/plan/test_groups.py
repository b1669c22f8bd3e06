"""Workers in groups: who is in one with whom, and that every decision is in whole groups. Ids are sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from regroup.protocol.document import FORCED, PLANNED
from regroup.protocol.state import Phase
from regroup.protocol.wire import ProcessStack, Stacks
from regroup_operator.api.members import MemberId
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import (
    Announce,
    Bounds,
    Current,
    Decision,
    Refusal,
    Situation,
    Standing,
    Wait,
    Worker,
)
from regroup_operator.plan.facts.groups import choose, put_together, spare_words, whole_size
from regroup_operator.plan.failures.hangs import find_hang
from regroup_operator.plan.generation.decision import next_generation
from regroup_operator.plan.generation.lateness import Attendance, see_lateness
from regroup_operator.plan.generation.links import cut_off
from regroup_operator.plan.report.conditions import Course, training_conditions
from regroup_operator.plan.report.leaving import leaving_words
from tests.builders.plan import (
    make_bounds,
    make_current,
    make_fault,
    make_older,
    make_pod,
    make_progress,
    make_seal,
    make_session,
    make_worker,
    uid_of,
)

NOW_S = 100.0
SETTINGS = Settings()
Place = int | tuple[int, int]


def text(members: tuple[Worker, ...], per_group: int = 2) -> str:
    """Return the groups as a table writes them: 0 1 | 2 3."""
    names = [str(w.id) for w in members]
    return " | ".join(" ".join(names[i : i + per_group]) for i in range(0, len(names), per_group))


def trains(place: Place, **changes: Any) -> Worker:
    slot, attempt = (place, 0) if isinstance(place, int) else place
    return make_worker(slot, Standing.TRAINING, attempt, **changes)


def ready(place: Place, **changes: Any) -> Worker:
    slot, attempt = (place, 0) if isinstance(place, int) else place
    return make_worker(slot, Standing.OUTSIDE, attempt, **changes)


def gone(slot: int) -> Worker:
    return make_worker(slot, Standing.LOST, pod=None, session=None, why="PodDeleted", since_s=90.0)


def leaves(slot: int) -> Worker:
    return make_worker(slot, pod=make_pod(slot, terminating=True))


def broken(slot: int, peer: int | None = None, **changes: Any) -> Worker:
    fault = make_fault(peer=None if peer is None else uid_of(peer))
    session = make_session(slot, Phase.BROKEN, 1, fault=fault, fault_generation=1, fault_at_s=90.0)
    return make_worker(
        slot, Standing.BROKEN, **{"session": session, "why": "CollectiveFailed", "since_s": 90.0, **changes}
    )


def groups_of(replicas: int = 6, minimum: int = 2, **changes: Any) -> Bounds:
    return make_bounds(replicas, minimum, **{"per_group": 2, **changes})


def decide(workers: list[Worker], current: Current | None, bounds: Bounds, **changes: Any) -> Decision:
    values: dict[str, Any] = {"now_s": NOW_S, "settings": SETTINGS}
    return next_generation(current, Situation(workers=tuple(workers), bounds=bounds, **values | changes))


def words(decision: Decision) -> tuple[str, ...]:
    if isinstance(decision, Announce):
        return (decision.kind, decision.reason, text(decision.members))
    return ("wait", decision.reason) if isinstance(decision, Wait) else ("keep",)


# --- who is with whom ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "chosen", "want"),
    [
        pytest.param([], [0, 1, 2, 3], "0 1 | 2 3", id="neighbours at the start"),
        pytest.param([], [3, 1, 2, 0], "0 1 | 2 3", id="whatever their order"),
        pytest.param([], [0, 3], "0 3", id="whom there is"),
        pytest.param([0, 3, 2, 1], [0, 1, 2, 3], "0 3 | 2 1", id="who has trained together stays together"),
        pytest.param([0, 1, 2, 3, 4, 5], [2, 3, 4, 5], "2 3 | 4 5", id="whole groups stay"),
        pytest.param([0, 1, 2, 3, 4, 5], [0, 2, 3, 5], "0 5 | 2 3", id="survivors of broken groups are put together"),
        pytest.param(
            [0, 1, 2, 3, 4, 5], [0, 2, 3, 5, (4, 1), 7], "0 7 | 2 3 | 4.1 5", id="each broken group is made whole"
        ),
        pytest.param([0, 1, 2, 3], [0, 1, 2, (3, 1)], "0 1 | 2 3.1", id="a replacement takes the place"),
        pytest.param(
            [0, 3, 2, 1], [0, 3, 2, (1, 1)], "0 3 | 2 1.1", id="a replacement takes the place in another order"
        ),
        pytest.param([0, 3, 2, 1], [0, 1], "0 1", id="low slots of two groups"),
        pytest.param([0, 1, 2, 3, 4, 5], [0, 2, 7, 5], "0 5 | 2 7", id="a survivor fills a gap before who is new"),
        pytest.param([0, 1], [0, 1, (0, 1), (1, 1)], "0 1 | 0.1 1.1", id="who leaves beside who comes"),
    ],
)
def test_groups_are_put_together(before: list[int], chosen: list[Place], want: str) -> None:
    members = [MemberId(slot, 0) for slot in before]
    workers = [trains(p) if p in before else ready(p) for p in chosen]
    ranked = [[w for w in workers if w.id.slot % 2 == position] for position in (0, 1)]
    assert text(put_together(ranked, members, 2)) == want


def test_as_few_members_as_possible_change_their_group() -> None:
    """Of three places each: {0, 1}, {3, 4}, {6} survive. The two pairs stay, and 6 fills the gap of nobody's."""
    before = [MemberId(slot, 0) for slot in range(9)]
    survivors = [trains(slot) for slot in (0, 1, 3, 4, 6)] + [
        ready((2, 1)),
        ready((5, 1)),
        ready((7, 1)),
        ready((8, 1)),
    ]
    ranked = [[w for w in survivors if w.id.slot % 3 == position] for position in range(3)]
    assert text(put_together(ranked, before, 3), 3) == "0 1 2.1 | 3 4 5.1 | 6 7.1 8.1"
    ranked = [some[:2] for some in ranked]
    assert text(put_together(ranked, before, 3), 3) == "0 1 2.1 | 3 4 5.1"


def test_largest_part_stays_whatever_its_slots() -> None:
    before = [MemberId(slot, 0) for slot in range(9)]
    ranked = [[trains(0), trains(6)], [trains(4), trains(7)], [trains(8), ready(11)]]
    assert text(put_together(ranked, before, 3), 3) == "0 4 11 | 6 7 8"


@pytest.mark.parametrize(
    ("slots", "per_group", "want"),
    [([0, 1, 2], 1, 3), ([0, 1, 2], 2, 2), ([0, 2, 4], 2, 0), ([0, 3, 4, 7, 9], 2, 4), ([0, 1, 5], 3, 3), ([], 2, 0)],
)
def test_how_many_can_train(slots: list[int], per_group: int, want: int) -> None:
    workers = [ready(slot) for slot in slots]
    assert whole_size(workers, per_group) == want
    assert len(choose(workers, make_bounds(9 * per_group, per_group, per_group=per_group), ())) == want


# --- the first generation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "bounds", "want"),
    [
        pytest.param([0, 1, 2, 3], groups_of(4), (FORCED, "Started", "0 1 | 2 3"), id="all"),
        pytest.param([0, 1, 2], groups_of(4), (FORCED, "StartedSmaller", "0 1"), id="the whole groups"),
        pytest.param([0, 2, 3], groups_of(4), (FORCED, "StartedSmaller", "2 3"), id="neighbours before others"),
        pytest.param(
            [0, 3], groups_of(4), (FORCED, "StartedSmaller", "0 3"), id="others where there are no neighbours"
        ),
        pytest.param([0, 2, 4], groups_of(6), ("wait", "TooFewReady"), id="three of one position are no group"),
        pytest.param(
            [0, 1, 2, 4], groups_of(6, 4), ("wait", "TooFewReady"), id="four workers, one group of two needed"
        ),
        pytest.param([0, 1, 2], groups_of(4, 4, elastic=False), ("wait", "TooFewReady"), id="fixed size"),
    ],
)
def test_job_starts_in_whole_groups(slots: list[int], bounds: Bounds, want: tuple[str, ...]) -> None:
    assert words(decide([ready(slot) for slot in slots], None, bounds)) == want


def test_time_to_wait_for_more_begins_with_the_first_whole_group() -> None:
    """Two workers of one position have long been ready; the partner of one of them only now."""
    came = [ready(0, since_s=10.0), ready(2, since_s=20.0), ready(3, since_s=99.0)]
    got = decide(came, None, groups_of(4))
    assert isinstance(got, Wait)
    assert (got.reason, got.until) == ("WaitingForMore", 99.0 + SETTINGS.first_wait_s)


def test_who_is_left_over_is_said() -> None:
    got = decide([ready(slot) for slot in (0, 2, 4)], None, groups_of(6))
    assert isinstance(got, Wait)
    assert got.message == ("0 workers ready in whole groups of 2 and 3 without one, 6 wanted, at least 2 needed.")


# --- a broken group ------------------------------------------------------------------------------------------------

SIX = make_current([0, 1, 2, 3, 4, 5])
MIXED = make_current([0, 3, 2, 1])


@pytest.mark.parametrize(
    ("workers", "current", "bounds", "want"),
    [
        pytest.param([trains(0), gone(1), *map(trains, (2, 3, 4, 5))], SIX, groups_of(),
                     (FORCED, "MemberLost", "2 3 | 4 5"), id="the partner of a lost worker is left over"),
        pytest.param([trains(0), gone(1), trains(2), trains(3), gone(4), trains(5)], SIX, groups_of(),
                     (FORCED, "MemberLost", "0 5 | 2 3"), id="two survivors of broken groups go on together"),
        pytest.param([trains(0), gone(1), trains(2), trains(3), trains(4), gone(5)], SIX, groups_of(),
                     (FORCED, "MemberLost", "2 3"), id="two survivors of one position do not"),
        pytest.param([trains(0), gone(1), ready((1, 1)), *map(trains, (2, 3, 4, 5))], SIX, groups_of(),
                     (FORCED, "MemberLost", "0 1.1 | 2 3 | 4 5"), id="a replacement that is ready"),
        pytest.param([trains(0), gone(1), *map(trains, (2, 3)), ready(5)], make_current([0, 1, 2, 3]), groups_of(),
                     (FORCED, "MemberLost", "0 5 | 2 3"), id="a spare of the position takes the place"),
        pytest.param([trains(0), gone(1), *map(trains, (2, 3)), ready(4)], make_current([0, 1, 2, 3]), groups_of(),
                     (FORCED, "MemberLost", "2 3"), id="a spare of another position does not"),
        pytest.param([trains(0), trains(1), trains(2), gone(3)], MIXED, groups_of(4),
                     (FORCED, "MemberLost", "2 1"), id="who trained together, not who are neighbours"),
        pytest.param([trains(0), gone(1), trains(2), trains(3)], make_current([0, 1, 2, 3]), groups_of(4, 4),
                     ("wait", "TooFewMembers"), id="fewer whole groups than needed"),
        pytest.param([trains(0), gone(1)], make_current([0, 1]), groups_of(2),
                     ("wait", "TooFewMembers"), id="no whole group"),
        pytest.param([*map(trains, (0, 1, 2, 3)), trains(4), gone(5)], SIX, groups_of(2),
                     (FORCED, "MemberLost", "0 1"), id="slots that are wanted no more come last"),
        pytest.param([trains(0), gone(1), trains(2), trains(3)], make_current([0, 1, 2, 3]), groups_of(2),
                     (FORCED, "MemberLost", "0 3"), id="a slot that is wanted comes before a group that is whole"),
        pytest.param([trains(0), ready(1, barred_until_s=200.0), trains(2), gone(3), gone(5)], make_current([0, 5, 2, 3]),
                     groups_of(4), (FORCED, "MemberLost", "0 1"), id="who came late is needed for a whole group"),
        pytest.param([trains(0), ready(1, pod=make_pod(1, terminating=True)), trains(2), gone(3), gone(5)],
                     make_current([0, 5, 2, 3]), groups_of(4),
                     (FORCED, "MemberLost", "0 1"), id="who leaves is needed for a whole group"),
    ],
)  # fmt: skip
def test_broken_generation_goes_on_in_whole_groups(
    workers: list[Worker], current: Current, bounds: Bounds, want: tuple[str, ...]
) -> None:
    assert words(decide(workers, current, bounds)) == want


def test_too_few_are_counted_in_whole_groups() -> None:
    got = decide([trains(0), gone(1), trains(2), trains(3)], make_current([0, 1, 2, 3]), groups_of(4, 4))
    assert isinstance(got, Wait)
    assert got.message.startswith("2 workers ready in whole groups of 2 and 1 without one, 4 needed: ")


def test_each_position_needs_a_holder_that_stays() -> None:
    """Position 0 is held by a worker that leaves, and by nobody else: it is needed once more. Position 1 has others."""
    held: dict[str, Any] = {"seal": make_seal(1, (1, 9), adopted=1, state_adopted=1), "adopted_to": 1}
    leaving = make_worker(0, pod=make_pod(0, terminating=True), session=make_session(0, Phase.BROKEN, 1, **held))
    other = make_worker(1, session=make_session(1, Phase.BROKEN, 1, **held))
    third = make_worker(3, session=make_session(3, Phase.BROKEN, 1, **held))
    got = decide([leaving, other, gone(2), third, ready((2, 1))], make_current([0, 1, 2, 3]), groups_of(2))
    assert words(got) == (FORCED, "MemberLost", "0 1")
    staying = make_worker(2, session=make_session(2, Phase.BROKEN, 1, **held))
    got = decide([leaving, other, staying, gone(3)], make_current([0, 1, 2, 3]), groups_of(2))
    assert words(got) == (FORCED, "MemberLost", "2 1")


def test_position_that_nobody_holds_is_taken_by_the_newest_state_of_each() -> None:
    """A set that refused is tried again with who holds the newest state, of each position its own."""

    def holds(slot: int, step: int, standing: str = Standing.BROKEN) -> Worker:
        seal = make_seal(1, (1, step), adopted=1, state_adopted=1)
        session = make_session(slot, Phase.BROKEN, 1, adopted_to=1, seal=seal)
        return make_worker(slot, standing, session=session, since_s=90.0)

    workers = [holds(0, 4), holds(1, 5), holds(2, 5, Standing.OUTSIDE), holds(3, 4, Standing.OUTSIDE)]
    got = decide(workers, make_current([0, 1]), groups_of(2), refusal=Refusal(frozenset({"tried"})))
    assert words(got)[-1] == "2 1"


def test_who_could_not_read_a_checkpoint_comes_last_of_its_position() -> None:
    workers = [broken(0), broken(1), ready(2), ready(4)]
    refusal = Refusal(frozenset({"tried"}), unreadable=True, readers=frozenset({uid_of(0), uid_of(1)}))
    got = decide(workers, make_current([0, 1], announced_at_s=0.0), groups_of(2), refusal=refusal)
    assert words(got)[-1] == "2 1"


# --- links ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spare", "want"),
    [
        pytest.param([], "0 1", id="the youngest goes where neither has a replacement"),
        pytest.param([ready(4)], "2 3 | 4 1", id="who has a replacement of its position goes"),
        pytest.param([ready(5)], "0 1 | 2 5", id="the youngest goes where it has a replacement"),
    ],
)
def test_of_two_without_a_link_one_goes_so_that_most_groups_stay(spare: list[Worker], want: str) -> None:
    current = make_current([0, 1, 2, 3], adopted=False, announced_at_s=99.0)
    workers = [broken(0, 3), broken(1), broken(2), broken(3, 0, since_s=91.0)]
    got = decide([*workers, *spare], current, groups_of(4))
    assert isinstance(got, Announce)
    assert text(got.members) == want


def test_without_groups_nobody_is_replaceable_for_its_position() -> None:
    current = make_current([0, 3], adopted=False)
    pair = [broken(0, 3), broken(3, 0, since_s=91.0)]
    known = frozenset({frozenset({uid_of(0), uid_of(3)})})
    assert cut_off(current, pair, known) == {MemberId(3, 0)}
    assert cut_off(current, pair, known, replaceable=frozenset({MemberId(0, 0)})) == {MemberId(0, 0)}


# --- a healthy group -----------------------------------------------------------------------------------------------

FOUR = make_current([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("workers", "current", "bounds", "want"),
    [
        pytest.param(list(map(trains, range(4))), FOUR, groups_of(4), ("keep",), id="nothing to change"),
        pytest.param([*map(trains, range(4)), ready(4)], FOUR, groups_of(6), ("keep",), id="one joiner is no group"),
        pytest.param([*map(trains, range(4)), ready(4), ready(5)], FOUR, groups_of(6),
                     (PLANNED, "Resized", "0 1 | 2 3 | 4 5"), id="a whole group joins"),
        pytest.param([*map(trains, range(4)), ready(4), ready(6), ready(5)], FOUR, groups_of(8),
                     (PLANNED, "Resized", "0 1 | 2 3 | 4 5"), id="a group joins, and one is left over"),
        pytest.param(list(map(trains, range(4))), FOUR, groups_of(2), (PLANNED, "Resized", "0 1"), id="one group less"),
        pytest.param(list(map(trains, range(4))), MIXED, groups_of(2),
                     (PLANNED, "Resized", "0 1"), id="the low slots stay, whoever they trained with"),
        pytest.param([trains(0), leaves(1), trains(2), trains(3)], FOUR, groups_of(4),
                     (PLANNED, "Drained", "2 3"), id="who leaves leaves its partner over"),
        pytest.param([trains(0), leaves(1), ready((1, 1)), trains(2), trains(3)], FOUR, groups_of(4),
                     (PLANNED, "Drained", "0 1.1 | 2 3"), id="a replacement joins its partner"),
        pytest.param([trains(2), trains(3), ready(0), ready((1, 1))], make_current([2, 3]), groups_of(4),
                     (PLANNED, "Resized", "0 1.1 | 2 3"), id="who was left over joins with the replacement"),
        pytest.param([leaves(0), trains(1)], make_current([0, 1]), groups_of(2),
                     ("keep",), id="the only group waits for a replacement"),
        pytest.param([leaves(0), leaves(1), ready((0, 1)), ready((1, 1))], make_current([0, 1]), groups_of(2),
                     (PLANNED, "Drained", "0 1 | 0.1 1.1"), id="a group hands over to a whole group"),
        pytest.param([leaves(0), leaves(1), ready((0, 1))], make_current([0, 1]), groups_of(2),
                     ("keep",), id="half a group takes nothing over"),
        pytest.param([leaves(0), trains(1), leaves(2), trains(3), ready((0, 1))], FOUR, groups_of(4),
                     (PLANNED, "Drained", "0.1 1 | 2 3"), id="a position is handed over by one that leaves"),
        pytest.param([trains(0), trains(1), ready(2), ready(4), ready(5)], make_current([0, 1]), groups_of(6),
                     (PLANNED, "Resized", "0 1 | 4 5"), id="neighbours join before others"),
        pytest.param([leaves(s) for s in range(4)], FOUR, groups_of(4),
                     (PLANNED, "Drained", "0 1"), id="of all that leave one group stays"),
        pytest.param([leaves(4), leaves(5), *(ready((s, 1)) for s in range(4))], make_current([4, 5]), groups_of(4),
                     (PLANNED, "Drained", "0.1 1.1 | 4 5"), id="a group of slots that are wanted no more hands over"),
    ],
)  # fmt: skip
def test_healthy_generation_changes_in_whole_groups(
    workers: list[Worker], current: Current, bounds: Bounds, want: tuple[str, ...]
) -> None:
    assert words(decide(workers, current, bounds)) == want


def test_newer_planned_generation_overtakes_in_whole_groups() -> None:
    """g2 = four workers, of which 3 is asked to leave before anybody that trains has entered it: its partner is left over."""
    training = [make_worker(s, Standing.PENDING, session=make_session(s, Phase.TRAINING, 1)) for s in (0, 1)]
    arrived = [
        make_worker(s, Standing.FORMING, session=make_session(s, Phase.ARRIVED, 2), pod=make_pod(s, terminating=s == 3))
        for s in (2, 3)
    ]
    current = make_current(
        [0, 1, 2, 3],
        number=2,
        kind=PLANNED,
        adopted=False,
        announced_at_s=99.0,
        older=(make_older(1, uid_of(0), uid_of(1)),),
    )
    got = decide([*training, *arrived], current, groups_of(4))
    assert words(got) == (PLANNED, "Drained", "0 1")


# --- every decision ------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[int], Worker]] = {
    "trains": trains,
    "gone": gone,
    "leaves": leaves,
    "broken": broken,
}
JOINERS: list[list[Worker]] = [[], [ready(4)], [ready((1, 1))], [ready(4), ready(5)], [ready((0, 1)), ready((1, 1))]]


@pytest.mark.parametrize(("replicas", "minimum"), [(2, 2), (4, 2), (6, 4)])
@pytest.mark.parametrize("before", [(0, 1, 2, 3), (0, 3, 2, 1)], ids=["neighbours", "mixed"])
def test_every_decision_is_in_whole_groups(before: tuple[int, ...], minimum: int, replicas: int) -> None:
    for kinds in product(KINDS, repeat=4):
        for more in JOINERS:
            workers = sorted([*(KINDS[kind](slot) for slot, kind in enumerate(kinds)), *more], key=lambda w: w.id)
            got = decide(workers, make_current(before), groups_of(replicas, minimum))
            if not isinstance(got, Announce):
                continue
            ids = [w.id for w in got.members]
            assert len(ids) % 2 == 0
            assert minimum <= len(ids)
            assert len(ids) <= replicas or {w.id.slot for w in got.members} == {0, 1}, "rule HANDOVER alone has more"
            assert [i.slot % 2 for i in ids] == [0, 1] * (len(ids) // 2), "inside a group by position"
            assert len(set(ids)) == len(ids)
            pairs = [{before[0], before[1]}, {before[2], before[3]}]
            both = {w.id.slot for w in got.members if w.is_member}
            for pair in pairs:
                if pair <= both and got.kind == FORCED:
                    places = [n // 2 for n, i in enumerate(ids) if i in {MemberId(s, 0) for s in pair}]
                    assert len(set(places)) == 1, "who trained together stays together"
            if got.kind == PLANNED:
                for position in (0, 1):
                    there = [w for w in got.members if w.id.slot % 2 == position]
                    assert any(w.is_member for w in there), "each position has somebody with the state"


# --- hangs, late workers, words ------------------------------------------------------------------------------------


STACKS = Stacks((ProcessStack(0, 1, ProcessStack.OUTSIDE, 0.0, "load (a.py:1)", "load (a.py:1)"),))


def hung(slot: int) -> Worker:
    session = make_session(
        slot, Phase.TRAINING, 1, condition_at_s=0.0, progress=make_progress(5), progress_generation=1,
        progress_at_s=0.0, stacks=STACKS, stacks_generation=1, stacks_at_s=5000.0, asked_stacks_at_s=4999.0,
    )  # fmt: skip
    return make_worker(slot, session=session)


@pytest.mark.parametrize(("per_group", "left"), [(1, [0]), (2, [0, 3])])
def test_where_all_hang_alone_a_whole_group_is_left_with_the_state(per_group: int, left: list[int]) -> None:
    members = [hung(slot) for slot in range(4)]
    got = find_hang(
        current=make_current([0, 3, 2, 1] if per_group == 2 else [0, 1, 2, 3]), workers=members, processes=1, hang_seconds=10.0,
        in_a_row=0, now_s=5001.0, settings=SETTINGS, per_group=per_group,
    )  # fmt: skip
    assert {m.slot for m in got.culprits} == set(range(4)) - set(left)


@pytest.mark.parametrize(("per_group", "is_late"), [(1, True), (2, False)])
def test_only_holder_of_its_position_has_longer(per_group: int, is_late: bool) -> None:
    """Worker 1 has not come to generation 2. Worker 0 holds the state, too, but of another position."""
    other = make_worker(0, session=make_session(0, Phase.TRAINING, 2))
    behind = make_worker(1, Standing.PENDING, session=make_session(1, Phase.TRAINING, 1, heard=2))
    current = make_current([0, 1], number=2, announced_at_s=0.0)
    values: dict[str, Any] = {"setbacks": {}, "released": frozenset(), "step_s": 0.0, "settings": SETTINGS}
    known = Attendance(
        workers=[other, behind], current=current, spells={}, now_s=0.0, per_group=per_group, **values
    )  # fmt: skip
    first = see_lateness(known)
    later = see_lateness(replace(known, spells=first.spells or {}, now_s=1.5 * SETTINGS.late_timeout_s))
    assert bool(later.restart) == is_late


@pytest.mark.parametrize(
    ("leaving", "end"),
    [
        pytest.param([1], "the others wait for one.", id="another one of its position stays"),
        pytest.param(
            [1, 3], "training continues from step 0, because the job writes no checkpoints.", id="all of a position"
        ),
    ],
)
def test_end_of_a_position_is_the_end_of_the_state(leaving: list[int], end: str) -> None:
    members = [leaves(s) if s in leaving else trains(s) for s in range(4)]
    assert leaving_words(FOUR, members, None, saves=False, per_group=2).endswith(end)


@pytest.mark.parametrize(
    ("workers", "want"),
    [
        pytest.param(list(map(trains, range(4))), "", id="nobody is left over"),
        pytest.param([*map(trains, range(4)), ready(4), ready(5)], "", id="a whole group is about to join"),
        pytest.param([*map(trains, range(4)), ready(4)],
                     "Worker 4 is a spare: its group of 2 workers is not whole.", id="one"),
        pytest.param([*map(trains, range(4)), ready(4), ready(6), ready(7)],
                     "Worker 6 is a spare: its group of 2 workers is not whole.", id="one of three"),
        pytest.param([*map(trains, range(4)), ready(4), ready(6)],
                     "Workers 4, 6 are spares: their group of 2 workers is not whole.", id="two of one position"),
        pytest.param([*map(trains, range(4)), ready(4, available=False)], "", id="who is not ready is not one"),
    ],
)  # fmt: skip
def test_spares_are_named(workers: list[Worker], want: str) -> None:
    assert spare_words(FOUR, workers, 2) == want
    assert spare_words(FOUR, workers, 1) == ""


def test_spares_are_said_in_degraded() -> None:
    said = training_conditions(
        Course(
            phase="Running",
            decision=None,
            current=FOUR,
            replicas=6,
            workers=[],
            failure=None,
            spares="Worker 4 is a spare.",
        )
    )
    (degraded,) = (one for one in said if one.type == "Degraded")
    assert degraded.message == "4 of 6 workers train. Worker 4 is a spare."
