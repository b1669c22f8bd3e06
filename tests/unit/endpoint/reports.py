"""Reports as agents send them, everything irrelevant defaulted."""

from __future__ import annotations

from typing import Any

from regroup.protocol import VERSION
from regroup.protocol.state import Condition, Phase, Seal
from regroup.protocol.wire import Changed, Hello, Report

JOB_UID, POD_UID = "job-uid", "pod-uid"


def make_report(body: Any = None, *, boot: str = "boot", seal: Seal | None = None, **condition: Any) -> Report:
    """Return a report with this body (default `changed`); keywords are fields of the condition."""
    values: dict[str, Any] = {"incarnation": 1, "generation": 1, "phase": Phase.TRAINING, "heard": 1, "entered": 1}
    return Report(
        JOB_UID, POD_UID, boot, Condition(**values | condition), seal, 5000, body if body is not None else Changed()
    )


def hello(**kwargs: Any) -> Report:
    return make_report(Hello(VERSION, 1), **kwargs)
