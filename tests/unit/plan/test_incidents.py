"""What an incident says of its parts, in milliseconds."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol.wire import Adopted, Fault
from regroup_operator.api.status import Incident
from regroup_operator.model.plan import Clock
from regroup_operator.model.records import ProcessExit
from regroup_operator.model.worker import Announce, Standing
from regroup_operator.plan.report.incidents import make_incident, missing_for_memory, with_exit, with_times
from tests.builders.plan import make_current, make_fault, make_session, make_worker

SECOND = Incident(generation=2, at="2026-01-01T00:00:00Z", decision="Any.")


@pytest.mark.parametrize(
    ("planned", "want"),
    [
        pytest.param(False, 90.0, id="forced: all begin together, the slowest counts"),
        pytest.param(True, 40.0, id="planned: a joiner waits while the others train on, the last to come counts"),
    ],
)
def test_form_time(planned: bool, want: float) -> None:
    members = [
        make_worker(slot, session=make_session(slot, adopted=Adopted(0, "self", form_ms=form_ms), adopted_generation=2))
        for slot, form_ms in enumerate((40.0, 90.0))
    ]
    assert with_times(SECOND, 2, members, None, planned=planned).form_ms == want


@pytest.mark.parametrize(
    ("fault", "detect_s", "want"),
    [
        pytest.param(make_fault("exit", observed_ms=12.5), None, 12.5, id="what the report says"),
        pytest.param(None, 5.2, 5200.0, id="silent: since the last progress"),
        pytest.param(None, None, None, id="nobody saw when the pod went"),
    ],
)
def test_detect_time(fault: Fault | None, detect_s: float | None, want: float | None) -> None:
    culprit = make_worker(1, Standing.DIED, why="x", session=make_session(1, fault=fault))
    decision = Announce("forced", (), "r", "m", cause="x", culprit="1", detected_at_s=100.0, detect_s=detect_s)
    assert make_incident(2, decision, [culprit], Clock(100.0, 1e9)).detect_ms == want


def test_form_time_is_not_said_before_all_have_formed() -> None:
    formed = make_worker(0, session=make_session(0, adopted=Adopted(0, "self", form_ms=40.0), adopted_generation=2))
    forming = make_worker(1, session=make_session(1, adopted=Adopted(0, "self", form_ms=9.0), adopted_generation=1))
    assert with_times(SECOND, 2, [formed, forming], None).form_ms is None


def test_form_time_of_scripts_is_not_said_for_nobody_has_measured_it() -> None:
    session = make_session(0, adopted=Adopted(0, "self"), adopted_generation=2)
    assert with_times(SECOND, 2, [make_worker(0, session=session)], None).form_ms is None


UNEXPLAINED = SECOND.with_fields(
    cause="ProcessExited", culprit="1", decision="worker 1 lost a process; 2 workers go on."
)


@pytest.mark.parametrize(
    ("slot", "generation", "reason", "cause", "decision"),
    [
        pytest.param(1, 1, "", "ProcessExited", 'worker 1 lost a process (exit code 3: "E: no"); 2 workers go on.',
                     id="how it ended"),
        pytest.param(1, 1, "OOMKilled", "OOMKilled", "worker 1 lost a process (OOMKilled: limit 1 GiB); 2 workers go on.",
                     id="for lack of memory"),
        pytest.param(1, 2, "", "ProcessExited", UNEXPLAINED.decision, id="another process, in the generation after"),
        pytest.param(0, 1, "", "ProcessExited", UNEXPLAINED.decision, id="another worker, which the first one took along"),
    ],
)  # fmt: skip
def test_incident_says_how_the_process_ended_once_its_agent_knows(
    slot: int, generation: int, reason: str, cause: str, decision: str
) -> None:
    exits = (ProcessExit(90.0, 1, 0, 3, "E: no", generation, reason=reason, detail="limit 1 GiB"),)
    worker = make_worker(slot, session=make_session(slot, exits=exits))
    got = with_exit(UNEXPLAINED, [worker], broken=range(1, 2))
    assert (got.cause, got.decision) == (cause, decision)
    assert with_exit(got, [worker], broken=range(1, 2)) == got, "once is enough"


def ended(generation: int, cause: str, culprit: str | None = None) -> Incident:
    return SECOND.with_fields(generation=generation, cause=cause, decision=f"decision {generation}.", culprit=culprit)


OUT_OF_MEMORY = ended(2, "OOMKilled", "1")


@pytest.mark.parametrize(
    ("incidents", "members", "want"),
    [
        pytest.param([OUT_OF_MEMORY], (0, 2), "Generation 2: decision 2.", id="the others train on without it"),
        pytest.param([OUT_OF_MEMORY, ended(3, "ProcessExited", "2")], (0,), "Generation 2: decision 2.",
                     id="another worker is lost, too"),
        pytest.param([ended(2, "OOMKilled", "1.3")], (0, 2), "Generation 2: decision 2.", id="it was its slot's fourth pod"),
        pytest.param([OUT_OF_MEMORY], (0, 1, 2), "", id="it is a member: the others waited for it"),
        pytest.param([OUT_OF_MEMORY], (0, (1, 1), 2), "", id="another pod has its slot"),
        pytest.param([OUT_OF_MEMORY, ended(3, "Resized"), ended(4, "ProcessExited", "0")], (1, 2), "",
                     id="it has joined again since"),
        pytest.param([OUT_OF_MEMORY, ended(3, "Resized")], (0,), "", id="the job has been made smaller since"),
        pytest.param([OUT_OF_MEMORY, ended(3, "PodDeleted", "1")], (0, 2), "", id="it was lost again, for another reason"),
        pytest.param([ended(2, "ProcessExited", "1"), ended(3, "Hung")], (0, 2), "", id="nobody was out of memory"),
        pytest.param([], (0, 2), "", id="it began with fewer"),
    ],
)  # fmt: skip
def test_missing_worker_that_was_killed_for_lack_of_memory(
    incidents: list[Incident], members: tuple[Any, ...], want: str
) -> None:
    assert missing_for_memory(incidents, make_current(members)) == want
