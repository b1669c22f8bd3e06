"""What the operator does next, as plan/job.py with plan/generation/ decides it from what it was told.

A plan is one move: PERSIST is not in question here. `time_moves` are what happens when nothing else can: a deadline, the
end of a pause. So no timeout value is assumed; a deadline that passes too early is a fault (moves_faults.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.live.moves_worker import absent
from tests.model.live.records import (
    ABSENT,
    BEST,
    CHECKPOINT,
    DEADLINE,
    FORCED,
    HANDOVER,
    NO_STATE,
    PLANNED,
    RETRY,
    STARTING,
    TRAINING,
    WITNESS,
    WORDS,
    Group,
    Member,
    Name,
    Seal,
    State,
    Worker,
)
from tests.model.live.view import View, group_of, is_alive, with_worker
from tests.model.search import Move


def operator_moves(view: View, state: State) -> Iterator[Move]:
    """Pods made and released, and the next generation."""
    for place, worker in enumerate(state.workers):
        if worker.phase == ABSENT:
            if _wants_pod(view, state, place):
                made = Worker(worker.uid + 1, stream_from=state.number)
                yield Move(f"pod of w{place} is made", False, with_worker(state, place, made))
        elif _is_released(view, state, place):
            yield Move(f"w{place} is released", False, with_worker(state, place, absent(worker)))
    chosen = _plan(view, state, after_pause=False)
    if chosen is not None:
        yield _announce(view, state, *chosen)


def time_moves(view: View, state: State) -> Iterator[Move]:
    """What time brings to a state in which nothing else can happen."""
    chosen = _plan(view, state, after_pause=True)
    if chosen is not None:
        yield _announce(view, state, *chosen, how="after a pause ")
        return
    late = next(_deadline_passes(view, state), None)
    leaving = next((at for at, w in enumerate(state.workers) if w.drains and w.phase != ABSENT), None)
    if late is not None:  # a grace period is taken to be longer than the deadlines
        yield late
    elif leaving is not None:
        yield _grace_ends(state, leaving, state.workers[leaving])


def _deadline_passes(view: View, state: State) -> Iterator[Move]:
    """Who is late is left out and, with DEADLINE, restarted in place. Where all have entered and nobody gets on, the same
    workers are announced once more: then whoever hangs is the one that does not enter."""
    late = [m[0] for m in state.members if is_alive(state, m) and _is_late(state, m)]
    following, how = state, "after the deadline "
    if DEADLINE in view.rules:
        hung = [place for place, worker in enumerate(state.workers) if worker.hangs and _is_overdue(state, place, late)]
        for place in hung:
            following = with_worker(following, place, ended(following.workers[place]))
        how = "".join(f"(restarts w{place}'s process) " for place in hung) + how
    if not state.is_adopted and not any(view.is_gone(state, member) for member in state.members):
        chosen = _choose(view, state, set(late), has_refused=False)
        if (late or DEADLINE in view.rules) and len(chosen) >= state.minimum:
            move = _announce(view, state, FORCED, chosen, how=how)
            yield move._replace(state=move.state._replace(workers=following.workers))
            return
    if following != state:
        yield Move(f"operator {how}", False, following)


def _is_overdue(state: State, place: int, late: list[int]) -> bool:
    """Whether it shows that this worker hangs: it does not enter, does not leave, or does not step in a group that has
    adopted."""
    worker = state.workers[place]
    return place in late or bool(state.is_adopted) or not worker.is_member


def slow_moves(view: View, state: State) -> Iterator[Move]:
    """A deadline passes too early: before a slow member has entered, or has said that it lost the group."""
    late = {place for place, uid in state.members if is_alive(state, (place, uid)) and _is_late(state, (place, uid))}
    if any(view.is_gone(state, member) for member in state.members):
        at_once, later = (_plan(view, state, after_pause=after_pause) for after_pause in (False, True))
        if at_once is None and later is not None:
            yield _announce(view, state, *later, how="(not all have said what they lost) ")
    elif not state.is_adopted and late:
        chosen = _choose(view, state, late, has_refused=False)
        if len(chosen) >= state.minimum:
            yield _announce(view, state, FORCED, chosen, how=f"(w{sorted(late)} late) ")


def lost_moves(view: View, state: State, place: int) -> Iterator[Move]:
    """A member that lives, trains perhaps and has an open stream is taken for lost: observers hear nothing of it (rule OBSERVERS).
    Where too few others are there the operator waits, and hears it again."""
    member = (place, state.workers[place].uid)
    if member not in state.members or not is_alive(state, member) or not state.workers[place].is_connected:
        return
    chosen = _choose(view, state, {place}, has_refused=False)
    if len(chosen) >= state.minimum:
        yield _announce(view, state, FORCED, chosen, how=f"(w{place} taken for lost) ")


def ended(worker: Worker) -> Worker:
    """The worker without its process: what that held is lost, what its agent keeps in its file is not."""
    return worker._replace(phase=STARTING, hangs=0, inside=0, left=0, state=NO_STATE, state_adopted=0)


def _grace_ends(state: State, place: int, worker: Worker) -> Move:
    violation = None
    if (
        worker.state in state.acknowledged
        and not worker.hangs
        and not any(other.state >= worker.state for at, other in enumerate(state.workers) if at != place)
    ):
        violation = f"w{place} drained away as the last holder of {worker.state}"
    label = f"w{place}'s grace period ends"
    return Move(label, False, with_worker(state, place, absent(worker)), violation)


# ---- pods


def _wants_pod(view: View, state: State, place: int) -> bool:
    slot = view.scenario.slots[place]
    return slot < state.replicas and not any(
        other.phase != ABSENT and not other.drains and view.scenario.slots[at] == slot
        for at, other in enumerate(state.workers)
    )


def _is_released(view: View, state: State, place: int) -> bool:
    """Rules LINGER, RELEASE: an excluded worker goes when all members of the newest generation have adopted it."""
    worker, word = state.workers[place], state.told[place]
    return (
        bool(state.is_adopted)
        and (view.scenario.slots[place] >= state.replicas or bool(worker.drains))
        and (place, worker.uid) not in state.members
        and word is not None
        and word.heard == state.number
        and not word.inside
    )


# ---- the next generation


def _plan(view: View, state: State, *, after_pause: bool) -> tuple[str, tuple[int, ...]] | None:
    """Return kind and places of the generation to announce now, or None to wait."""
    has_trouble = any(view.is_gone(state, m) for m in state.members) or (
        not state.is_adopted and any(view.is_deaf(state, m) for m in state.members)
    )
    if has_trouble:
        if any(is_alive(state, m) and state.told[m[0]] is None for m in state.members):
            return None  # the operator has just started: they are on their way
        return _forced(view, state, after_pause)
    return _planned(view, state) if state.is_adopted else _overtaking(view, state)


def _forced(view: View, state: State, after_pause: bool) -> tuple[str, tuple[int, ...]] | None:
    if not after_pause and _is_settling(view, state):
        return None
    has_checkpoint_cause = RETRY in view.rules and view.has_refused(state, CHECKPOINT)
    has_refused = view.has_refused(state, WITNESS, CHECKPOINT)
    chosen = _choose(view, state, set(), has_refused)
    if len(chosen) < state.minimum:
        return None
    if has_refused and state.tried == names_of(view, state, chosen) and not (has_checkpoint_cause and after_pause):
        return None
    return FORCED, chosen


def _is_settling(view: View, state: State) -> bool:
    """Whether members have left the group and others not yet: who has not said so may be the cause."""
    return not any(view.is_lost_or_died(state, member) for member in state.members) and any(
        is_alive(state, member) and state.workers[member[0]].is_connected and not view.is_gone(state, member)
        for member in state.members
    )


def _choose(view: View, state: State, overdue: set[int], has_refused: bool) -> tuple[int, ...]:
    """Members of the newest generation first, low slots first; after a refusal those before all that hold state."""
    members = {place for place, uid in state.members if is_alive(state, (place, uid))}
    slots, failed = view.scenario.slots, _could_not_read(view, state)

    def order(place: int) -> tuple[object, ...]:
        usual = (failed >> place & 1, place not in members, slots[place], -place)
        word = state.told[place]
        seal = word.seal if word else None
        if not has_refused or seal is None or seal.state == NO_STATE:
            return (0, 0, *usual)
        return (-seal.state_adopted - 1, -seal.state - 1, *usual)

    able = [place for place in range(len(state.workers)) if view.is_able(state, place) and place not in overdue]
    staying = [place for place in able if not state.workers[place].drains]
    is_enough = len(_one_per_slot(view, staying)) >= state.minimum
    if not has_refused and is_enough and (_may_hold(state, staying) or not _may_hold(state, able)):
        able = staying
    else:  # who leaves may be needed for its state
        has_refused = True
    return tuple(sorted(_one_per_slot(view, sorted(able, key=order))[: state.replicas]))


def _may_hold(state: State, places: list[int]) -> bool:
    """Whether one of these holds a state, as far as the operator was told (model/worker.py `may_hold`)."""
    words = [word for place in places if (word := state.told[place]) is not None and word.adopted]
    return any(word.seal.state != NO_STATE if word.seal is not None else word.phase == TRAINING for word in words)


def _could_not_read(view: View, state: State) -> int:
    """The places that failed to read the checkpoint, as a bit mask: none once all that can be asked have failed."""
    newest = group_of(state, state.number)
    if RETRY not in view.rules or newest is None or not view.has_refused(state, CHECKPOINT):
        return state.could_not_read
    failed = state.could_not_read | 1 << newest.reader
    able = sum(1 << place for place in range(len(state.workers)) if view.is_able(state, place))
    return failed if able & ~failed else 0


def _one_per_slot(view: View, places: list[int]) -> list[int]:
    taken: dict[int, int] = {}
    for place in places:
        taken.setdefault(view.scenario.slots[place], place)
    return list(taken.values())


def _planned(view: View, state: State) -> tuple[str, tuple[int, ...]] | None:
    members = [place for place, _ in state.members]
    joining = [
        place
        for place, worker in enumerate(state.workers)
        if place not in members and not worker.drains and view.is_able(state, place)
    ]
    return _target(view, state, members, joining)


def _overtaking(view: View, state: State) -> tuple[str, tuple[int, ...]] | None:
    """plan/generation/target.py `overtaking`: a member of a planned generation leaves before anybody that trains has entered it.
    Who trains goes into another one instead, with the joiners that have arrived."""
    inside = {
        member: word.inside
        for member in state.members
        if is_alive(state, member)
        and (word := state.told[member[0]]) is not None
        and state.workers[member[0]].is_connected
        and word.phase == TRAINING
        and word.entered < state.number
    }
    before = {member for number, members in state.older if number in inside.values() for member in members}
    training = [member for member in state.members if member in before]
    if (
        state.kind != PLANNED
        or not state.is_known
        or len(set(inside.values())) != 1
        or any(member not in inside for member in training)
        or not any(is_alive(state, m) and state.workers[m[0]].drains for m in state.members)
    ):
        return None
    places = [place for place, _ in training]
    joining = [m[0] for m in state.members if m not in before and is_alive(state, m) and not state.workers[m[0]].drains]
    if _target(view, state, places, joining) is None:
        return None  # who leaves is needed until another one has its state
    arrived = [at for at in joining if (word := state.told[at]) is not None and word.inside == state.number]
    return _target(view, state, places, arrived)


def _target(view: View, state: State, members: list[int], joining: list[int]) -> tuple[str, tuple[int, ...]] | None:
    """Who should train instead of the newest generation's members: plan/generation/target.py `target_of`. `members`: who trains."""
    slots, workers = view.scenario.slots, state.workers
    staying = [place for place in members if not workers[place].drains]
    is_all_leaving = not staying
    if is_all_leaving:  # plan/generation/target.py `_hand_over`
        coming = {slots[place] for place in joining if slots[place] < state.replicas}
        keepers = sorted(members, key=lambda at: (not workers[at].is_connected, slots[at] >= state.replicas,
                                                  slots[at] in coming, slots[at]))  # fmt: skip
        staying = keepers[: max(1, state.minimum - len(coming))]
    low = [place for place in staying if slots[place] < state.replicas]
    high = [place for place in staying if slots[place] >= state.replicas]
    holders, others = (low, high) if low else (high[:1], high[1:])
    joining = sorted((p for p in joining if slots[p] < state.replicas), key=lambda place: (slots[place], -place))
    target = _one_per_slot(view, [*holders, *joining, *others])[: state.replicas]
    if HANDOVER in view.rules and is_all_leaving and joining and not set(target) & set(joining):
        target = [*holders[:1], joining[0]]
    if set(target) == {place for place, _ in state.members} or len(target) < state.minimum:
        return None
    return PLANNED, tuple(sorted(target))


def _is_late(state: State, member: Member) -> bool:
    """Whether a member has not entered (PENDING) or cannot be reached (SILENT). Who trains may not have been told yet (JOIN)."""
    word = state.told[member[0]]
    if word is None or not state.workers[member[0]].is_connected:
        return True
    if state.kind == PLANNED and word.phase == TRAINING and word.heard < state.number:
        return False
    return word.entered < state.number and word.phase != STARTING


# ---- the document


def names_of(view: View, state: State, chosen: tuple[int, ...]) -> tuple[Name, ...]:
    """What a refused set is remembered by (plan/generation/retry.py `names_of`)."""
    newest_first = ((state.number, state.members), *state.older)
    names: list[Name] = []
    for place, worker in enumerate(state.workers):
        word = state.told[place]
        seal = word.seal if word else None
        if worker.phase == ABSENT or (place not in chosen and seal is None):
            continue
        held = (seal.state, seal.state_adopted, seal.adopted) if seal else None
        name = Name("member" if place in chosen else "seal", place, worker.uid, held)
        if WORDS in view.rules and word is not None:
            closes = (bool(seal and seal.closes(n)) for n, members in newest_first if (place, worker.uid) in members)
            name = name._replace(adopted=word.adopted, closes=tuple(closes))
        names.append(name)
    dead = {m for _, members in newest_first for m in members if not is_alive(state, m)}
    return (*names, *(Name("lost", *member) for member in sorted(dead)))


def _announce(view: View, state: State, kind: str, chosen: tuple[int, ...], how: str = "") -> Move:
    this = (state.number, state.members)
    older = (this,) if state.is_adopted else (this, *state.older)
    older = tuple(generation for generation in older if not _has_never_stepped(state, *generation))
    members = tuple((place, state.workers[place].uid) for place in chosen)
    named = {member for _, them in older for member in them}
    seals: list[tuple[Member, Seal]] = []
    unspoken: list[Member] = []
    for place, worker in enumerate(state.workers):
        if worker.phase == ABSENT:
            continue
        word, member = state.told[place], (place, worker.uid)
        if word is None or word.seal is None:
            if BEST in view.rules and member not in members:
                unspoken.append(member)
        elif member in named or BEST in view.rules:
            seals.append((member, word.seal))
    failed = _could_not_read(view, state)
    reader = min(chosen, key=lambda place: (failed >> place & 1, place))
    group = Group(
        state.number + 1,
        members,
        kind,
        older,
        tuple(seals),
        tuple(unspoken),
        tuple(sorted(m for m in named if not is_alive(state, m))),
        reader,
        (None,) * len(state.workers),
    )
    following = state._replace(
        groups=(*state.groups, group),
        number=group.number,
        members=members,
        kind=kind,
        is_adopted=0,
        is_known=1,
        older=older,
        tried=names_of(view, state, chosen),
        could_not_read=failed,
    )
    return Move(f"operator {how}announces {kind} g{group.number} = w{list(chosen)}", False, following)


def _has_never_stepped(state: State, number: int, members: tuple[Member, ...]) -> bool:
    """plan/generation/document.py `_never_stepped`: all that are left of it promise to have left it without having adopted it."""
    living = [state.told[m[0]] for m in members if is_alive(state, m)]
    seals = [word.seal for word in living if word is not None and word.seal is not None]
    left = [seal for seal in seals if seal.closes(number) and seal.adopted < number]
    return bool(left) and len(left) == len(living)


def all_adopted(state: State) -> bool:
    """plan/job.py `_adoption`: every member of the newest generation has said so."""
    return all(
        is_alive(state, member) and (word := state.told[member[0]]) is not None and word.adopted >= state.number
        for member in state.members
    )


def is_training(state: State) -> bool:
    """Every member of the newest generation has committed a step in it."""
    return all(
        is_alive(state, (place, uid))
        and state.workers[place].inside == state.number
        and state.workers[place].phase == TRAINING
        and state.workers[place].state == state.number
        for place, uid in state.members
    )
