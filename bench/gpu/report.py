"""The table of `bench.gpu`, which grows line by line, and its JSON file. Plain text, so that it needs no package."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.machine import Machine
from bench.gpu.part import Row

WIDTHS = (44, 40, 34, 22)
"""Columns: what, found, aim, verdict."""


@dataclass
class Report:
    """All rows so far, and the file that keeps them."""

    machine: Machine
    path: Path
    """The JSON file, written again after each part: a run that is interrupted leaves what it has."""
    date: str
    commit: str
    show: Callable[[str], None] = print
    parts: dict[str, list[Row]] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Print the head."""
        self.show(_line("", "found", "aim", "verdict"))

    def part(self, name: str) -> None:
        """Begin a part in the table."""
        self.parts[name] = []
        self.show(f"-- {name}")

    def add(self, name: str, row: Row) -> None:
        """Add and print a row of a part."""
        self.parts[name].append(row)
        self.show(_line(row.what, row.found, row.aim, row.verdict))

    def end_part(self, name: str, took_s: float) -> None:
        """Note the time that a part took, and write the JSON file."""
        self.took_s[name] = round(took_s, 1)
        self.show(f"   {name} took {took_s:.0f} s")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @property
    def holds(self) -> bool:
        """True if at least one verdict was judged and none of them failed."""
        judged = [row.holds for rows in self.parts.values() for row in rows if row.aim and row.holds is not None]
        return bool(judged) and all(judged)

    def failed(self) -> list[str]:
        """Return the rows that do not hold, as PART: ROW."""
        return [f"{name}: {row.what}" for name, rows in self.parts.items() for row in rows if row.holds is False]

    def last_line(self) -> str:
        """Return the sentence that ends the output."""
        rows = [row for rows in self.parts.values() for row in rows if row.aim]
        held, unjudged = sum(row.holds is True for row in rows), sum(row.holds is None for row in rows)
        failed = self.failed()
        said = f"{held} of {len(rows)} verdicts hold"
        if unjudged:
            said += f", {unjudged} were not judged"
        return f"{said}, {len(failed)} fail: {'; '.join(failed)}." if failed else f"{said}, none fails."

    def to_json(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return {
            "date": self.date,
            "commit": self.commit,
            "machine": asdict(self.machine),
            "holds": self.holds,
            "took_s": self.took_s,
            "parts": {
                name: [{**row.to_json(), "verdict": row.verdict} for row in rows] for name, rows in self.parts.items()
            },
        }


def _line(*cells: str) -> str:
    """Return one row of the table. A text that is too long for its column continues in the next line."""
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, WIDTHS, strict=True)]
    height = max(map(len, wrapped))
    lines = []
    for i in range(height):
        here = [column[i] if i < len(column) else "" for column in wrapped]
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(here, WIDTHS, strict=True)).rstrip())
    return "\n".join(lines)
