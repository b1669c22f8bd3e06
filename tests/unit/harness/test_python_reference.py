"""The page on the Python client is what its signatures and docstrings say."""

from __future__ import annotations

from pathlib import Path

import regroup_client
from harness.python_reference import python_page

PAGE = Path(__file__).parents[3] / "docs/reference/python.md"


def test_page_of_the_python_client_is_current() -> None:
    assert PAGE.read_text() == python_page(), "run `make generate`"


def test_page_has_every_name() -> None:
    page = python_page()
    assert [name for name in regroup_client.__all__ if f"## {name}\n" not in page and f"| `{name}` |" not in page] == []
    assert "### Client()\n" in page
    assert "Client.local() -> Client" in page
    assert "| `loss` | `float \\| None` | Loss of this step. |" in page
