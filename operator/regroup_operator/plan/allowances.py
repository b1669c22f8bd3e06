"""How long a worker's processes may take for what is longer than a step: the first one, a checkpoint, a pause. Pure.

No policy: hangs.py and lateness.py read it.
"""

from __future__ import annotations

from regroup.protocol.state import Busy
from regroup_operator.model.records import Session, Settings


def allowances(session: Session, settings: Settings, least_s: float = 0.0) -> list[tuple[float, float]]:
    """Return (when it began, how many seconds it may take) of each such thing that the worker's processes are in.

    `least_s`: what the job allows every step. What the script has said itself (`job.pause`, its wait for a checkpoint)
    counts as it was said.
    """
    unsaid_s = {Busy.FIRST_STEP: settings.first_step_s, Busy.CHECKPOINT: settings.checkpoint_s}
    return [
        (since_s, max(unsaid_s.get(busy.kind, settings.hang_s), least_s) if busy.max_s is None else busy.max_s)
        for busy, since_s in zip(session.condition.busy, session.busy_since_s)
    ]
