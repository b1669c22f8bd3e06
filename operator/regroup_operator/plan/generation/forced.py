"""Decide on the generation that takes the place of a broken group, or of one that hangs as a whole: announce it, or wait.

Pure. It names only workers with an open stream (rule FORCED). Which member broke the group is found in trouble.py. Whose answer
is waited for is decided in answers.py, who goes on in survivors.py, and when to try again in retry.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from regroup.protocol.document import FORCED
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Announce, Current, Situation, Standing, Wait, Worker
from regroup_operator.plan.facts.groups import ready_words
from regroup_operator.plan.generation.answers import find_asked, wait_for_answers
from regroup_operator.plan.generation.culprit import name_culprit
from regroup_operator.plan.generation.retry import wait_after_failures, wait_after_refusal
from regroup_operator.plan.generation.survivors import Survivors, choose_members, choose_survivors, needs_leaving
from regroup_operator.plan.generation.target import count, verb_of
from regroup_operator.plan.generation.trouble import LATE, find_overdue

RECONNECT_S = 5.0
"""Seconds that a broken group waits after the operator's start for members that have not called yet. It waits longer while some
wait to be admitted. They are most likely on their way, and a generation without them would cost them their place."""


def forced_generation(culprit: Worker, current: Current, situation: Situation) -> Wait | Announce:
    """Return the generation of those who go on without the `culprit`, or the wait before it."""
    workers, members, bounds = situation.workers, situation.members, situation.bounds
    refusal, now_s = situation.refusal, situation.now_s
    unknown = [w for w in members if w.standing == Standing.SILENT and w.session is None]
    until_s = max((w.since_s + RECONNECT_S for w in unknown), default=now_s)
    if now_s < until_s:
        return Wait(
            "Reconnecting",
            f"The operator has just started; {count(unknown, 'member')} have not connected yet.",
            until_s,
        )
    late = culprit.standing in LATE
    overdue = find_overdue(current, members) if late and current.has_document else set()
    able = [w for w in workers if w.available and w.id not in overdue]
    # Rule WITNESS: a set that refused is tried again with those who may hold the state first, those leaving included.
    with_leaving = refusal is not None or needs_leaving(able, bounds)
    able = [w for w in able if with_leaving or not w.is_ending]
    asked = find_asked(able, members, culprit, bounds)
    answers = wait_for_answers(asked, len(able), bounds, now_s)
    if answers is not None:
        return answers
    left_out = overdue | {w.id for w in asked}
    survivors = choose_survivors(able, current, situation, left_out=left_out, with_leaving=with_leaving)
    chosen = survivors.chosen
    named = name_culprit(current, members, culprit)
    refused = wait_after_refusal(refusal, current, workers, chosen, now_s) if refusal is not None else None
    if refused is not None:
        return refused
    if len(chosen) < bounds.minimum:
        return Wait(
            "TooFewMembers",
            f"{ready_words(chosen, survivors.able, bounds)}, {bounds.minimum} needed: {named.text}"
            f"{_state_words(chosen, session=bounds.session)}.",
            UntilEvent.MORE_WORKERS,
        )
    if (
        len(chosen) < bounds.replicas
        and bounds.rejoin_s > 0
        and culprit.standing == Standing.DIED
        and now_s < culprit.since_s + bounds.rejoin_s
    ):
        return Wait(
            "Rejoining", f"{named.text}; waiting for it to restart in place.", culprit.since_s + bounds.rejoin_s
        )
    failed = wait_after_failures(current, situation.without_commit, named.text, _missing_link(survivors), now_s)
    if failed is not None:
        return failed
    return Announce(
        FORCED,
        chosen,
        "MemberLost" if not late else "GenerationOverdue",
        f"{named.text}; {count(chosen, 'worker')} {verb_of(chosen, 'go')} on.",
        cause=named.cause or ("Overdue" if late else ""),
        culprit=named.id,
        detected_at_s=culprit.since_s,
        detect_s=None if culprit.last_seen_s is None else culprit.since_s - culprit.last_seen_s,
        set_back=frozenset(overdue | survivors.cut),
    )


def _state_words(ready: Sequence[Worker], *, session: bool) -> str:
    """Return what becomes of the others' state while too few are `ready`, as the end of a sentence. `session`: the script uses the
    library, and keeps its state until it has left its loop."""
    if not session or any(w.has_left_loop for w in ready):
        return "; once enough are, the script starts again in all workers"
    return "; the others keep their state" if any(w.may_hold for w in ready) else ""


def _missing_link(survivors: Survivors) -> str:
    """Return a sentence on members that should go for a broken link, and are needed all the same; empty: there are none."""
    needed = sorted(w.id for w in survivors.chosen if w.id in survivors.cut)
    if not needed:
        return ""
    who = f"worker{'' if len(needed) == 1 else 's'} {', '.join(map(str, needed))}"
    return f"{who.capitalize()} and another member cannot reach each other, and without {who} too few are left."


def new_groups(current: Current, situation: Situation) -> Wait | Announce:
    """Return the generation after one that hangs with every rank in a collective. Its members keep their processes and their
    state."""
    bounds, hang = situation.bounds, situation.hang
    able = [w for w in situation.workers if w.available]
    with_leaving = needs_leaving(able, bounds)
    able = [w for w in able if with_leaving or not w.is_ending]
    chosen = choose_members(able, bounds, current, holders_first=with_leaving)
    if len(chosen) < bounds.minimum:
        return Wait(
            "TooFewMembers",
            f"{hang}. {ready_words(chosen, able, bounds)}, {bounds.minimum} needed for new groups.",
            UntilEvent.MORE_WORKERS,
        )
    message = f"{hang}. {count(chosen, 'worker')} {verb_of(chosen, 'make')} new groups."
    return Announce(FORCED, chosen, "Hung", message, cause="Hung", detected_at_s=situation.now_s)
