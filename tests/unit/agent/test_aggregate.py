"""p processes -> one condition and one seal."""

from __future__ import annotations

from typing import Any

import pytest

from _regroup_agent.aggregate import SCRIPT, Facts, Process, condition, seal
from _regroup_agent.statefile import UNKNOWN, Saved
from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import Phase, Seal, StatePair


def process(**fields: Any) -> Process:
    return Process(0, **{"incarnation": 1, "running": True, "attached": True, **fields})


def inside(number: int, how_far: str = "adopted", **fields: Any) -> Process:
    stages = ("arrived", "formed", "adopted")
    reached = dict.fromkeys(stages[: stages.index(how_far) + 1], number) if how_far in stages else {}
    return process(inside=number, entered=number, **reached, **fields)


S7, S8 = StatePair(3, 7), StatePair(3, 8)
OUT = process(left=3, entered=3)


@pytest.mark.parametrize(
    ("processes", "phase", "generation"),
    [
        pytest.param([process(attached=False)], Phase.STARTING, 0, id="a process that has not attached"),
        pytest.param([process(), process(attached=False)], Phase.STARTING, 0, id="one of two has attached"),
        pytest.param([process(), process()], Phase.READY, 0, id="all wait"),
        pytest.param([inside(3, "entered")], Phase.FORMING, 3, id="entered"),
        pytest.param([inside(3, "arrived"), inside(3, "entered")], Phase.FORMING, 3, id="one waits at the store"),
        pytest.param([inside(3, "arrived"), inside(3, "formed")], Phase.ARRIVED, 3, id="all wait at the store"),
        pytest.param([inside(3), process()], Phase.FORMING, 3, id="the sibling has still to enter"),
        pytest.param([inside(4, "entered"), inside(3)], Phase.FORMING, 4, id="the sibling is still in the one before"),
        pytest.param([inside(3, "formed"), inside(3)], Phase.ADOPTING, 3, id="one has adopted"),
        pytest.param([inside(3), inside(3)], Phase.TRAINING, 3, id="all have adopted"),
        pytest.param([inside(3), inside(3, finished=3)], Phase.TRAINING, 3, id="one of two has finished"),
        pytest.param([inside(3, finished=3)] * 2, Phase.FINISHED, 3, id="all have finished"),
        pytest.param([inside(3), process(attached=False, floor=3)], Phase.STARTING, 0, id="one was restarted"),
        pytest.param([inside(3), process(floor=3)], Phase.BROKEN, 3, id="the restarted one cannot enter it"),
        pytest.param([process(left=3, state=S7), process(floor=3)], Phase.READY, 0, id="the sibling has left, too"),
        pytest.param([process(left=3, broken="why")], Phase.BROKEN, 3, id="left with an error"),
        pytest.param(
            [inside(4, "entered"), process(left=3, broken="why")], Phase.FORMING, 4, id="the sibling comes late"
        ),
        pytest.param([inside(3), process(left=3, broken="why")], Phase.BROKEN, 3, id="one of two left with an error"),
        pytest.param([OUT], Phase.READY, 0, id="left for a newer one"),
    ],
)
def test_phase_of_a_session(processes: list[Process], phase: str, generation: int) -> None:
    got = condition(processes, Facts(Saved(entered=3, adopted=3), heard=3, session=True))
    assert (got.phase, got.generation) == (phase, generation)


RETURNED = process(running=False, attached=False, done=True)


@pytest.mark.parametrize(
    ("processes", "finish", "phase"),
    [
        pytest.param([process(left=3, let_go=True)] * 2, 3, Phase.FINISHING, id="both run what follows their loop"),
        pytest.param([process(left=3, let_go=True), RETURNED], 3, Phase.FINISHING, id="one of two has returned 0"),
        pytest.param(
            [process(running=False, attached=False), RETURNED], 3, Phase.FINISHING, id="one waits for its restart"
        ),
        pytest.param([process(attached=False), RETURNED], 3, Phase.FINISHING, id="one starts again"),
        pytest.param([RETURNED] * 2, 3, Phase.DONE, id="both have returned 0"),
        pytest.param([RETURNED] * 2, 0, Phase.DONE, id="and so before the operator has told the end"),
    ],
)
def test_phase_of_a_session_after_its_last_step(processes: list[Process], finish: int, phase: str) -> None:
    saved = Saved(entered=3, adopted=3, finished=3, done=3)
    got = condition(processes, Facts(saved, heard=3, session=True, finish=finish, step=10))
    assert (got.phase, got.generation, got.step) == (phase, 3, 10)


@pytest.mark.parametrize(
    ("processes", "facts", "phase"),
    [
        pytest.param([process(running=False)], {}, Phase.READY, id="nothing runs"),
        pytest.param([process(launched=2, spawned=True)], {}, Phase.STARTING, id="runs, the tier is not known"),
        pytest.param([process(launched=2, spawned=True)], {"tier": SCRIPT}, Phase.TRAINING, id="runs"),
        pytest.param([process(launched=2)], {"tier": SCRIPT}, Phase.STARTING, id="is being forked"),
        pytest.param(
            [process(launched=2)], {"tier": SCRIPT, "replacing": True}, Phase.STARTING, id="is being replaced"
        ),
        pytest.param([process(launched=2)], {"tier": SCRIPT, "cause": "why"}, Phase.BROKEN, id="a sibling failed"),
        pytest.param([process(running=False, done=True)] * 2, {"tier": SCRIPT}, Phase.DONE, id="all exited 0"),
        pytest.param(
            [process(running=False, done=True), process(launched=2, spawned=True)],
            {"tier": SCRIPT},
            Phase.TRAINING,
            id="one of two exited 0",
        ),
        pytest.param([process(launched=2)], {"stopped": True}, Phase.STOPPED, id="stopped"),
    ],
)
def test_phase_of_a_script(processes: list[Process], facts: dict[str, Any], phase: str) -> None:
    assert condition(processes, Facts(Saved(entered=2), **facts)).phase == phase


@pytest.mark.parametrize(
    ("processes", "want"),
    [
        pytest.param([inside(3)], None, id="in a group: no promise"),
        pytest.param([OUT, inside(3)], None, id="one is in a group"),
        pytest.param([process(left=3, state=S7, state_adopted=3)], Seal(3, S7, 3, 3), id="left with its state"),
        pytest.param(
            [process(left=3, state=S7, state_adopted=3), process(left=3, state=S8, state_adopted=3)],
            Seal(3, S8, 3, 3),
            id="the newest of two states",
        ),
        pytest.param(
            [process(left=3, state=S7, state_adopted=3), process(floor=3)],
            Seal(3, S7, 3, 3),
            id="a restarted one has none",
        ),
        pytest.param([process(running=False)], Seal(3, None, 3), id="nothing left of it"),
        pytest.param([process(left=5), process(left=5)], Seal(5, None, 3), id="they gave up more than was entered"),
        pytest.param([process(left=5), process(left=3)], Seal(3, None, 3), id="one may still enter 4"),
    ],
)
def test_seal(processes: list[Process], want: Seal | None) -> None:
    assert seal(processes, Facts(Saved(entered=3, adopted=3), heard=3, session=True)) == want


HELD = process(left=3, state=S8, state_adopted=3)


@pytest.mark.parametrize(
    ("processes", "snapshot", "want"),
    [
        pytest.param([process(running=False)], (S7, False), Seal(3, S7, 3, 3, is_backup=True), id="all that is left"),
        pytest.param(
            [process(running=False)], (S7, True), Seal(3, S7, 3, 3), id="taken as its process ended: as if it lived"
        ),
        pytest.param([HELD], (S7, False), Seal(3, S8, 3, 3), id="a process holds more"),
        pytest.param(
            [process(left=3, state=S7, state_adopted=3), process(running=False)],
            (S8, False),
            Seal(3, S8, 3, 3),
            id="a sibling lives, one step behind the snapshot: no backup",
        ),
        pytest.param(
            [process(left=3, state=S7, state_adopted=2), process(running=False)],
            (S8, False),
            Seal(3, S8, 3, 3, is_backup=True),
            id="a sibling lives that was not in the generation of the snapshot",
        ),
    ],
)
def test_seal_with_a_memory_snapshot(processes: list[Process], snapshot: tuple[StatePair, bool], want: Seal) -> None:
    state, is_last = snapshot
    facts = Facts(Saved(entered=3, adopted=3), heard=3, session=True, snapshot=SnapshotState(state, 3, is_last))
    assert seal(processes, facts) == want


def test_lost_state_file_seals_nothing_until_it_is_settled() -> None:
    assert seal([process()], Facts(Saved(UNKNOWN, UNKNOWN), session=True)) is None


def test_running_script_seals_nothing() -> None:
    assert seal([process(launched=2, attached=False)], Facts(Saved(entered=1))) is None
