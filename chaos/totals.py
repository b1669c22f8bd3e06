"""Results of jobs: a journal that survives an interruption, sums over it, and the table of times. Pure but for the journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.commits import percentile
from chaos.verdict import Injected, Verdict


@dataclass(frozen=True)
class Result:
    """One job of one seed."""

    seed: int
    num_faults: int
    """Faults asked for; `faults` are those injected."""
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
        """Append a result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(result.line() + "\n")

    def read(self) -> list[Result]:
        """Return all results; a line that was cut short by a crash is left out."""
        if not self.path.exists():
            return []
        return [parse(line) for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def done_already(results: Iterable[Result], *, version: str) -> dict[tuple[int, int], Result]:
    """Return by (seed, faults asked for) the newest result of this version of the sources that passed."""
    return {(r.seed, r.num_faults): r for r in results if r.version == version and r.verdict.passed}


def by_kind(faults: Iterable[Injected]) -> dict[str, dict[str, float]]:
    """Return for each kind how many there were, and p50, p99 and the maximum of the seconds to the next commit."""
    seconds: dict[str, list[float]] = {}
    for fault in faults:
        seconds.setdefault(fault.kind, [])
        if fault.recovered_s is not None:
            seconds[fault.kind].append(fault.recovered_s)
    return {
        kind: {
            "n": len(values),
            "p50_s": round(percentile(values, 50), 3),
            "p99_s": round(percentile(values, 99), 3),
            "max_s": round(max(values), 3),
        }
        for kind, values in sorted(seconds.items())
        if values
    }


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return what stands in bench/out/chaos.json."""
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
    }


def table(found: dict[str, Any]) -> Table:
    """Return the table of times by kind of fault."""
    out = Table(title="From the fault to the next commit", title_justify="left", box=None, pad_edge=False)
    out.add_column("fault")
    for name in ("n", "p50", "p99", "max"):
        out.add_column(name, justify="right")
    for kind, row in found["by_kind"].items():
        out.add_row(kind, str(row["n"]), *(f"{row[key]:.2f} s" for key in ("p50_s", "p99_s", "max_s")))
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
