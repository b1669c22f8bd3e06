"""The conditions of a job: their types, the reasons that we use, and how one is written.

A condition is the API for machines; `phase` and the columns are made from them for people. Pure: the caller passes
the clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from regroup.protocol.text import shorten
from regroup_operator.api.base import Timestamp, WrittenModel

ACCEPTED = "Accepted"
PODS_READY = "PodsReady"
AGENTS_CONNECTED = "AgentsConnected"
TRAINING = "Training"
DEGRADED = "Degraded"
CHECKPOINTS_SAVED = "CheckpointsSaved"
SNAPSHOTS_TAKEN = "SnapshotsTaken"
SUSPENDED = "Suspended"
COMPLETE = "Complete"
FAILED = "Failed"
TYPES = (
    ACCEPTED,
    PODS_READY,
    AGENTS_CONNECTED,
    TRAINING,
    DEGRADED,
    CHECKPOINTS_SAVED,
    SNAPSHOTS_TAKEN,
    SUSPENDED,
    COMPLETE,
    FAILED,
)

INTERVAL_TOO_SHORT = "IntervalTooShort"
"""Reason of CheckpointsSaved and SnapshotsTaken, which are True: they are saved and taken, less often than was asked for."""

SIZE_REFUSED = "SizeRefused"
"""Reason of Degraded=True, and of an event: the job went back from a size that its script refused."""

ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(WrittenModel):
    """One observation about the job, with the sentence that explains it."""

    type: str = Field(max_length=64)
    """Accepted, PodsReady, AgentsConnected, Training, Degraded, CheckpointsSaved, SnapshotsTaken, Suspended, Complete or Failed."""

    status: ConditionStatus
    """True, False or Unknown."""

    reason: str = Field(max_length=256)
    """The reason for this status, in CamelCase, for programs."""

    message: str = Field(default="", max_length=4096)
    """The reason for this status, as a sentence with the numbers behind the decision."""

    last_transition_time: Timestamp
    """Time at which `status` last changed."""

    observed_generation: int = 0
    """The metadata.generation of the job that the condition was computed from."""


def set_condition(
    conditions: Iterable[Condition],
    type: str,
    status: ConditionStatus,
    reason: str,
    message: str,
    now: str,
    observed_generation: int,
) -> list[Condition]:
    """Return `conditions` with the one of `type` replaced or appended.

    `now` is an RFC 3339 time. lastTransitionTime moves only when `status` changes, so writing the same again gives an
    equal list. Order is kept; the input is not changed. An unknown `type` is a bug of ours.
    """
    assert type in TYPES, type
    before = list(conditions)
    old = next((one for one in before if one.type == type), None)
    made = Condition(
        type=type,
        status=status,
        reason=reason,
        message=shorten(message, 4096),
        last_transition_time=old.last_transition_time if old is not None and old.status == status else now,
        observed_generation=observed_generation,
    )
    return [*before, made] if old is None else [made if one is old else one for one in before]
