"""Lines of several processes in one log: whole, each with its rank."""

from __future__ import annotations

import pytest

from _regroup_agent.lines import MAX_PARTIAL, Lines


@pytest.mark.parametrize(
    ("pieces", "want"),
    [
        pytest.param([b"one\ntwo\n"], b"> one\n> two\n", id="two lines at once"),
        pytest.param([b"on", b"e\ntw", b"o\n"], b"> one\n> two\n", id="in pieces"),
        pytest.param([b"one\n\nthree"], b"> one\n> \n> three\n", id="the last one without an end"),
        pytest.param([b" 10%\r 20%\r done\n"], b">  10%\r>  20%\r>  done\n", id="a progress bar"),
        pytest.param([b"one\r\ntwo\r\n"], b"> one\r\n> two\r\n", id="ends of two characters"),
        pytest.param([b""], b"", id="nothing"),
        pytest.param([b"caf\xc3", b"\xa9\n"], "> caf\u00e9\n".encode(), id="a character in two pieces"),
    ],
)
def test_each_line_has_its_label(pieces: list[bytes], want: bytes) -> None:
    lines = Lines()
    got = b"".join(lines.add(piece, b"> ") for piece in pieces)
    assert got + lines.end(b"> ") == want


def test_line_that_never_ends_is_not_held_for_ever() -> None:
    lines = Lines()
    assert lines.add(b"x" * MAX_PARTIAL, b"> ") == b""
    assert lines.add(b"x", b"> ") == b"> " + b"x" * (MAX_PARTIAL + 1) + b"\n"
    assert lines.end(b"> ") == b""
