"""The commands of docs/tutorials/first-job.md, as a reader types them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/tutorials/first-job.md"
BIN = Path(sys.executable).parent
OURS = ("make run", "source ", "saved model.pt")
"""Beginnings of blocks that are no commands for this test: the installation, and output."""


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name of a file, content), and ("", commands), in the page's order."""
    for kind, body in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        named = re.search(r'title="(.+)"', kind)
        if named or not body.startswith(OURS):
            yield (named[1] if named else "", body)


@pytest.mark.slow
def test_every_command_works_as_it_is_written(tmp_path: Path) -> None:
    script = ["set -euo pipefail"]
    for name, body in blocks(PAGE.read_text()):
        if name:
            (tmp_path / name).write_text(body)
        script.append(f"python {name}" if name in ("make_data.py", "predict.py") else "" if name else body)
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + "\n".join(script)
    assert "% of the flowers are recognised" in done.stdout
    log = (tmp_path / "log").read_text()
    assert "lost a process" in log
    assert "Succeeded" in log
