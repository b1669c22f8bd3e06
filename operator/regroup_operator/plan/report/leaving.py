"""Say which members are asked to leave, why, and that they still train, because nobody has taken their place yet. Pure.

Where the others are enough, who leaves is in the next generation no more, which takes a step: nothing is said of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from regroup_operator.model.worker import Announce, Current, Decision, Worker
from regroup_operator.plan.facts.groups import by_position


def leaving_words(
    current: Current | None,
    workers: Sequence[Worker],
    decision: Decision | None,
    *,
    saves: bool,
    per_group: int = 1,
) -> str:
    """Return who is waited with, and what follows if nobody comes in time; empty: nobody. `saves`: the job writes checkpoints;
    `per_group` workers are a group, and the state is gone with all of one position."""
    members = [w for w in workers if w.is_member]
    leaving = [w for w in members if w.draining and w.connected]
    if current is None or not current.adopted or isinstance(decision, Announce) or not leaving:
        return ""
    one = len(leaving) == 1
    who = f"Worker {leaving[0].id} is" if one else f"Workers {', '.join(str(w.id) for w in leaving)} are"
    whys = sorted({w.notice for w in leaving if w.notice})
    why = f" ({'; '.join(whys[:3])})" if whys else ""
    # A notice does not say when the pod will end: it may be deleted with its grace, or its node be switched off.
    end = "until their pods end" if not one else "until its pod ends"
    if not any(w.notice for w in leaving):
        end = f"at most until the end of {'its' if one else 'their'} grace period"
    said = f"{who} asked to leave{why} and {'trains' if one else 'train'} on until another pod has the state, {end}."
    if not any(some and all(w in leaving for w in some) for some in by_position(members, per_group)):
        return f"{said} If none is ready by then, the others wait for one."
    what = "the checkpoint that is written at its end" if saves else "step 0, because the job writes no checkpoints"
    return f"{said} If none is ready by then, training continues from {what}."
