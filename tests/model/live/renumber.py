"""Give a state its simplest form: forget what can have no effect any more, and name generations by the lowest numbers.

Two states that differ only in what nobody can notice become one. A job that announces again and again comes back to the
same state, so that the search sees a circle.
"""

from __future__ import annotations

from tests.model.live.records import (
    ABSENT,
    CHECKPOINT,
    COLLECTIVE,
    NO_FAULT,
    WITNESS,
    Group,
    Name,
    Seal,
    State,
    Word,
    Worker,
)
from tests.model.live.view import is_alive


def simplest(state: State, *, keeps_previous: bool) -> State:
    """Return the state in its simplest form. `keeps_previous`: the generation before the newest may still be heard."""
    state = _forget(state, keeps_previous)
    used = _used(state)
    if len(used) == max(used) + 1:
        return state
    rank = {number: at for at, number in enumerate(sorted(used))}
    return _renumbered(state, rank)


def _forget(state: State, keeps_previous: bool) -> State:
    wanted = {state.number}
    if keeps_previous:
        wanted.add(state.number - 1)
    for worker in state.workers:
        wanted.add(worker.inside)
        if worker.is_member and worker.heard > worker.entered:
            wanted.add(worker.heard)
    groups = tuple(_without_old_papers(state, group) for group in state.groups if group.number in wanted)
    held = {worker.state for worker in state.workers}
    acknowledged = tuple(sorted({number for number in state.acknowledged if number in held}))
    told = tuple(
        None
        if word is None or state.workers[place].phase == ABSENT
        else word._replace(fault=_fault_of(word, state.number))
        for place, word in enumerate(state.told)
    )
    return state._replace(
        workers=tuple(w._replace(fault=_fault_of(w, state.number)) for w in state.workers),
        told=told,
        groups=groups,
        acknowledged=acknowledged,
        tried=() if state.is_adopted else state.tried,
        could_not_read=0 if state.is_adopted else state.could_not_read,
    )


def _fault_of(item: Worker | Word, newest: int) -> tuple[str, int]:
    """Only refusals and broken groups of the newest generation are looked at."""
    cause, number = item.fault
    return item.fault if number == newest and cause in (WITNESS, CHECKPOINT, COLLECTIVE) else NO_FAULT


def _without_old_papers(state: State, group: Group) -> Group:
    """Whoever has adopted needs neither the document nor the arrivals; that members arrived is still asked."""
    if not group.older and not group.seals:
        return group
    undecided = any(
        is_alive(state, m)
        and state.workers[m[0]].entered <= group.number
        and state.workers[m[0]].adopted < group.number
        for m in group.members
    )
    if undecided and group.contributed != sum(1 << m[0] for m in group.members):
        return group
    empty = tuple(a and type(a)(-1, 0, 0) for a in group.arrivals)
    return group._replace(older=(), seals=(), unspoken=(), lost=(), arrivals=empty)


def _used(state: State) -> set[int]:
    used = {0, state.number, state.trained, *state.acknowledged}
    for w in state.workers:
        used.update((w.heard, w.inside, w.entered, w.adopted, w.left, w.state_adopted, w.fault[1], w.stream_from))
        used.add(w.state)
    for word in state.told:
        if word is not None:
            used.update((word.inside, word.entered, word.adopted, word.heard, word.fault[1]))
            if word.seal is not None:
                used.update(word.seal)
    for number, _ in state.older:
        used.add(number)
    for group in state.groups:
        used.add(group.number)
        used.update(number for number, _ in group.older)
        for _, seal in group.seals:
            used.update(seal)
        for arrival in group.arrivals:
            if arrival is not None:
                used.update(arrival)
    for name in state.tried:
        used.update(name.held or ())
        used.add(name.adopted)
    used.discard(-1)
    return used


def _renumbered(state: State, rank: dict[int, int]) -> State:
    rank[-1] = -1

    def numbered_seal(seal: Seal) -> Seal:
        return Seal(*(rank[number] for number in seal))

    def numbered_word(word: Word | None) -> Word | None:
        if word is None:
            return None
        return Word(
            word.phase,
            rank[word.inside],
            rank[word.entered],
            rank[word.adopted],
            rank[word.heard],
            word.seal and numbered_seal(word.seal),
            (word.fault[0], rank[word.fault[1]]),
        )

    def numbered_name(name: Name) -> Name:
        held = name.held and (rank[name.held[0]], rank[name.held[1]], rank[name.held[2]])
        return name._replace(held=held, adopted=rank[name.adopted])

    workers = tuple(
        w._replace(
            heard=rank[w.heard],
            inside=rank[w.inside],
            entered=rank[w.entered],
            adopted=rank[w.adopted],
            left=rank[w.left],
            state=rank[w.state],
            state_adopted=rank[w.state_adopted],
            fault=(w.fault[0], rank[w.fault[1]]),
            stream_from=rank[w.stream_from],
        )
        for w in state.workers
    )
    groups = tuple(
        group._replace(
            number=rank[group.number],
            older=tuple((rank[number], members) for number, members in group.older),
            seals=tuple((member, numbered_seal(seal)) for member, seal in group.seals),
            arrivals=tuple(a and type(a)(*(rank[number] for number in a)) for a in group.arrivals),
        )
        for group in state.groups
    )
    return state._replace(
        workers=workers,
        told=tuple(map(numbered_word, state.told)),
        groups=groups,
        number=rank[state.number],
        older=tuple((rank[number], members) for number, members in state.older),
        tried=tuple(map(numbered_name, state.tried)),
        acknowledged=tuple(rank[number] for number in state.acknowledged),
        trained=rank[state.trained],
    )
