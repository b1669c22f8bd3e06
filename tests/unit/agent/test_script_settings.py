"""What a script sets in its environment before it imports torch."""

from __future__ import annotations

import pytest

from _regroup_agent.script_settings import ScriptSettings, script_settings

OMP = "OMP_NUM_THREADS"
BEFORE = "import os\n"
AFTER = "\nimport torch\n"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        pytest.param("", {}, id="nothing"),
        pytest.param(f"os.environ['{OMP}'] = '4'", {OMP: "4"}, id="a literal"),
        pytest.param(f"os.environ['{OMP}'] = str(4)", {OMP: "4"}, id="a number as text"),
        pytest.param(f"os.environ.setdefault('{OMP}', '4')", {OMP: "4"}, id="a default where nothing is set"),
        pytest.param("os.environ.setdefault('SET', '4')", {}, id="a default where something is set"),
        pytest.param("os.environ['A'] = '1'\nos.environ.setdefault('A', '2')", {"A": "1"}, id="a default after a value"),
        pytest.param("del os.environ['SET']\nos.environ.setdefault('SET', '2')", {"SET": "2"}, id="a default after a removal"),
        pytest.param("os.environ.pop('SET', None)", {"SET": None}, id="a removal"),
        pytest.param(f"os.environ.update({{'{OMP}': '4'}}, A='1')", {OMP: "4", "A": "1"}, id="several"),
        pytest.param(f"os.environ |= {{'{OMP}': '4'}}", {OMP: "4"}, id="a union"),
        pytest.param(f"os.putenv('{OMP}', '4')", {OMP: "4"}, id="putenv"),
        pytest.param(f"from os import environ\nenviron['{OMP}'] = '4'", {OMP: "4"}, id="by its name"),
        pytest.param("os.environ['A'] = '1'; os.environ['A'] = '2'", {"A": "2"}, id="the last one"),
        pytest.param(f"try:\n  os.environ['{OMP}'] = '4'\nfinally:\n  pass", {OMP: "4"}, id="in try"),
        pytest.param(f"if __name__ == '__main__':\n  os.environ['{OMP}'] = '4'", {OMP: "4"}, id="in the main block"),
        pytest.param(f"import torch\nos.environ['{OMP}'] = '4'", {}, id="after the import"),
        pytest.param(f"from torch.nn import Linear\nos.environ['{OMP}'] = '4'", {}, id="after an import from it"),
        pytest.param("os.environ['TOKENIZERS'] = value()", {}, id="unknown, of no import"),
        pytest.param("if x:\n  os.environ['SEED'] = '4'", {}, id="in a branch, of no import"),
        pytest.param("def f(:", {}, id="no python"),
        pytest.param("other['A'] = '1'\nother.update(A='1')\nos.environ[name] = '1'", {}, id="something else"),
    ],
)  # fmt: skip
def test_values_that_the_text_shows(text: str, values: dict[str, str | None]) -> None:
    got = script_settings((BEFORE + text + AFTER).encode(), {"SET": "x"})
    assert (got.values, got.unknown) == (values, "")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"os.environ['{OMP}'] = str(os.cpu_count())", id="a call"),
        pytest.param(f"os.environ['{OMP}'] = f'{{n}}'", id="a format"),
        pytest.param(f"if n:\n  os.environ['{OMP}'] = '4'", id="in a branch"),
        pytest.param(f"if __name__ != '__main__':\n  os.environ['{OMP}'] = '4'", id="in what other processes run"),
        pytest.param(f"if __name__ == '__mp_main__':\n  os.environ['{OMP}'] = '4'", id="in what spawned processes run"),
        pytest.param(f"for n in ns:\n  os.environ['{OMP}'] = '4'", id="in a loop"),
        pytest.param(f"def main():\n  os.environ['{OMP}'] = '4'\n  import torch", id="in a function"),
        pytest.param(f"os.environ.setdefault('{OMP}', threads)", id="a default"),
    ],
)
def test_value_that_only_the_running_script_knows(text: str) -> None:
    assert script_settings((BEFORE + text + AFTER).encode(), {}).unknown == OMP
    assert script_settings((BEFORE + AFTER + text).encode(), {}).unknown == "", (
        "torch has read it by then, also under plain python"
    )


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_encoding_that_python_reads(encoding: str) -> None:
    text = f"# coding: {encoding}\n{BEFORE}os.environ['{OMP}'] = '4'; os.environ['A'] = 'é'{AFTER}"
    assert script_settings(text.encode(encoding), {}).values == {OMP: "4", "A": "é"}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"-" * 100_000 + b"1", id="nested too deeply"),
        pytest.param(b"import os\0", id="a null byte"),
        pytest.param(b"x = '\xff'", id="not UTF-8"),
        pytest.param(b"# coding: nothing\n", id="an unknown encoding"),
    ],
)
def test_what_python_refuses_sets_nothing(text: bytes) -> None:
    assert script_settings(text, {}) == ScriptSettings()
