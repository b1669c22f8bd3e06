"""The commands of the tutorials that need no cluster, as a reader types them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs/tutorials"
BIN = Path(sys.executable).parent
OURS = ("make run", "source ", "saved model.pt")
"""Beginnings of blocks that are no commands for this test: the installation, and output of `regroup run`."""
PROGRAMS = ("make_data.py", "predict.py")
"""Files that the reader runs as soon as they are saved."""


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name of a file, content), and ("", commands), in the page's order."""
    for kind, body in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        named = re.search(r'title="(.+)"', kind)
        if kind != "text" and (named or not body.startswith(OURS)):
            yield (named[1] if named else "", body)


def typed(page: str, directory: Path) -> str:
    """Save the page's files, run its commands and return what they print."""
    script = ["set -euo pipefail"]
    for name, body in blocks((PAGES / page).read_text()):
        if name:
            (directory / name).write_text(body)
        script.append(f"python {name}" if name in PROGRAMS else "" if name else body)
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + "\n".join(script)
    return done.stdout


@pytest.mark.slow
def test_first_job_is_resized_broken_and_continued(tmp_path: Path) -> None:
    printed = typed("first-job.md", tmp_path)
    assert "% of the flowers are recognised" in printed
    log = (tmp_path / "log").read_text()
    assert "lost a process" in log
    assert "Succeeded" in log


@pytest.mark.slow
def test_model_is_loaded_from_what_the_script_saved_and_from_a_checkpoint(tmp_path: Path) -> None:
    printed = typed("load-your-model.md", tmp_path)
    shown = re.findall(r"^```text\n(.*?)^```$", (PAGES / "load-your-model.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    assert [output for output in shown if output not in printed] == []
