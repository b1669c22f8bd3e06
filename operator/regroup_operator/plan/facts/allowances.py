"""Return the seconds that a worker's processes may take for what is longer than a step, and to enter a generation. Pure.

A first step, a checkpoint and a pause are longer than a step. This is no policy: hangs.py, lateness.py and trouble.py read it.
"""

from __future__ import annotations

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Busy
from regroup_operator.model.records import AgentSession, Settings

ENTER_STEPS = 3
"""A member of the generation before may be in the middle of a long step. The operator waits for so many of the job's steps."""


def allowances(session: AgentSession, settings: Settings, least_s: float = 0.0) -> list[tuple[float, float]]:
    """Return (when it began, how many seconds it may take) of each such thing that the worker's processes are in.

    `least_s`: what the job allows every step. What the script has said itself (`job.pause`, its wait for a checkpoint)
    counts as it was said.
    """
    unsaid_s = {Busy.FIRST_STEP: settings.first_step_s, Busy.CHECKPOINT: settings.checkpoint_s}
    return [
        (since_s, max(unsaid_s.get(busy.kind, settings.hang_s), least_s) if busy.max_s is None else busy.max_s)
        for busy, since_s in zip(session.condition.busy, session.busy_since_s)
    ]


def partings(session: AgentSession) -> list[tuple[float, float]]:
    """Return (when it began, how many seconds it may take) of the planned end of a script's processes."""
    return [
        (since_s, busy.max_s)
        for busy, since_s in zip(session.condition.busy, session.busy_since_s)
        if busy.kind == Busy.PARTING and busy.max_s is not None
    ]


def entry_s(kind: str, step_s: float, settings: Settings) -> float:
    """Return how many seconds members have to enter a generation of this kind, before the next one is made without those that
    did not. `step_s` is the duration of a step (0: not known)."""
    base_s = settings.planned_timeout_s if kind == PLANNED else settings.form_timeout_s
    return max(base_s, ENTER_STEPS * step_s)
