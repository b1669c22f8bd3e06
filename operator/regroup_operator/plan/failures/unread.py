"""Fail a job whose script cannot begin with the checkpoint that spec.checkpoint.resumeFrom names. Pure.

Only a session of the library reads it. A script without one begins at its own step 0, and would end in Succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence

from regroup_operator.api.spec import CheckpointPolicy
from regroup_operator.model.plan import Verdict, earliest
from regroup_operator.model.worker import Current, Worker
from regroup_operator.plan.facts.current import script_at_s

UNREAD = "ResumeFromUnread"
"""Reason of condition Failed."""


def judge_unread(
    *,
    checkpoint: CheckpointPolicy | None,
    tier: str | None,
    current: Current | None,
    members: Sequence[Worker],
    start_timeout_s: float,
    now_s: float,
) -> tuple[Verdict | None, float | None]:
    """Return why the job has to fail, and when it would have to if nothing is reported until then (monotonic); None: it has not.

    Tier Script alone is no proof: a session whose build is slow attaches later (adr/0004). A script that has
    passed init_process_group, has ended, or has run for `start_timeout_s` (Settings) opens none.
    """
    if checkpoint is None or checkpoint.resume_from is None or tier != "Script" or current is None:
        return None, None
    run = [w.session for w in members if w.session and w.session.condition.generation == current.number]
    dues_s = [due_s for due_s in (script_at_s(session, start_timeout_s) for session in run) if due_s is not None]
    if not any(due_s <= now_s for due_s in dues_s):
        return None, earliest(dues_s, after_s=now_s)
    text = (
        f"spec.checkpoint.resumeFrom ({checkpoint.resume_from}) is not read: the script opens no regroup.session, so it has begun "
        "without the checkpoint. Use the library, or leave resumeFrom out and load the checkpoint in the script."
    )
    return Verdict(UNREAD, text), None
