"""The record of a job: its members, its sentences, and what is no news any more."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_client import views
from regroup_client.views import Member
from regroup_operator.api.members import MemberId, format_members, parse_members

EARLY, LATE, LAST = "2026-01-01T10:00:00Z", "2026-01-01T11:00:00Z", "2026-01-01T12:00:00.5Z"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/work/train.py", line 12, in <module>\n    main()\n'
    '  File "/work/train.py", line 7, in main\n    raise ValueError("no data in /data")\nValueError: no data in /data'
)


def condition(kind: str, status: str, message: str = "m", at: str = EARLY) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "Reason", "message": message, "lastTransitionTime": at}


def job(state: str = "Running", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "digits"}, "status": {"summary": {"state": state}, "conditions": [], **status}}


def warning(at: str, note: str = "no node", reason: str = "Unschedulable") -> dict[str, str]:
    return {"type": "Warning", "eventTime": at, "reason": reason, "note": note}


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,5.2", "2,0-1,7.11", "10-12"])
def test_members_are_spelled_as_the_operator_does(text: str) -> None:
    assert [MemberId(*member) for member in views.members(text)] == list(parse_members(text))
    assert format_members(map(MemberId._make, views.members(text)), in_order=True) == text


def test_ranks_are_in_the_order_of_members() -> None:
    membership = {"generation": 3, "worldSize": 6, "members": "2.1,0-1"}
    assert views.ranks(job(membership=membership)) == {Member(2, 1): (0, 1), Member(0, 0): (2, 3), Member(1, 0): (4, 5)}
    assert views.ranks(job()) == {}


def test_workers_are_members_and_pods_that_are_none() -> None:
    pods: list[dict[str, Any]] = [
        {"metadata": {"name": "digits-worker-0-0"}, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}},
        {"metadata": {"name": "digits-worker-5-1"}, "status": {"phase": "Pending"}},
        {"metadata": {"name": "digits-eval-0-0"}},
    ]
    found = views.job_view(job(membership={"generation": 1, "worldSize": 2, "members": "0,1"}), pods).workers
    assert [(one.slot, one.attempt, one.ranks, one.node, one.phase) for one in found] == [
        (0, 0, (0,), "n1", "Running"),
        (1, 0, (1,), "", ""),
        (5, 1, (), "", "Pending"),
    ]


WELL = [condition("Training", "True"), condition("PodsReady", "True", at=LATE), condition("Degraded", "False")]


@pytest.mark.parametrize(
    ("given", "at", "is_said"),
    [
        pytest.param(job(conditions=WELL), EARLY, False, id="before the conditions were well"),
        pytest.param(job(conditions=WELL), LAST, True, id="after that"),
        pytest.param(job(conditions=WELL, progress={"at": LAST}), LATE, False, id="before the last step"),
        pytest.param(
            job(conditions=[*WELL, condition("CheckpointsSaved", "False")]), EARLY, True, id="something is wrong"
        ),
        pytest.param(
            job("Waiting", conditions=[condition("Training", "False", at=LATE)]), EARLY, True, id="no training"
        ),
        pytest.param(job("Succeeded", conditions=WELL), LAST, False, id="the job has succeeded"),
        pytest.param(job("Failed", conditions=[condition("Failed", "True")]), EARLY, True, id="the job has failed"),
        pytest.param(job(conditions=WELL), "", False, id="a warning without a time"),
    ],
)
def test_warning_is_said_while_it_is_open(given: dict[str, Any], at: str, is_said: bool) -> None:
    assert any("no node" in sentence for sentence in views.why(given, [], [warning(at)])) == is_said


def test_warning_that_repeats_is_said_once_with_its_last_time() -> None:
    events = [warning(EARLY), warning(LATE), warning(LAST, "another")]
    assert views.why(job("Waiting"), [], events)[1:] == [
        f"Event, {LATE}: Unschedulable: no node",
        f"Event, {LAST}: Unschedulable: another",
    ]


def test_traceback_is_said_once() -> None:
    failed = condition(
        "Failed", "True", f"Worker 1 ended with exit code 1 at step 7 three times. Its last lines:\n{TRACEBACK}"
    )
    incident = {
        "generation": 2,
        "at": EARLY,
        "cause": "ProcessExited",
        "decision": "worker 1 lost a process (exit code 1).",
    }
    events = [
        warning(LATE, f"Worker 1 ended with exit code 1:\n{TRACEBACK}", "RepeatedCrash"),
        warning(LAST, str(failed["message"]), "Failed"),
    ]
    said = views.why(job("Failed", conditions=[failed], incidents=[incident]), [], events)
    assert "\n".join(said).count("ValueError: no data in /data") == 1
    assert said[-1] == f"Event, {LATE}: RepeatedCrash: Worker 1 ended with exit code 1 (quoted above)"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        pytest.param("short", "short", id="a text of its own"),
        pytest.param(TRACEBACK, None, id="nothing else"),
        pytest.param(f"{TRACEBACK[:-10]}…", None, id="the same, cut"),
        pytest.param(
            f"Crash. {TRACEBACK} More was said.", "Crash. (quoted above) More was said", id="before and after"
        ),
    ],
)
def test_without_repeats(text: str, left: str | None) -> None:
    assert views.without_repeats(text, ["another sentence", f"Failed: {TRACEBACK}"]) == left


def test_json_has_what_is_known() -> None:
    found = views.to_json(views.job_view(job(progress={"totalSteps": 9}, incidents=[
        {"generation": 2, "at": EARLY, "decision": "x", "formMs": 3.0}])))  # fmt: skip
    assert found["name"] == "digits"
    assert found["totalSteps"] == 9
    assert found["incidents"][0]["milliseconds"] == {"form": 3.0}
    assert "loss" not in found


@pytest.mark.parametrize("ranks", [1, 2])
def test_plural(ranks: int) -> None:
    text = views.line(job(membership={"generation": 1, "worldSize": ranks, "members": "0"}))
    assert text == f"Running  generation 1 ({ranks} rank{'s' if ranks > 1 else ''})"
