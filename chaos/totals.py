"""Results of jobs: a journal that survives an interruption, sums over it, and its tables. Pure but for the journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.commits import percentile
from chaos.plan import MOMENTS
from chaos.verdict import Injected, Verdict


@dataclass(frozen=True)
class Result:
    """One job of one seed."""

    seed: int
    num_faults: int
    """Number of faults asked for. `faults` has those that were injected."""
    where: str
    version: str
    """Digest of the sources that ran."""
    scenario: str
    faults: tuple[Injected, ...]
    verdict: Verdict
    seconds: float

    def line(self) -> str:
        """Return the journal's line."""
        return json.dumps(asdict(self))


def parse(line: str) -> Result:
    """Return the result in a journal's line."""
    raw: dict[str, Any] = json.loads(line)
    faults = tuple(Injected(**f) for f in raw.pop("faults"))
    return Result(**{**raw, "faults": faults, "verdict": Verdict(**raw["verdict"])})


class Journal:
    """A file with a line for each job that has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, result: Result) -> None:
        """Append a result. A last line that a crash has cut short is removed, or it would be one line with this result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(result.line().encode() + b"\n")

    def read(self) -> list[Result]:
        """Return all results. A last line that a crash has cut short is left out."""
        if not self.path.exists():
            return []
        return [parse(line) for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def done_already(results: Iterable[Result], *, version: str) -> dict[tuple[int, int], Result]:
    """Map (seed, faults asked for) to the newest result of this version of the sources that passed."""
    return {(r.seed, r.num_faults): r for r in results if r.version == version and r.verdict.passed}


def by_kind(faults: Iterable[Injected]) -> dict[str, dict[str, float | None]]:
    """Return for each kind its number of faults, and p50, p99 and the maximum of the seconds to the next commit.

    A fault without a commit after it counts in `n` only. The times of a kind are None if it has only such faults.
    """
    of_kind: dict[str, list[Injected]] = {}
    for fault in faults:
        of_kind.setdefault(fault.kind, []).append(fault)
    out: dict[str, dict[str, float | None]] = {}
    for kind, those in sorted(of_kind.items()):
        seconds = [f.recovered_s for f in those if f.recovered_s is not None]
        out[kind] = {
            "n": len(those),
            "p50_s": round(percentile(seconds, 50), 3) if seconds else None,
            "p99_s": round(percentile(seconds, 99), 3) if seconds else None,
            "max_s": round(max(seconds), 3) if seconds else None,
        }
    return out


def by_moment(faults: Iterable[Injected]) -> dict[str, dict[str, int]]:
    """Return for each moment the number of faults that met it (`n`), of faults planned for it, and of planned ones that met it.

    Faults in journals from before both were recorded are left out.
    """
    known = [f for f in faults if f.planned]
    return {
        moment: {
            "n": sum(f.moment == moment for f in known),
            "planned": sum(f.planned == moment for f in known),
            "met": sum(f.planned == f.moment == moment for f in known),
        }
        for moment in MOMENTS
        if any(moment in (f.moment, f.planned) for f in known)
    }


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the content of bench/out/chaos.json."""
    verdicts = [r.verdict for r in results]
    faults = [f for r in results for f in r.faults]
    return {
        "seed": [r.seed for r in results] if len(results) != 1 else results[0].seed,
        "faults": len(faults),
        "jobs": len(results),
        "stuck": sum(len(v.stuck) for v in verdicts),
        "failed": sum(v.outcome not in ("Succeeded", "Stuck") for v in verdicts),
        "equal": all(v.outcome == "Succeeded" and not v.unequal for v in verdicts),
        "rolled_back": sum(len(v.rolled_back) for v in verdicts),
        "generations": sum(v.generations for v in verdicts),
        "redone": sum(v.redone for v in verdicts),
        "seconds": round(sum(r.seconds for r in results), 1),
        "failing_seeds": [r.seed for r in results if not r.verdict.passed],
        "by_kind": by_kind(faults),
        "by_moment": by_moment(faults),
    }


@dataclass(frozen=True)
class Grid:
    """A table in words, for a terminal and for docs/how-to/chaos.md."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def table(self) -> Table:
        """Return the table for a terminal."""
        out = Table(title=self.title, title_justify="left", box=None, pad_edge=False)
        for index, name in enumerate(self.columns):
            out.add_column(name, justify="right" if index else "left")
        for row in self.rows:
            out.add_row(*row)
        return out

    def markdown(self) -> str:
        """Return the table in Markdown."""
        rule = ("---", *("---:" for _ in self.columns[1:]))
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.columns, rule, *self.rows))


def grids(found: dict[str, Any]) -> list[Grid]:
    """Return two tables: times by kind of fault, and the moments that were met."""
    kinds = [
        (
            kind,
            str(row["n"]),
            *("-" if row[key] is None else f"{row[key]:.2f} s" for key in ("p50_s", "p99_s", "max_s")),
        )
        for kind, row in found["by_kind"].items()
    ]
    moments = [(m, *(str(row[key]) for key in ("n", "planned", "met"))) for m, row in found["by_moment"].items()]
    out = [Grid("From the fault to the next commit", ("fault", "n", "p50", "p99", "max"), tuple(kinds))]
    if moments:
        out.append(Grid("Moments of the faults", ("moment", "met by", "planned for", "of these met"), tuple(moments)))
    return out


def sentence(found: dict[str, Any]) -> str:
    """Return the verdict over all jobs in one line."""
    equal = "all equal to the run without faults" if found["equal"] else "NOT all equal to the run without faults"
    failed = f", {found['failed']} failed" if found["failed"] else ""
    return (
        f"{found['faults']} faults in {found['jobs']} jobs: {found['stuck']} stuck{failed}, {equal}, "
        f"{found['rolled_back']} roll-backs with a living holder; {found['generations']} generations, "
        f"{found['redone']} steps redone."
    )
