"""Makes the tables and the JSON file of `bench.recovery` from the trials of each peer. `bench.recovery` has the keys. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from bench.commits import percentile
from bench.peers import OURS, Peer
from bench.trials import Trial

PERCENTS = (50, 99)


def summarize(values: Iterable[float]) -> dict[str, float]:
    """Return the percentiles of some times, in the form of the JSON file."""
    kept = list(values)
    return {f"p{percent}": round(percentile(kept, percent), 4) for percent in PERCENTS}


def ratio(of: Mapping[str, float], to: Mapping[str, float]) -> dict[str, float]:
    return {f"p{percent}": round(of[f"p{percent}"] / to[f"p{percent}"], 2) for percent in PERCENTS}


def figures(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return one peer's part of the JSON file."""
    first = summarize(trial.recovery_s for trial in trials)
    sizes = sorted(Counter(trial.world for trial in trials).items())
    return {
        **first,
        "survivors": {
            **first,
            "ranks": {str(size): count for size, count in sizes},
            "kept": {"min": min(trial.kept for trial in trials), "max": max(trial.kept for trial in trials)},
            "rolled_back": {
                "total": sum(trial.rolled_back for trial in trials),
                "max": max(trial.rolled_back for trial in trials),
            },
        },
        "full_size": {
            **summarize(trial.full_s for trial in trials),
            "imports": summarize(trial.full_imports_s for trial in trials),
            "without_imports": summarize(trial.full_s - trial.full_imports_s for trial in trials),
        },
    }


def result(
    measured: Mapping[str, Sequence[Trial]], peers: Sequence[Peer], setup: Mapping[str, object]
) -> dict[str, Any]:
    """Return the JSON file's content. `measured` has Regroup, torchrun, and any of the others."""
    found: dict[str, Any] = {key: figures(trials) for key, trials in measured.items()}
    for peer in peers:
        found[peer.key]["lost"] = peer.lost
        if peer.settings is not None:
            found[peer.key]["settings"] = dict(peer.settings)
    torchrun = measured["torchrun"]
    without = summarize(trial.recovery_s - trial.imports_s for trial in torchrun)
    ours = found[OURS]
    return {
        **found,
        "torchrun_without_imports": without,
        "torchrun_imports": summarize(trial.imports_s for trial in torchrun),
        "ratio": ratio(found["torchrun"], ours),
        "ratio_without_imports": ratio(without, ours),
        "ratios": {
            key: {part: ratio(found[key][part], ours[part]) for part in ("survivors", "full_size")}
            for key in measured
            if key != OURS
        },
        "trials": {key: [vars(trial) for trial in trials] for key, trials in measured.items()},
        "setup": dict(setup),
    }


def tables(found: Mapping[str, Any], peers: Sequence[Peer]) -> Group:
    """Return what is printed: two tables, and for each peer a line on what a kill costs it."""
    setup = found["setup"]
    ranks = setup["ranks"]
    first = _table("SIGKILL of a rank to the next committed step", "what comes back")
    full = _table(f"SIGKILL of a rank to the next step of all {ranks} ranks", "without imports")
    for peer in peers:
        one = found[peer.key]
        first.add_row(*_cells(peer.title, found, peer.key, "survivors"), _who(one["survivors"]["ranks"], ranks))
        full.add_row(
            *_cells(peer.title, found, peer.key, "full_size"), f"{one['full_size']['without_imports']['p50']:.3f} s"
        )
    without, times = found["torchrun_without_imports"], found["ratio_without_imports"]
    first.add_row("  without its imports", *_seconds(without), f"{times['p50']:.1f} x", "")
    full.caption = (
        f"ratio: p50 over Regroup's; {setup['trials']} kills each, one peer after the other, "
        f"{ranks} ranks on {setup['cpus']} cores, torch {setup['torch']}, "
        f"load {setup['load_before']:.1f} before and {setup['load_after']:.1f} after"
    )
    return Group(first, full, *(f"{peer.title}: {_lost(found[peer.key], peer, ranks)}" for peer in peers))


def _table(title: str, last: str) -> Table:
    out = Table(title=title)
    for heading in ("", "p50", "p99", "ratio", last):
        out.add_column(heading, justify="right" if heading else "left")
    return out


def _cells(title: str, found: Mapping[str, Any], key: str, part: str) -> tuple[str, ...]:
    times = "" if key == OURS else f"{found['ratios'][key][part]['p50']:.1f} x"
    return (title, *_seconds(found[key][part]), times)


def _seconds(values: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(f"{values[f'p{percent}']:.3f} s" for percent in PERCENTS)


def _who(sizes: Mapping[str, int], ranks: int) -> str:
    """Return which ranks were in the first step, the usual case first."""
    by_count = sorted(sizes, key=lambda size: -sizes[size])
    return ", ".join(f"all {ranks}" if int(size) == ranks else f"survivors: {size} of {ranks}" for size in by_count)


def _lost(one: Mapping[str, Any], peer: Peer, ranks: int) -> str:
    kept, back = one["survivors"]["kept"], one["survivors"]["rolled_back"]
    alive = str(kept["min"]) if kept["min"] == kept["max"] else f"{kept['min']} to {kept['max']}"
    steps = f"{back['max'] or 'no'} committed {'steps' if back['max'] > 1 else 'step'} rolled back"
    if back["max"]:
        steps = f"at most {steps}"
    settings = "" if peer.settings is None else f" ({', '.join(f'{name} {n}' for name, n in peer.settings.items())})"
    return f"{alive} of {ranks} processes live on, {steps}. {peer.lost}{settings}"
