"""Every bound of time that a test of real processes asserts stands in the table of docs/reference/benchmarks.md, in a row of it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/benchmarks.md"
TESTS = sorted(path for tier in ("trainer", "e2e") for path in ROOT.glob(f"tests/{tier}/test_*.py"))
JUDGES = {
    "tests/e2e/truth.py": ("tests/e2e/test_truth.py", ("LAG_S", "STEP_LAG_S", "SEEN_S", "SILENCE_S", "RESTART_LAG_S")),
    "tests/trainer/test_script_tier.py": ("tests/trainer/test_script_tier.py", ("LAG_S",)),
}
"""How late what a user reads may be: a function compares with these, no assert. By file, with the test that applies them.
Not among them: how exactly the judge knows what is true (AHEAD_S, SPEED_OVER_S, STEADY_S)."""


def bounds(source: str, named: Collection[str] = ()) -> dict[str, float]:
    """Return the module's constants in seconds (`..._S`) that one of its asserts holds something below, and those `named`."""
    tree = ast.parse(source)
    asserted = {
        name.id
        for statement in ast.walk(tree) if isinstance(statement, ast.Assert)
        for compared in ast.walk(statement.test)
        if isinstance(compared, ast.Compare) and any(isinstance(op, ast.Lt | ast.LtE) for op in compared.ops)
        for name in ast.walk(compared) if isinstance(name, ast.Name)
    }  # fmt: skip
    found = {name: value for name, value in _constants(tree) if name in asserted and name.endswith("_S")}
    return found | {name: value for name, value in _constants(tree) if name in named}


def _constants(tree: ast.Module) -> Iterator[tuple[str, float]]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
            pairs = (
                zip(target.elts, statement.value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple)
                else [(target, statement.value)]
            )
            for name, value in pairs:
                if (
                    isinstance(name, ast.Name)
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, int | float)
                ):
                    yield name.id, value.value


def rows(readme: str) -> dict[str, str]:
    """Return by test file what its rows of the table say is asserted; "the same" stands for the row above."""
    table = readme.split("| what | seen | asserted | command |")[1].split("\n\n")[0]
    said: dict[str, str] = {}
    command = ""
    for line in table.splitlines()[2:]:
        _, _, _, asserted, new, _ = line.split("|")
        command = command if new.strip() == "the same" else new
        said[command] = said.get(command, "") + asserted
    return said


def missing(test: str, source: str, readme: str, named: Collection[str] = ()) -> list[str]:
    said = " ".join(asserted for command, asserted in rows(readme).items() if test in command)
    return [f"{name} = {value:g} s" for name, value in bounds(source, named).items() if f" {value:g} s" not in said]


@pytest.mark.parametrize("path", TESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_bound_stands_beside_its_figure(path: Path) -> None:
    test = str(path.relative_to(ROOT))
    assert missing(test, path.read_text(), PAGE.read_text()) == [], (
        f"add it to docs/reference/benchmarks.md, in a row of {test}"
    )


@pytest.mark.parametrize("path", JUDGES)
def test_what_a_judge_of_states_allows_stands_beside_its_figure(path: str) -> None:
    test, named = JUDGES[path]
    source = (ROOT / path).read_text()
    assert set(named) <= bounds(source, named).keys(), "a constant has another name"
    assert missing(test, source, PAGE.read_text(), named) == [], (
        f"add it to docs/reference/benchmarks.md, in a row of {test}"
    )


def test_bounds_are_looked_at() -> None:
    found = [bound for path in TESTS for bound in bounds(path.read_text())]
    assert len(found) > 8, found


README = """
| what | seen | asserted | command |
| --- | --- | --- | --- |
| kill | 0.1 s | at most 1 s | `pytest tests/e2e/test_kills.py` |
| the same with two | 0.2 s | never over 15 s | the same |
| pod | 0.1 s | at most 20 s | `pytest tests/e2e/test_pods.py` |

More.
"""


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        pytest.param("A_S, B_S = 1.0, 15\nassert took <= A_S\nassert max(all) < B_S", [], id="both are there"),
        pytest.param("A_S = 2.0\nassert took <= A_S", ["A_S = 2 s"], id="another number"),
        pytest.param("A_S = 20\nassert took <= A_S + build", ["A_S = 20 s"], id="the number of another test"),
        pytest.param(
            "A_S = 5\nassert not 7 >= A_S\nB_S = 5\nuntil(there, timeout_s=B_S)\nassert B_S > 3", [], id="no bound"
        ),
        pytest.param("LINES = 5\nassert n < LINES", [], id="no time"),
    ],
)
def test_bound_that_is_missing_is_found(source: str, wanted: list[str]) -> None:
    assert missing("tests/e2e/test_kills.py", source, README) == wanted
