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


def test_every_part_says_how_long_it_took() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    (parts,) = re.findall(r"^test: (.+?) ##", text, re.MULTILINE)
    (of_cluster,) = re.findall(r"^test-cluster: .*\n((?:\t.*\n)+)", text, re.MULTILINE)
    for part in {*parts.split(), *re.findall(r"test-\w+|images|programs", of_cluster), "programs"}:
        (recipe,) = re.findall(rf"^{part}: .*\n((?:\t.*\n)+)", text, re.MULTILINE)
        assert recipe.splitlines()[-1] == "\t$(took)", part


def test_ci_runs_every_part_of_make_test_and_test_cluster() -> None:
    """It calls the parts itself, so that some run beside others."""
    (parts,) = re.findall(r"^test: (.+?) ##", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    lines = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    run = {word for line in lines if line.startswith("make ") for word in line.split()}
    assert {*parts.split(), "test-cluster"} <= run
