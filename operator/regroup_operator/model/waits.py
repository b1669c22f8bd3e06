"""The waits of the plan that have no time of their own: what each lacks, which event ends it, and where a user reads it.

A decision waits until a time or for one of these (`worker.Wait`, `worker.Keep`). So nobody can add a wait without a time and not
name the event that ends it. The table "What must hold for liveness" of docs/design/protocol.md is the same, and
tests/unit/controller/test_waits.py brings each wait about, and ends it.

Where another stage says that nothing is due (`Hang.due_s`, `Lateness.due_s`, `WorkerChanges.due_s` are None), there is
nothing that it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class OpenWait:
    """One wait without a time."""

    reason: str
    """Reason of the decision, and of condition Training where that is False. Empty: the newest generation is kept as it is."""
    lacks: str
    ended_by: str
    reads: tuple[str, str, str]
    """Type, status and reason of the condition in which a user reads it."""


class UntilEvent(Enum):
    """The events for which a wait without a time waits."""

    FIRST_WORKERS = OpenWait(
        "TooFewReady",
        "capacity or quota",
        "enough workers are ready: their pods have started, their agents have called, their processes are attached",
        ("Training", "False", "TooFewReady"),
    )
    MORE_WORKERS = OpenWait(
        "TooFewMembers",
        "capacity or quota",
        "enough workers are ready again, or `minReplicas` is lowered",
        ("Training", "False", "TooFewMembers"),
    )
    HOLDER = OpenWait(
        "NoWitness",
        "a holder that cannot be reached",
        "the agent of a worker that may hold the newest state calls, or its pod is gone from the API",
        ("Training", "False", "NoWitness"),
    )
    REPLACEMENT = OpenWait(
        "ReplacingFirst",
        "capacity or quota",
        "a replacement is ready, or a pod that is on its way out ends (training goes on until then)",
        ("PodsReady", "False", "Starting"),
    )
    LAST_STEPS = OpenWait(
        "",
        "nothing",
        "the other members finish, too, or one of them fails or hangs",
        ("Training", "True", "Running"),
    )
    ADOPTED_REPORT = OpenWait(
        "",
        "nothing",
        "the agents of members that train repeat that they have adopted the generation, or their streams break",
        ("Training", "False", "Starting"),
    )
    CHANGE = OpenWait(
        "",
        "nothing",
        "an agent's report, a pod or the spec changes, or a step is overdue",
        ("Training", "True", "Running"),
    )
