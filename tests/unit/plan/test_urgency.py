"""How soon a status is written, by what has changed in it."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.api import JobStatus
from regroup_operator.model.plan import JobMemory, Urgency
from regroup_operator.plan.report.urgency import SOON_S, STARTING_S, differing, urgency, write_due_s
from tests.builders.plan import make_status

WAITING = {"type": "Training", "status": "False", "reason": "WaitingForMore", "message": "2 workers ready."}
PODS = {"type": "PodsReady", "status": "True", "reason": "AllRunning", "message": "3 of 3 worker pods run."}
STORED: dict[str, Any] = {
    "phase": "Running",
    "replicas": 2,
    "readyReplicas": 2,
    "membership": {"generation": 1},
    "conditions": [WAITING],
    "incidents": [{"generation": 1, "cause": "ProcessExited", "decision": "2 go on", "detectMs": 20}],
    "progress": {"step": 7},
    "summary": {"state": "Running", "ready": "2/3", "progress": "7%"},
    "lineage": [{"generation": 1, "startStep": 0}],
    "restarts": {"total": 1, "exits": {"newest": {"0/ab12": 1}}},
}


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        pytest.param({}, Urgency.LATER, id="nothing"),
        pytest.param({"progress": {"step": 8}}, Urgency.LATER, id="progress"),
        pytest.param({"summary": {"state": "Running", "ready": "2/3", "progress": "8%"}}, Urgency.LATER, id="its column"),
        pytest.param({"replicas": 3}, Urgency.LATER, id="pods"),
        pytest.param({"readyReplicas": 3}, Urgency.SOON, id="ready workers"),
        pytest.param({"conditions": [WAITING | {"message": "3 workers ready."}]}, Urgency.SOON, id="words"),
        pytest.param({"incidents": [STORED["incidents"][0] | {"formMs": 5}]}, Urgency.SOON, id="times of a recovery"),
        pytest.param({"restarts": {"total": 1, "exits": {"newest": {"0/ab12": 2}}}}, Urgency.SOON, id="an uncounted exit"),
        pytest.param({"restarts": {"total": 2, "exits": {"newest": {"0/ab12": 2}}}}, Urgency.NOW, id="one that counts"),
        pytest.param({"conditions": [WAITING | {"status": "True"}]}, Urgency.NOW, id="a condition"),
        pytest.param({"incidents": []}, Urgency.NOW, id="an incident"),
        pytest.param({"membership": {"generation": 2}}, Urgency.NOW, id="a generation"),
        pytest.param({"released": ["uid"]}, Urgency.NOW, id="a release"),
        pytest.param({"phase": "Recovering"}, Urgency.NOW, id="a phase"),
        pytest.param({"phase": "Starting"}, Urgency.NOW, id="a script that starts again"),
        pytest.param({"conditions": [WAITING, PODS]}, Urgency.NOW, id="a condition that counts pods"),
        pytest.param({"tier": "Session"}, Urgency.NOW, id="a tier"),
        pytest.param({"progress": {"step": 8}, "readyReplicas": 3, "phase": "Recovering"}, Urgency.NOW, id="the most urgent"),
    ],
)  # fmt: skip
def test_urgency(changed: dict[str, Any], want: Urgency) -> None:
    assert urgency(make_status(STORED | changed), make_status(STORED)) == want


STARTS: dict[str, Any] = {
    "phase": "Starting",
    "readyReplicas": 2,
    "membership": {"generation": 1, "adopted": False},
    "conditions": [WAITING, PODS | {"status": "False", "reason": "Starting"}],
}
BEGUN: dict[str, Any] = {
    "membership": {"generation": 1, "adopted": False, "startStep": 0},
    "lineage": [{"generation": 1, "startStep": 0}],
}
AGAIN: dict[str, Any] = {"lineage": [{"generation": 1, "startStep": 0}], "membership": {"generation": 2}}
"""Resumed: the generation before has trained."""


@pytest.mark.parametrize(
    ("stored", "changed", "want"),
    [
        pytest.param({}, {}, Urgency.LATER, id="nothing"),
        pytest.param({}, {"readyReplicas": 3}, Urgency.STARTING, id="ready workers"),
        pytest.param({}, {"phase": "Pending"}, Urgency.STARTING, id="Pending or Starting"),
        pytest.param({}, {"conditions": [WAITING, PODS]}, Urgency.STARTING, id="a condition that counts pods"),
        pytest.param({}, {"conditions": [WAITING | {"status": "True"}, PODS]}, Urgency.NOW, id="another condition"),
        pytest.param({}, {"tier": "Session"}, Urgency.STARTING, id="a tier that agents say again"),
        pytest.param({}, {"tier": "Script"}, Urgency.NOW, id="a tier that is decided once"),
        pytest.param({}, BEGUN, Urgency.SOON, id="the first start step"),
        pytest.param({}, BEGUN | {"readyReplicas": 3}, Urgency.SOON, id="the first start step with ready workers"),
        pytest.param({}, {"membership": {"generation": 1, "adopted": True}}, Urgency.NOW, id="an adoption"),
        pytest.param({}, {"membership": {"generation": 2, "adopted": False}}, Urgency.NOW, id="a generation"),
        pytest.param({}, {"phase": "Running"}, Urgency.NOW, id="Running"),
        pytest.param({}, {"restarts": {"total": 1}}, Urgency.NOW, id="a counted restart"),
        pytest.param({}, {"observedGeneration": 2}, Urgency.NOW, id="another spec"),
        pytest.param(
            AGAIN,
            {"membership": {"generation": 2, "startStep": 5}, "lineage": [*AGAIN["lineage"], {"generation": 2, "startStep": 5}]},
            Urgency.NOW,
            id="the start step of a later generation",
        ),
    ],
)  # fmt: skip
def test_urgency_of_a_job_that_starts(stored: dict[str, Any], changed: dict[str, Any], want: Urgency) -> None:
    stored = STARTS | stored
    assert urgency(make_status(stored | changed), make_status(stored)) == want


def test_first_status_is_written_at_once() -> None:
    assert urgency(make_status(STARTS), JobStatus()) == Urgency.NOW


@pytest.mark.parametrize(
    ("differs", "level", "written_s", "want_s"),
    [
        pytest.param({}, Urgency.NOW, 99.9, 100.0, id="now"),
        pytest.param({}, Urgency.SOON, 99.9, 100.0 + SOON_S, id="soon: counted from the change"),
        pytest.param({}, Urgency.SOON, 10.0, 100.0 + SOON_S, id="soon: however old the last write is"),
        pytest.param({Urgency.SOON: 99.5, Urgency.STARTING: 99.5}, Urgency.SOON, 90.0, 99.5 + SOON_S, id="from the first change"),
        pytest.param({}, Urgency.STARTING, 99.9, 100.0 + STARTING_S, id="a start collects for longer"),
        pytest.param({Urgency.STARTING: 97.0}, Urgency.SOON, 90.0, 100.0 + SOON_S, id="what is more urgent counts for itself"),
        pytest.param({Urgency.STARTING: 95.5}, Urgency.SOON, 90.0, 95.5 + STARTING_S, id="and puts nothing off"),
        pytest.param({Urgency.STARTING: 97.0, Urgency.SOON: 97.5}, Urgency.STARTING, 90.0, 97.0 + STARTING_S, id="what passed"),
        pytest.param({}, Urgency.LATER, 95.0, 105.0, id="progress: counted from the last write"),
        pytest.param({}, Urgency.LATER, None, 100.0, id="progress that was never written"),
    ],
)  # fmt: skip
def test_when_a_status_is_written(
    differs: dict[Urgency, float], level: Urgency, written_s: float | None, want_s: float
) -> None:
    memory = JobMemory(written_s=written_s, differs_since_s=differing(differs, level, 100.0))
    assert write_due_s(level, memory, now_s=100.0, progress_write_s=10.0) == pytest.approx(want_s)


def test_status_that_is_as_it_is_stored_differs_in_nothing() -> None:
    assert differing({Urgency.STARTING: 95.0, Urgency.SOON: 95.0}, None, 100.0) == {}
