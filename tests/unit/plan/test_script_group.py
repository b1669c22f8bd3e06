"""Whether an unmodified script trains, from what its agents say; and what State and Training make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.document import LineageEntry
from regroup.protocol.state import Busy, Group, Phase
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Announce, Current, Decision, Keep, Standing, Wait, Worker
from regroup_operator.plan.report.conditions import Course, phase_of, training_conditions
from regroup_operator.plan.report.script_group import script_group
from tests.builders.plan import make_current, make_session, make_worker

NUMBER = 2
KEEP, WAIT = Keep(UntilEvent.CHANGE), Wait("TooFewMembers", "", UntilEvent.MORE_WORKERS)
CURRENT = make_current(number=NUMBER)


def member(
    slot: int, group: str | None, phase: str = Phase.TRAINING, generation: int = NUMBER, **session: Any
) -> Worker:
    standing = {Phase.TRAINING: Standing.TRAINING, Phase.FINISHED: Standing.FINISHED}.get(phase, Standing.PENDING)
    return make_worker(
        slot, standing, session=make_session(slot, phase, generation, session=False, group=group, **session)
    )


FORMED, WAITING, UNOBSERVED = (member(1, group) for group in (Group.FORMED, Group.WAITING, Group.UNOBSERVED))
ME = member(0, Group.FORMED)
UNHEARD = make_worker(1, Standing.SILENT, session=None)


@pytest.mark.parametrize(
    ("workers", "ran", "want"),
    [
        pytest.param([ME, FORMED], False, Group.FORMED, id="all have formed"),
        pytest.param([ME, WAITING], True, Group.WAITING, id="one has not"),
        pytest.param([ME, UNOBSERVED], False, Group.UNOBSERVED, id="of one it will not be known"),
        pytest.param([UNOBSERVED, member(2, Group.WAITING)], False, Group.WAITING, id="the least far counts"),
        pytest.param([ME, member(1, None)], False, Group.WAITING, id="one is a session, of which the tier says nothing yet"),
        pytest.param([ME, member(1, Group.WAITING, Phase.FINISHED)], False, Group.FORMED, id="one has exited 0"),
        pytest.param([ME, member(1, Group.FORMED, generation=NUMBER - 1)], True, Group.WAITING, id="one is in the one before"),
        pytest.param([ME, member(1, Group.FORMED, connected=False, closed_at_s=99.0)], False, Group.FORMED,
                     id="a lost stream changes nothing of what was said"),
        pytest.param([ME, UNHEARD], True, Group.FORMED, id="after the operator's start what was said holds"),
        pytest.param([ME, UNHEARD], False, Group.WAITING, id="also that it did not train"),
        pytest.param([ME, make_worker(5, Standing.OUTSIDE)], False, Group.FORMED, id="who is no member has no say"),
        pytest.param([], True, Group.WAITING, id="nobody is there"),
    ],
)  # fmt: skip
def test_script_group(workers: list[Worker], ran: bool, want: str) -> None:
    assert script_group(CURRENT, workers, ran=ran) == want
    assert script_group(replace(CURRENT, adopted=False), workers, ran=ran) == Group.WAITING
    assert script_group(None, workers, ran=ran) == Group.WAITING


AGAIN = replace(CURRENT, lineage=(LineageEntry(NUMBER - 1, 0), LineageEntry(NUMBER, 0)))
FIRST = replace(CURRENT, lineage=(LineageEntry(NUMBER, 0),))
PLANNED = replace(AGAIN, kind="planned")
FORCED = Announce("forced", (ME,), "r", "m")
BROKEN = make_worker(1, Standing.BROKEN)


@pytest.mark.parametrize("group", [Group.FORMED, Group.UNOBSERVED, Group.WAITING])
def test_processes_that_train_until_their_files_are_complete_count_in_a_planned_change(group: str) -> None:
    """State would be Starting for as long as a script saves, although it makes steps."""
    parting = (Busy(Busy.PARTING, max_s=75.0),)
    old = member(0, group, generation=NUMBER - 1, busy=parting, busy_since_s=(90.0,))
    joins = member(1, Group.WAITING, Phase.READY, 0)
    assert script_group(replace(CURRENT, adopted=False), [old, joins], ran=True) == group
    ends = member(0, group, Phase.READY, generation=NUMBER - 1)
    assert script_group(replace(CURRENT, adopted=False), [ends, joins], ran=True) == Group.WAITING


@pytest.mark.parametrize(("kind", "want"), [("planned", Group.FORMED), ("forced", Group.WAITING)])
def test_processes_train_on_until_their_agent_hears_of_a_planned_change(kind: str, want: str) -> None:
    """Word may take seconds on a busy machine. After a failure nobody trains until then."""
    has_yet_to_hear = member(0, Group.FORMED, generation=NUMBER - 1)
    joins = member(1, Group.WAITING, Phase.READY, 0)
    current = replace(CURRENT, kind=kind, adopted=False)
    assert script_group(current, [has_yet_to_hear, joins], ran=True) == want


@pytest.mark.parametrize(
    ("current", "decision", "worker", "group", "want"),
    [
        pytest.param(FIRST, KEEP, WAITING, Group.WAITING, "Starting", id="the first processes import"),
        pytest.param(FIRST, KEEP, FORMED, Group.FORMED, "Running", id="the first group has formed"),
        pytest.param(FIRST, KEEP, UNOBSERVED, Group.UNOBSERVED, "Running", id="nobody will say whether it trains"),
        pytest.param(AGAIN, KEEP, WAITING, Group.WAITING, "Recovering", id="the processes after a fault import"),
        pytest.param(PLANNED, KEEP, WAITING, Group.WAITING, "Starting", id="the processes after a planned change import"),
        pytest.param(replace(PLANNED, adopted=False), KEEP, WAITING, Group.WAITING, "Starting",
                     id="a planned change has ended the processes that trained"),
        pytest.param(AGAIN, KEEP, FORMED, Group.FORMED, "Running", id="the group has formed again"),
        pytest.param(FIRST, FORCED, BROKEN, Group.WAITING, "Recovering", id="a process crashed"),
        pytest.param(FIRST, WAIT, BROKEN, Group.WAITING, "Waiting", id="too few are left"),
    ],
)  # fmt: skip
def test_phase_of_a_script(current: Current, decision: Decision, worker: Worker, group: str, want: str) -> None:
    got = phase_of(current=current, decision=decision, workers=[ME, worker], trained=True, ended=None, group=group)
    assert got == want


@pytest.mark.parametrize(
    ("phase", "worker", "group", "status", "reason", "says"),
    [
        pytest.param("Running", FORMED, Group.FORMED, "True", "Running", "trains with", id="it trains"),
        pytest.param("Running", UNOBSERVED, Group.UNOBSERVED, "True", "Unobserved", "it is not known whether they train",
                     id="it is not known whether it trains"),
        pytest.param("Starting", WAITING, Group.WAITING, "False", "Starting",
                     "1 of 3 workers passed torch.distributed.init_process_group.", id="one of two imports"),
    ],
)  # fmt: skip
def test_training_of_a_script(phase: str, worker: Worker, group: str, status: str, reason: str, says: str) -> None:
    (training, *_) = training_conditions(
        Course(
            phase=phase,
            decision=KEEP,
            current=CURRENT,
            replicas=2,
            workers=[ME, worker],
            failure=None,
            group=group,
        )
    )
    assert (training.type, training.status, training.reason) == ("Training", status, reason)
    assert says in training.message
