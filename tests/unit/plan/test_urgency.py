"""How soon a status is written, by what has changed in it."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.model.plan import Urgency
from regroup_operator.plan.report.overview import urgency

WAITING = {"type": "Training", "status": "False", "reason": "WaitingForMore", "message": "2 workers ready."}
STORED: dict[str, Any] = {
    "phase": "Starting",
    "replicas": 2,
    "readyReplicas": 2,
    "membership": {"generation": 1},
    "conditions": [WAITING],
    "incidents": [{"generation": 1, "cause": "ProcessExited", "decision": "2 go on", "detectMs": 20}],
    "progress": {"step": 7},
    "summary": {"state": "Starting", "ready": "2/3", "step": "7"},
}


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        pytest.param({}, Urgency.LATER, id="nothing"),
        pytest.param({"progress": {"step": 8}}, Urgency.LATER, id="progress"),
        pytest.param({"summary": {"state": "Starting", "ready": "2/3", "step": "8"}}, Urgency.LATER, id="its column"),
        pytest.param({"replicas": 3}, Urgency.LATER, id="pods"),
        pytest.param({"readyReplicas": 3}, Urgency.SOON, id="ready workers"),
        pytest.param({"conditions": [WAITING | {"message": "3 workers ready."}]}, Urgency.SOON, id="words"),
        pytest.param({"incidents": [STORED["incidents"][0] | {"formMs": 5}]}, Urgency.SOON, id="times of a recovery"),
        pytest.param({"conditions": [WAITING | {"status": "True"}]}, Urgency.NOW, id="a condition"),
        pytest.param({"incidents": []}, Urgency.NOW, id="an incident"),
        pytest.param({"membership": {"generation": 2}}, Urgency.NOW, id="a generation"),
        pytest.param({"released": ["uid"]}, Urgency.NOW, id="a release"),
        pytest.param({"phase": "Running"}, Urgency.NOW, id="a phase"),
        pytest.param({"phase": "Pending"}, Urgency.SOON, id="of a job that starts, from its pods' number"),
        pytest.param({"progress": {"step": 8}, "readyReplicas": 3, "phase": "Running"}, Urgency.NOW, id="the most urgent counts"),
    ],
)  # fmt: skip
def test_urgency(changed: dict[str, Any], want: Urgency) -> None:
    assert urgency(STORED | changed, STORED) == want
