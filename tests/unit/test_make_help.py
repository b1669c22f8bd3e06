"""`make help` explains every target that a person is meant to call."""

import re
import subprocess

from cluster.paths import REPOSITORY


def test_help_names_every_explained_target() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (\S+)$", makefile, re.MULTILINE))
    explained = {line.split(":", 1)[0] for line in makefile.splitlines() if "## " in line and line[:1].islower()}
    done = subprocess.run(["make", "--silent", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    shown = set(re.findall(r"^  (?:\x1b\[1m)?([\w-]+)", done.stdout, re.MULTILINE))
    assert {"demo", "test", "test-e2e"} <= phony
    assert explained == phony == shown
