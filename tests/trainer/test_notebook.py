"""The notebook of the tutorials, cell by cell in a kernel of its own, with jobs of this machine."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from harness.notebook import page

NOTEBOOK = Path(__file__).parents[2] / "docs/tutorials/from-python.ipynb"


def test_page_shows_the_notebook() -> None:
    assert NOTEBOOK.with_suffix(".md").read_text() == page(NOTEBOOK), "run `make generate`"


@pytest.mark.timeout(300)
def test_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = page_of(notebook, tmp_path)
    assert "step 200 of 200" in shown
    assert "'Succeeded'" in shown
    assert "The job train has ended (Succeeded): it cannot be resized." in shown
    assert not list((tmp_path / "home/regroup/runs").iterdir()), "delete() removes the files of the job"


def page_of(notebook: nbformat.NotebookNode, directory: Path) -> str:
    nbformat.write(notebook, directory / "ran.ipynb")  # type: ignore[no-untyped-call]
    return page(directory / "ran.ipynb")
