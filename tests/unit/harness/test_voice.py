"""The docstrings that style.md rules out, and a baseline that only shrinks."""

from __future__ import annotations

import pytest

from harness.voice import Fault, docstrings, drawn, faults, lowered, sentences, too_many, words

LONG = "The operator " + "waits " * 24 + "here."  # 27 words


def test_docstrings_of_modules_classes_functions_and_attributes_are_read() -> None:
    source = '''"""Module."""
LIMIT = 3
"""Attribute of a module."""
"""A string after a docstring is none."""
class Pod:
    """Class."""
    name: str
    """Attribute of a class."""
    def delete(self):
        """Method."""
        call()
        """A string in a body is none."""
        async def inner():
            """Function in a function."""
        try:
            import torch
        except ImportError:
            class Missing:
                """Class in a handler."""
if True:
    """A string in a branch is none."""
    def function():
        """Function in a branch."""
'''
    assert [(one.line, one.name, one.text) for one in docstrings(source)] == [
        (1, "", "Module."),
        (3, "LIMIT", "Attribute of a module."),
        (6, "Pod", "Class."),
        (8, "Pod.name", "Attribute of a class."),
        (10, "Pod.delete", "Method."),
        (14, "Pod.delete.inner", "Function in a function."),
        (19, "Pod.delete.Missing", "Class in a handler."),
        (23, "function", "Function in a branch."),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("One. Two!  Three? Four", ["One.", "Two!", "Three?", "Four"], id="plain"),
        pytest.param(
            "One line\n    and the next. Two.", ["One line and the next.", "Two."], id="indented by the source"
        ),
        pytest.param("Takes 0.5 s in job.py. Two.", ["Takes 0.5 s in job.py.", "Two."], id="numbers and files"),
        pytest.param("A spec, e.g. Pod, i.e. One. Two.", ["A spec, e.g. Pod, i.e. One.", "Two."], id="abbreviations"),
        pytest.param("Run `a. B. c` now. Two.", ["Run `a. B. c` now.", "Two."], id="code"),
        pytest.param("One. `two` is.", ["One.", "`two` is."], id="begins with code"),
        pytest.param("Kinds:\n\n- One\n  goes on\n- Two", ["Kinds:", "One goes on", "Two"], id="list"),
        pytest.param("So:\n1. One\n2. Two", ["So:", "One", "Two"], id="numbered list"),
        pytest.param("Title\n\nText", ["Title", "Text"], id="paragraphs"),
        pytest.param("Text:\n\n    code is. None\n\nEnd.", ["Text:", "End."], id="indented code"),
        pytest.param("", [], id="empty"),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert list(sentences(text)) == expected


def test_code_is_one_word() -> None:
    assert words("Run `python -m harness.voice` -> done.") == 3


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        pytest.param("See Job.", ["see"], id="see"),
        pytest.param("Seeds of the walks.", [], id="another word"),
        pytest.param("What the job does.", ["headless"], id="what"),
        pytest.param("Of the current step: its samples.", ["headless"], id="of"),
        pytest.param("By bucket.", ["headless"], id="by"),
        pytest.param("When the job began.", ["headless"], id="when"),
        pytest.param("When a pod fails, the operator deletes it.", [], id="subject after a comma"),
        pytest.param("Return what the job does.", [], id="clause as an object"),
        pytest.param("The operator runs. What follows is read by nobody.", [], id="only the first sentence"),
        pytest.param(LONG, ["long"], id="long"),
        pytest.param(LONG.replace("waits waits ", "", 1), [], id="25 words"),
        pytest.param(f"{LONG} {LONG}", ["long", "long"], id="each long sentence"),
        pytest.param(f"See Job, {LONG}", ["see", "long"], id="two kinds"),
    ],
)
def test_faults(text: str, kinds: list[str]) -> None:
    assert [fault.kind for fault in faults(f'"""{text}"""\n')] == kinds


FOUND = {"a.py": [Fault(3, "see", "See B."), Fault(9, "see", "See C.")], "b.py": []}


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        pytest.param({"a.py": {"see": 2}}, [], id="as many"),
        pytest.param(
            {"a.py": {"see": 1}},
            ["a.py:3: see, 2 where 1 may be: See B.", "a.py:9: see, 2 where 1 may be: See C."],
            id="more",
        ),
        pytest.param({"a.py": {"see": 3}, "gone.py": {"long": 1}}, [], id="fewer"),
        pytest.param(
            {"a.py": {"long": 5}},
            ["a.py:3: see, 2 where 0 may be: See B.", "a.py:9: see, 2 where 0 may be: See C."],
            id="another kind",
        ),
    ],
)
def test_too_many(baseline: dict[str, dict[str, int]], expected: list[str]) -> None:
    assert too_many(FOUND, baseline) == expected


def test_baseline_is_only_lowered() -> None:
    baseline = {"a.py": {"see": 1, "long": 4}, "gone.py": {"long": 1}}
    assert lowered(FOUND, baseline) == {"a.py": {"see": 1}}
    assert lowered(FOUND, {}) == {}
    assert lowered(FOUND, {"a.py": {"see": 3}}) == {"a.py": {"see": 2}}


def test_docstrings_are_drawn_with_their_names_and_without_code() -> None:
    sources = {
        "a/b/__init__.py": '"""Module."""\n',
        "c.py": 'class Pod:\n    """One.\n\n    Two.\n    """\n    x = 3\n',
        "d.py": "",
    }
    every = ["a.b\n    Module.", "c.Pod\n    One.\n\n    Two."]
    assert sorted(drawn(sources, 40, seed=7)) == every
    assert drawn(sources, 1, seed=7) == drawn(sources, 1, seed=7)
    assert {drawn(sources, 1, seed)[0] for seed in range(20)} == set(every)
