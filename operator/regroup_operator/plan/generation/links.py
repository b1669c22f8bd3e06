"""Find whom a forced generation leaves out because two workers cannot reach each other (rule CLIQUE).

Pure. A worker whose group broke names one peer only. So who has lost whom is remembered over the generations in a row that
did not form: only together do they say which of two workers has the broken link to the others, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from regroup_operator.api.members import MemberId
from regroup_operator.model.worker import Current, Standing, Worker

Links = frozenset[frozenset[str]]
"""Pairs of pod UIDs: one of the two lost the other while a generation formed, and both lived on."""


def with_links(known: Links, current: Current | None, workers: Iterable[Worker]) -> Links:
    """Return the broken links, with those of the newest generation; forget pairs that have trained in one group since, and
    pods that are gone."""
    if current is None:
        return frozenset()
    pods = {w.uid: w for w in workers if w.pod is not None}
    kept = {pair for pair in known if pair <= pods.keys()}
    if current.adopted:
        return frozenset(pair for pair in kept if not all(pods[uid].is_member for uid in pair))
    return frozenset(kept | _reported(current, pods.values()))


def cut_off(
    current: Current,
    chosen: Sequence[Worker],
    known: Links,
    *,
    replaceable: frozenset[MemberId] = frozenset(),
    refused: bool = False,
    spared: frozenset[MemberId] = frozenset(),
) -> frozenset[MemberId]:
    """Return whom to drop so that no pair is left that could not reach each other in the newest generation, where the same set
    would be announced again. `known` as returned by `with_links`.

    `refused`: the newest generation formed, and refused to train. Then a link that broke an earlier generation counts as well: the
    set of that one and the set that refused would follow each other for ever. Who is `spared` is not dropped for such a link:
    nobody could train without its state.
    """
    is_same = {w.id for w in chosen} == set(current.members)
    if current.attempts == 0 or not (is_same or refused):
        return frozenset()
    pairs = _reported(current, chosen) if is_same else _remembered(chosen, known, spared)
    dropped = set()
    while pairs:
        cut = [w for w in chosen if any(w.uid in pair for pair in pairs) and (is_same or w.id not in spared)]
        goes = _first_to_go(cut, known, replaceable)
        dropped.add(goes.id)
        pairs, known = _without(goes, pairs), _without(goes, known)
    return frozenset(dropped)


def _first_to_go(cut: Sequence[Worker], known: Links, replaceable: frozenset[MemberId]) -> Worker:
    """Return which of the workers with a broken link is dropped first.

    Whoever holds the older state goes first: without the newest one nobody may train. Then who is `replaceable` (another worker
    takes its position, so that its group stays whole), then who has the most broken links, those to workers that are not chosen
    included; then the youngest.
    """
    count = Counter(uid for pair in known for uid in pair)
    oldest = min(map(state_of, cut))
    holders = (w for w in cut if state_of(w) == oldest)
    return max(holders, key=lambda w: (w.id in replaceable, count[w.uid], w.since_s, w.id))


def with_returning(others: Iterable[Worker], barred: Iterable[Worker], known: Links) -> list[Worker]:
    """Return the workers, and those of `barred` that had to go for a broken link and now have none to any of the rest."""
    out = list(others)
    for worker in barred:
        peers = {uid for pair in known if worker.uid in pair for uid in pair}
        if peers and not any(w.uid in peers for w in out):
            out.append(worker)
    return out


def _without(worker: Worker, links: Links) -> Links:
    return frozenset(pair for pair in links if worker.uid not in pair)


def _remembered(chosen: Sequence[Worker], known: Links, spared: frozenset[MemberId]) -> Links:
    """Return the known pairs among the chosen of which one may go. Two members of the newest generation, which formed, can reach
    each other again."""
    inside = {w.uid: w.id for w in chosen}
    members = {w.uid for w in chosen if w.is_member}
    return frozenset(
        pair
        for pair in known
        if pair <= inside.keys() and not pair <= members and not {inside[uid] for uid in pair} <= spared
    )


def _reported(current: Current, workers: Iterable[Worker]) -> Links:
    """Return the pairs of the newest generation. A peer that lost a process is no broken link, and neither is one that left
    because of such a peer."""
    lost: dict[str, str | None] = {}
    for worker in workers:
        session = worker.session
        if worker.standing == Standing.BROKEN:
            fault = session.fault if session and session.fault_generation == current.number else None
            lost[worker.uid] = fault.peer if fault is not None else None
    return frozenset(
        frozenset({uid, peer})
        for uid, peer in lost.items()
        if peer is not None and peer != uid and peer in lost and (lost[peer] is None or lost[peer] in lost)
    )


def state_of(worker: Worker) -> tuple[int, ...]:
    """Return the state that a worker has told of, newer ones greater; empty: none."""
    seal = worker.session.seal if worker.session else None
    return () if seal is None or seal.state is None else (seal.state_adopted, *seal.state)
