"""Find the workers that a forced generation leaves out because two of them cannot reach each other (rule CLIQUE). Pure.

A worker whose group broke names one peer only. So the operator remembers the pairs over the generations in a row that did not form.
Only together do they say which of two workers has the broken link to the others, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from regroup_operator.api.members import MemberId
from regroup_operator.model.worker import Current, Standing, Worker

Links = frozenset[frozenset[str]]
"""Pairs of pod UIDs: one of the two lost the other while a generation formed, and both lived on."""


def with_links(links: Links, current: Current | None, workers: Iterable[Worker]) -> Links:
    """Return the broken links, with those of the newest generation; forget pairs that have trained in one group since, and
    pods that are gone."""
    if current is None:
        return frozenset()
    pods = {w.uid: w for w in workers if w.pod is not None}
    kept = {pair for pair in links if pair <= pods.keys()}
    if current.adopted:
        return frozenset(pair for pair in kept if not all(pods[uid].is_member for uid in pair))
    return frozenset(kept | _reported(current, pods.values()))


def cut_off(
    current: Current,
    chosen: Sequence[Worker],
    links: Links,
    *,
    replaceable: frozenset[MemberId] = frozenset(),
    refused: bool = False,
    spared: frozenset[MemberId] = frozenset(),
) -> frozenset[MemberId]:
    """Return the workers to drop, so that no pair is left that could not reach each other in the newest generation.

    Nothing is dropped unless the same set would be announced again. `links` comes from `with_links`. `refused` says that the newest
    generation formed, and refused to train. A link that broke an earlier generation then counts as well. Otherwise that set and the
    set that refused would follow each other for ever. A `spared` worker is not dropped for such a link: no other could train
    without its state.
    """
    is_same = {w.id for w in chosen} == set(current.members)
    if current.attempts == 0 or not (is_same or refused):
        return frozenset()
    pairs = _reported(current, chosen) if is_same else _remembered(chosen, links, spared)
    dropped = set()
    while pairs:
        cut = [w for w in chosen if any(w.uid in pair for pair in pairs) and (is_same or w.id not in spared)]
        goes = _first_to_go(cut, links, replaceable)
        dropped.add(goes.id)
        pairs, links = _without(goes, pairs), _without(goes, links)
    return frozenset(dropped)


def _first_to_go(cut: Sequence[Worker], links: Links, replaceable: frozenset[MemberId]) -> Worker:
    """Return the worker with a broken link that is dropped first.

    The holder of an older state goes first: without the newest one no worker may train. Next is a worker that is `replaceable`:
    another one takes its position, so that its group stays whole. Next is the worker with the most broken links, those to workers
    that are not chosen included; then the youngest.
    """
    count = Counter(uid for pair in links for uid in pair)
    oldest = min(map(state_of, cut))
    holders = (w for w in cut if state_of(w) == oldest)
    return max(holders, key=lambda w: (w.id in replaceable, count[w.uid], w.since_s, w.id))


def with_returning(others: Iterable[Worker], barred: Iterable[Worker], links: Links) -> list[Worker]:
    """Return the workers, and those of `barred` that had to go for a broken link and now have none to any of the rest."""
    out = list(others)
    for worker in barred:
        peers = {uid for pair in links if worker.uid in pair for uid in pair}
        if peers and not any(w.uid in peers for w in out):
            out.append(worker)
    return out


def _without(worker: Worker, links: Links) -> Links:
    return frozenset(pair for pair in links if worker.uid not in pair)


def _remembered(chosen: Sequence[Worker], links: Links, spared: frozenset[MemberId]) -> Links:
    """Return the known pairs among the chosen of which one may go. Two members of the newest generation, which formed, can reach
    each other again."""
    inside = {w.uid: w.id for w in chosen}
    members = {w.uid for w in chosen if w.is_member}
    return frozenset(
        pair
        for pair in links
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
