"""Judges the commits of trainers: lost, repeated and rolled-back steps, survivors, and the cost of a fault. Pure.

The tour and the tests claim nothing about training that is not decided here. Every function returns the problems that
it found, one sentence each; an empty list means that the claim held. Missing evidence is a problem as well: no commits,
no survivors.

A *step* is numbered as the trainers number it. A generation continues where the one before it stopped. Its first step
is the one after the newest committed step. It is that step itself if only processes that are gone had committed it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Commit:
    """A commit of one step by one process in one generation. `process` names it for its whole life, and no other."""

    process: Hashable
    generation: int
    step: int


@dataclass(frozen=True)
class Change:
    """A fault or a resize: the newest generation before it, and the newest one once all workers train again."""

    before: int
    after: int
    survivors: Collection[Hashable]
    """Processes that must live on. They commit in `after`, and in the first generation after `before` unless they pause."""
    num_survivors: int
    """Number of survivors. The caller knows it, and it is given because an empty `survivors` would pass every check."""
    pausing: Collection[Hashable] = field(default=())
    """Survivors that may miss the first new generation: the others of a worker that lost one of its processes."""
    generations: tuple[int, int] = (1, 1)
    """Least and most generations that the change may take: one for the fault, and one for each later return or joiner."""
    redone: int = 1
    """Number of steps that may be made again: one for a fault, none for a planned change."""
    skips: bool = False
    """The first new generation may form no group: a new operator announces it before all agents have found that operator."""


def whole(commits: Iterable[Commit], *, first: int | None = 0, last: int | None = None, redone: int = 0) -> list[str]:
    """Return the problems of a run: every step is once in the final lineage, none rolled back, none applied twice.

    `first` and `last` are the steps that the run must begin and end with; None allows any. `redone` steps may be made
    again.
    """
    commits = list(commits)
    if not commits:
        return ["Nothing was committed."]
    spans = _spans(commits)
    problems = [*_twice(commits), *_holes(commits), *_skipped(commits, spans)]
    if first is not None and spans[0].first != first:
        problems.append(f"The first step is {spans[0].first}, not {first}.")
    if last is not None and spans[-1].last != last:
        problems.append(f"The last step is {spans[-1].last}, not {last}.")
    again = 0
    for old, new in itertools.pairwise(spans):
        problems += _follows(old, new)
        again += max(0, old.last + 1 - new.first)
    if again > redone:
        problems.append(f"{again} steps were done again in the whole run, at most {redone} may be.")
    return problems


def changed(commits: Iterable[Commit], change: Change) -> list[str]:
    """Return the problems of one fault or resize: its steps, its generations, and its survivors."""
    commits = [c for c in commits if change.before <= c.generation <= change.after]
    spans = _spans(commits)
    numbers = [s.generation for s in spans]
    if change.before not in numbers:
        return [f"Nothing was committed in generation {change.before}, before the change."]
    if change.after not in numbers or change.after <= change.before:
        return [f"Nothing was committed in generation {change.after}, after the change of generation {change.before}."]
    problems = [*_twice(commits), *_holes(commits), *_skipped(commits, spans)]
    again = 0
    for old, new in itertools.pairwise(spans):
        problems += _follows(old, new)
        again += max(0, old.last + 1 - new.first)
    if again > change.redone:
        problems.append(f"{again} steps were done again, at most {change.redone} may be.")
    problems += issued(change.before, change.after, change.generations)
    if numbers[1] != change.before + 1 and not change.skips:
        problems.append(
            f"The survivors went on in generation {numbers[1]}, not in {change.before + 1}: {change.before + 1} formed no group."
        )
    problems += _lived(commits, change, spans[1])
    return problems


def issued(before: int, after: int, allowed: tuple[int, int]) -> list[str]:
    """Return the problems with the number of generations, from number `before` to number `after`.

    The numbers of the status also count generations that formed no group, of which a script has no commits.
    """
    least, most = allowed
    if least <= after - before <= most:
        return []
    bounds = f"{least}" if least == most else f"{least} to {most}"
    return [f"It took {after - before} generations ({before} to {after}), not {bounds}."]


def kept(
    before: Mapping[str, Collection[int]], now: Mapping[str, Collection[int]], *, lost: Collection[str], number: int
) -> list[str]:
    """Return the problems of a fault's survivors, by the process table: {worker: process ids} before and now.

    `lost` are the workers that the fault took. `number` is how many workers must have survived with the processes they
    had.
    """
    survivors = sorted(set(before) - set(lost))
    problems = []
    if len(survivors) != number:
        problems.append(f"{len(survivors)} workers were left by the fault, {number} expected: {_names(survivors)}.")
    for name in survivors:
        if not before[name]:
            problems.append(f"{name} had no process before the fault.")
        elif sorted(now.get(name, ())) != sorted(before[name]):
            problems.append(f"{name} had the processes {sorted(before[name])}, now {sorted(now.get(name, ()))}.")
    return problems


@dataclass(frozen=True)
class _Span:
    generation: int
    first: int
    last: int


def _spans(commits: Sequence[Commit]) -> list[_Span]:
    """Return the first and last step of each generation that committed anything, by generation."""
    steps: dict[int, set[int]] = {}
    for commit in commits:
        steps.setdefault(commit.generation, set()).add(commit.step)
    return [_Span(g, min(of), max(of)) for g, of in sorted(steps.items())]


def _follows(old: _Span, new: _Span) -> list[str]:
    where = f"generation {old.generation} ended with step {old.last}, {new.generation} began with {new.first}"
    if new.first > old.last + 1:
        return [f"Steps are missing: {where}."]
    if new.first < old.last:
        return [f"Rolled back by {old.last - new.first + 1} steps: {where}."]
    return []


def _holes(commits: Sequence[Commit]) -> list[str]:
    """Return the steps within a generation that no process committed."""
    steps: dict[int, set[int]] = {}
    for commit in commits:
        steps.setdefault(commit.generation, set()).add(commit.step)
    holes = {g: sorted(set(range(min(of), max(of) + 1)) - of) for g, of in sorted(steps.items())}
    return [f"Generation {g} committed no step {_numbers(missing)}." for g, missing in holes.items() if missing]


def _skipped(commits: Sequence[Commit], spans: Sequence[_Span]) -> list[str]:
    """Return the processes that left out a step of a generation. All members begin with the same step and make every one."""
    firsts = {span.generation: span.first for span in spans}
    steps: dict[tuple[Hashable, int], set[int]] = {}
    for commit in commits:
        steps.setdefault((commit.process, commit.generation), set()).add(commit.step)
    return [
        f"{process} left out step {_numbers(missing)} of generation {generation}."
        for (process, generation), of in sorted(steps.items(), key=str)
        if (missing := sorted(set(range(firsts[generation], max(of))) - of))
    ]


def _twice(commits: Sequence[Commit]) -> list[str]:
    """Return the processes that applied a step to a state which had it already. In one process steps only go up."""
    seen: dict[Hashable, list[Commit]] = {}
    for commit in commits:
        seen.setdefault(commit.process, []).append(commit)
    problems = []
    for process, of in sorted(seen.items(), key=lambda item: str(item[0])):
        of.sort(key=lambda c: (c.generation, c.step))
        for a, b in itertools.pairwise(of):
            if b.step <= a.step:
                problems.append(
                    f"{process} committed step {a.step} in generation {a.generation}, then step {b.step} in {b.generation}."
                )
    return problems


def _lived(commits: Sequence[Commit], change: Change, first: _Span) -> list[str]:
    problems = []
    if len(change.survivors) != change.num_survivors:
        problems.append(f"{len(change.survivors)} processes should live on, {change.num_survivors} expected.")
    by_generation: dict[int, set[Hashable]] = {}
    for commit in commits:
        by_generation.setdefault(commit.generation, set()).add(commit.process)
    for process in sorted(change.survivors, key=str):
        if process not in by_generation[change.before]:
            problems.append(f"{process} did not train in generation {change.before}, before the change.")
        if process not in by_generation[first.generation] and process not in change.pausing:
            problems.append(
                f"{process} did not train in generation {first.generation}, the first after the change, which committed the"
                f" steps {first.first} to {first.last}."
            )
        if process not in by_generation[change.after]:
            problems.append(f"{process} did not live on: it commits nothing in generation {change.after}.")
    return problems


def _numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
