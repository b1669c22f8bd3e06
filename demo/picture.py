"""`python -m demo.picture FILE.svg`: run the tour without a cluster, and draw its terminal for the README."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS = 118
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*|<!--.*?-->\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""rich's SVG format, without fonts that the reader's browser would fetch from another host."""
STYLES = (
    (r"^\$", "bold"),
    (r"^>>>", "bold red"),
    (r"^regroup: Warning", "yellow"),
    (r"^regroup: Normal", "green"),
    (r"^What happened", "bold"),
    (r"^(step|regroup:)", "dim"),
)
_STATE = re.compile(r"regroup: (?:[\d:]+  )?(\w+)  (\d+/\d+) ready  generation (\d+)")


def chosen(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines that tell the story: each state once, not each of its steps. Pure."""
    last: tuple[str, ...] | None = None
    for line in lines:
        state = _STATE.match(line)
        if state is not None:
            if state.groups() != last:
                last = state.groups()
                yield line
        elif not line.startswith("regroup: ") or re.match(r"regroup: (Normal|Warning) ", line):
            yield line


def drawn(lines: Sequence[str]) -> str:
    """Return a picture of a terminal with these lines, as SVG. Pure."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in lines:
        style = next((style for pattern, style in STYLES if re.match(pattern, line)), "")
        console.print(Text(line, style=style), soft_wrap=False)
    return console.export_svg(title="make run", code_format=FORMAT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the tour."""
    parser = argparse.ArgumentParser(prog="python -m demo.picture", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.svg")
    file = parser.parse_args(arguments).file
    done = subprocess.run([sys.executable, "-m", "demo.local"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout, end="", file=sys.stderr)
        return done.returncode
    file.write_text(drawn(list(chosen(done.stdout.splitlines()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
