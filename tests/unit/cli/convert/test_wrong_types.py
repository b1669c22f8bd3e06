"""Manifests with a wrong value somewhere: each ends with a job or with one sentence."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from regroup_cli.convert.documents import Options, convert, read_documents
from regroup_operator.api import SpecError
from tests.unit.cli.convert.golden import EXAMPLES, NAMES

WRONG: tuple[Any, ...] = ("text", "", 7, -1, True, None, [], {}, ["text"], [None], [{}], {"a": 1}, {"a": None})


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of each part of a value."""
    for key, part in list(
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from places(part)


def sentence(documents: list[Any]) -> str:
    """Return the sentence by which documents are refused, "" if they are converted. Any other error fails the test."""
    try:
        convert(documents, Options())
    except SpecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("sbatch")])
def test_wrong_values_are_one_sentence(name: str) -> None:
    text = (EXAMPLES / f"{name}.in.yaml").read_text()
    documents = copy.deepcopy(read_documents(text, name))  # without the anchors' shared parts
    for container, key in [place for document in documents for place in places(document) if place[1] != "kind"]:
        right = container[key]
        for wrong in WRONG:
            container[key] = wrong
            assert len(sentence(documents).splitlines()) <= 1, f"{key}: {wrong!r} in the place of {right!r}"
        container[key] = right
