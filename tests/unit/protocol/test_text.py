"""Texts that are cut say so, and do not end in the middle of a word."""

from __future__ import annotations

import pytest

from regroup.protocol.text import shorten

NCCL = "NCCL error in: NCCLUtils.cpp:94, invalid usage, ncclInvalidUsage: This usually reflects invalid usage of NCCL library."


@pytest.mark.parametrize(
    ("text", "length", "want"),
    [
        pytest.param("two words", 9, "two words", id="it fits"),
        pytest.param("", 5, "", id="empty"),
        pytest.param(NCCL, 80, "NCCL error in: NCCLUtils.cpp:94, invalid usage, ncclInvalidUsage: This...", id="at a word"),
        pytest.param("one, two and three", 12, "one, two...", id="a word may end exactly there"),
        pytest.param("one line\nand the next line", 14, "one line...", id="at a line"),
        pytest.param("x" * 30, 10, "xxxxxxx...", id="a word that is too long is cut"),
        pytest.param("at " + "x" * 30, 12, "at xxxxxx...", id="so is one that would take most of the room"),
    ],
)  # fmt: skip
def test_shorten(text: str, length: int, want: str) -> None:
    assert shorten(text, length) == want


def test_shortened_text_has_the_length() -> None:
    for length in range(3, len(NCCL) + 2):
        got = shorten(NCCL, length)
        assert len(got) <= length
        assert got == NCCL or got.endswith("...")
