"""Computes goodput, table and JSON file from the commits of a disturbed run. `bench.goodput` has the formula. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from bench.commits import Commit
from bench.peers import Peer


@dataclass(frozen=True)
class Window:
    """A part of a run, by the clock of its commits, in seconds."""

    begin_s: float
    end_s: float

    @property
    def wall_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Goodput:
    """The steps and the goodput of a window."""

    stayed: int
    """Steps whose first commit is in the window, and that still stand at its end."""
    partial: int
    """Steps in `stayed` that fewer than all ranks committed."""
    again: int
    """Steps that were committed again in the window, or were lost at its end: this work is not in the goodput."""
    goodput: float
    """Share of the time that went into steps that stayed, 1 in the ideal. A step of fewer ranks may have left samples out; it
    counts with the share of its batch that was trained on."""
    steps: float
    """The same with each step counted as whole."""


def fault_times(seconds: float, every_s: float) -> list[float]:
    """Return the seconds from the window's begin to each kill. Each whole `every_s` has one in its middle."""
    return [every_s * (number + 0.5) for number in range(int(seconds / every_s))]


def victim(commits: Sequence[Commit], living: set[int], draw: float) -> Commit | None:
    """Return the newest commit of the process to be killed, or None if no process that trains is alive.

    The candidates are the living processes that committed in the newest epoch, in the order of their ranks. `draw`, in
    [0, 1), picks one of them.
    """
    newest = max((commit.epoch for commit in commits), default=0)
    last = {commit.pid: commit for commit in commits if commit.epoch == newest and commit.pid in living}
    order = sorted(last.values(), key=lambda commit: (commit.rank, commit.pid))
    return order[int(draw * len(order))] if order else None


def standing(commits: Iterable[Commit], end_s: float) -> dict[int, Commit]:
    """Map the number of each step that stands at `end_s` to its first commit.

    An epoch continues from some state: its earliest commit has the number of the first step that it made. Commits of
    older epochs with this number or a higher one are void, since that state does not contain them. `commits` may go on
    after `end_s`: later commits show which steps are void, but their own steps do not count.
    """
    first: dict[int, Commit] = {}
    by_time = sorted(commits, key=lambda commit: commit.t_s)
    for commit in by_time:
        first.setdefault(commit.epoch, commit)
    bound: dict[int, float] = {}
    lowest = float("inf")
    for epoch in sorted(first, reverse=True):
        bound[epoch] = lowest
        lowest = min(lowest, first[epoch].step)
    found: dict[int, Commit] = {}
    for commit in by_time:
        if commit.t_s <= end_s and commit.step < bound[commit.epoch]:
            found.setdefault(commit.step, commit)
    return found


def mean_step_s(commits: Iterable[Commit], window: Window, *, ranks: int) -> float | None:
    """Return the mean time between first commits of neighbouring steps in an epoch of all ranks; None if there are no two."""
    times: dict[tuple[int, int], float] = {}
    for commit in commits:
        if commit.world == ranks and window.begin_s <= commit.t_s <= window.end_s:
            key = (commit.epoch, commit.step)
            times[key] = min(commit.t_s, times.get(key, commit.t_s))
    pairs = pairwise(sorted(times))
    gaps = [times[later] - times[earlier] for earlier, later in pairs if earlier[0] == later[0]]
    return statistics.fmean(gaps) if gaps else None


def goodput(commits: Sequence[Commit], window: Window, *, step_s: float, ranks: int, keeps_batch: bool) -> Goodput:
    """Return the goodput of a window.

    `commits` has all commits of the run: also those before the window, and those up to a step after the last fault.
    `step_s` is the mean time of a step of all ranks. `keeps_batch` is False if a step of fewer than all ranks leaves
    out the samples of the missing ones.
    """
    before = max((commit.step for commit in commits if commit.t_s < window.begin_s), default=0)
    stayed = [commit for step, commit in standing(commits, window.end_s).items() if step > before]
    made: dict[tuple[int, int], float] = {}
    for commit in commits:  # the first rank's commit says when a step was made
        key = (commit.epoch, commit.step)
        made[key] = min(commit.t_s, made.get(key, commit.t_s))
    tried = [t_s for t_s in made.values() if window.begin_s <= t_s <= window.end_s]
    trained = len(stayed) if keeps_batch else sum(commit.world / ranks for commit in stayed)
    return Goodput(
        stayed=len(stayed),
        partial=sum(commit.world < ranks for commit in stayed),
        again=len(tried) - len(stayed),
        goodput=trained * step_s / window.wall_s,
        steps=len(stayed) * step_s / window.wall_s,
    )


@dataclass(frozen=True)
class Disturbed:
    """One run of a peer with a kill every `every_s`."""

    every_s: float
    seconds: float
    step_s: float
    """Mean time of a step of all ranks, in the whole run."""
    calm: float
    """Goodput by the same formula before the first kill."""
    kills: int
    skipped: int
    """Kills that found no process training."""
    goodput: Goodput


def result(
    measured: Mapping[str, Sequence[Disturbed]], peers: Sequence[Peer], setup: Mapping[str, object]
) -> dict[str, Any]:
    """Return the JSON file's content."""
    found: dict[str, Any] = {}
    for peer in peers:
        runs = {f"{run.every_s:g}": _figures(run) for run in measured[peer.key]}
        settings = {} if peer.settings is None else {"settings": dict(peer.settings)}
        found[peer.key] = {"title": peer.title, "lost": peer.lost, "every": runs, **settings}
    return {**found, "setup": dict(setup)}


def _figures(run: Disturbed) -> dict[str, float]:
    good = run.goodput
    return {
        "goodput": round(good.goodput, 4),
        "steps": round(good.steps, 4),
        "undisturbed": round(run.calm, 4),
        "step_s": round(run.step_s, 5),
        "stayed": good.stayed,
        "partial": good.partial,
        "again": good.again,
        "kills": run.kills,
        "skipped": run.skipped,
        "seconds": round(run.seconds, 1),
    }


def tables(found: Mapping[str, Any]) -> Group:
    """Return what is printed: a table of at most 80 columns, and for each peer a line on the other costs of the kills."""
    setup = found["setup"]
    title = f"Goodput while one of {setup['ranks']} ranks gets a SIGKILL every so often"
    table = Table(title=title, box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for heading in ("", "goodput", "steps", "no kills", "a step", "stayed", "kills"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.caption = (
        f"{setup['seconds']:g} s each, one system after the other, on {setup['cpus']} cores, torch {setup['torch']}, "
        f"load {setup['load_before']:.1f} before and {setup['load_after']:.1f} after"
    )
    lines = []
    for one in (one for key, one in found.items() if key != "setup"):
        for every, run in one["every"].items():
            shares = (f"{100 * run[key]:.1f} %" for key in ("goodput", "steps", "undisturbed"))
            kills = f"{run['kills']}" + (f" of {run['kills'] + run['skipped']}" if run["skipped"] else "")
            name = f"{one['title']}, {every} s"
            table.add_row(name, *shares, f"{1000 * run['step_s']:.1f} ms", str(run["stayed"]), kills)
        again = sum(run["again"] for run in one["every"].values())
        lines.append(
            f"{one['title']}: {again or 'no'} {'step' if again == 1 else 'steps'} made again or lost. {one['lost']}"
        )
    return Group(table, *lines)
