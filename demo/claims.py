"""The claims of the tour, their verdicts, and the tables at its end. Pure but for printing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Claim:
    """One claim, what was seen, and whether it held."""

    what: str
    seen: str
    held: bool


@dataclass
class Claims:
    """The claims of a tour, in their order."""

    made: list[Claim] = field(default_factory=list)

    def check(self, what: str, held: bool, seen: str) -> None:
        """Record a claim."""
        self.made.append(Claim(what, seen, held))

    @property
    def failed(self) -> list[Claim]:
        """The claims that did not hold."""
        return [c for c in self.made if not c.held]

    def show(self, console: Console) -> None:
        """Print the claims as a table."""
        table = Table(title="What was claimed", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        table.add_column("claim")
        table.add_column("seen")
        for claim in self.made:
            mark = "[green]held[/]" if claim.held else "[bold red]FAILED[/]"
            table.add_row(mark, claim.what, claim.seen)
        console.print(table)


def recovery_ms(incident: dict[str, Any]) -> float:
    """Return the milliseconds from an incident's detection to the first step of the new generation."""
    return sum(
        incident.get(part) or 0.0
        for part in ("detectMs", "decideMs", "persistMs", "formMs", "transferMs", "firstStepMs")
    )


def incident_table(incidents: list[dict[str, Any]]) -> Table:
    """Return the job's own incidents as a table: milliseconds by part."""
    table = Table(title="Incidents, from status.incidents (ms)", title_justify="left", box=None, pad_edge=False)
    for name in ("gen", "cause", "worker"):
        table.add_column(name)
    for name in ("detect", "decide", "persist", "form", "transfer", "first step", "redone"):
        table.add_column(name, justify="right")
    for i in incidents:
        parts = [
            i.get(k)
            for k in ("detectMs", "decideMs", "persistMs", "formMs", "transferMs", "firstStepMs", "stepsRedone")
        ]
        table.add_row(
            str(i["generation"]),
            i.get("cause", ""),
            i.get("culprit", ""),
            *("" if p is None else f"{p:.0f}" for p in parts),
        )
    return table
