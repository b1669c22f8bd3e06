"""What `make run` says of what it saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from demo.local import Seen, report

INCIDENT = {
    "cause": "ProcessExited",
    "detectMs": 5.0,
    "decideMs": 1.0,
    "persistMs": 4.0,
    "formMs": 20.0,
    "firstStepMs": 90.0,
}
SEEN = Seen(
    pid=11,
    step=312,
    before={"w-0": 10, "w-1": 11, "w-2": 12},
    after={"w-0": 10, "w-1": 21, "w-2": 12},
    whole_after_s=2.34,
    status={
        "phase": "Succeeded",
        "progress": {"step": 1000},
        "incidents": [{"cause": "Resized"}, INCIDENT | {"stepsRedone": 1}],
    },
    output="step 1000  loss 0.02\nheld-out accuracy 0.9750  parameters sha256 8c55\n",
)


def test_a_run_as_it_should_be() -> None:
    assert report(SEEN) == (
        [
            "Near step 312 SIGKILL ended process 11, one of 3.",
            "0.12 s later the others had committed the next step, with 1 redone. "
            "They are the same processes as before (10 and 12).",
            "2.3 s after the kill a new process trained in its place, with a copy of their state.",
            "All 1000 steps are committed. The model's held-out accuracy is 0.9750.",
        ],
        True,
    )


def with_status(**changes: Any) -> Seen:
    return replace(SEEN, status={**SEEN.status, **changes})


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(SEEN, after={"w-0": 20, "w-1": 21, "w-2": 12}), "Of their processes 12 lived on."),
        (replace(SEEN, after={}), "Of their processes none lived on."),
        (with_status(phase="Failed"), "its State is Failed"),
        (with_status(progress={"step": 998}), "did not end as it should"),
        (with_status(incidents=[{"cause": "Resized"}]), "0.00 s"),
        (replace(SEEN, output="step 1000\n"), "did not end as it should"),
    ],
    ids=[
        "a survivor restarted",
        "all restarted",
        "failed",
        "steps missing",
        "no incident",
        "the script has said nothing",
    ],
)
def test_what_did_not_hold_is_said_and_counts(seen: Seen, words: str) -> None:
    lines, holds = report(seen)
    assert not holds
    assert words in " ".join(lines)
