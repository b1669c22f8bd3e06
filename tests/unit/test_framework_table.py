"""The table of frameworks: each cell rests on a test that exists, and the page is made from the data."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from harness.frameworks import COLUMNS, NOTHING, page, rows
from tests.builders.jobs import BAD_SPECS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/frameworks.md"


def missing(test: str) -> str:
    """Return what a test's id names and the repository lacks: the file, the function or the parameters. "" if all is there."""
    path, _, name = test.partition("::")
    function, _, parameters = name.partition("[")
    if not (ROOT / path).is_file():
        return path
    source = (ROOT / path).read_text()
    tops = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)}
    if function not in tops:
        return function
    decorators = "".join(ast.get_source_segment(source, one) or "" for one in tops[function].decorator_list)
    given = [*re.findall(r'id="([^"]+)"', decorators), *(BAD_SPECS if "BAD_SPECS" in decorators else ())]
    return "" if not parameters or parameters.rstrip("]") in given else f"[{parameters}"


def test_each_cell_has_a_test_that_exists() -> None:
    for row in rows():
        assert [lacks for test in row.tests if (lacks := missing(test))] == [], row.name
        shown = {cell for cells in row.tests.values() for cell in cells}
        claimed = {cell for cell, text in row.cells.items() if text != NOTHING}
        assert shown == claimed, row.name


@pytest.mark.parametrize(
    ("test", "want"),
    [
        ("tests/unit/test_nothing.py::test_a", "tests/unit/test_nothing.py"),
        ("tests/unit/test_framework_table.py::test_nothing", "test_nothing"),
        ("tests/trainer/test_frameworks.py::"
         "test_killed_stopped_and_resized_script_goes_on_from_its_checkpoint_to_the_right_end[Fortran]", "[Fortran]"),
        ("tests/api/test_resource.py::test_bad_spec_is_refused_with_its_sentence[no such case]", "[no such case]"),
    ],
)  # fmt: skip
def test_a_test_that_is_not_there_is_found(test: str, want: str) -> None:
    assert missing(test) == want


def test_page_is_made_from_the_data() -> None:
    assert PAGE.read_text() == page(rows()), "run `make generate`"


def test_rows_are_those_that_people_ask_for() -> None:
    names = " ".join(row.name for row in rows())
    wanted = ["a script", "a session", "Hugging Face", "Accelerate", "Lightning", "DeepSpeed", "Horovod", "elastic",
              "MultiWorkerMirrored", "ParameterServer", "JAX", "XGBoost"]  # fmt: skip
    assert [one for one in wanted if one not in names] == []
    assert len(COLUMNS) == 6
