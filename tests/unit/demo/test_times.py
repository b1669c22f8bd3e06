"""What the tour says of its own length, and what it allows a busy machine."""

import pytest

from demo.times import allowance, bounded, sentences

START = {"seconds": 40.0, "kind": "start"}
BUILD = {"seconds": 400.0, "kind": "build"}
DOWNLOAD = {"seconds": 60.0, "kind": "download"}


def test_downloads_are_told_apart_and_do_not_count_against_the_bound() -> None:
    assert sentences(239.0, [START, DOWNLOAD]) == ["239 s since the command was typed, 60 s of it downloads."]


def test_run_that_builds_may_take_longer() -> None:
    assert len(sentences(899.0, [START, BUILD])) == 1
    assert len(sentences(899.0, [START])) == 2


def test_too_long_is_a_note_with_the_bound() -> None:
    assert "at most 900 s" in sentences(961.0, [BUILD, DOWNLOAD])[1]
    assert "at most 180 s" in sentences(181.0, [START])[1]


@pytest.mark.parametrize(
    ("load", "cores", "factor", "words"),
    [
        pytest.param(0.5, 2, 1.0, "0.5 s", id="an idle machine"),
        pytest.param(8.0, 2, 1.0, "0.5 s", id="the tour's own work"),
        pytest.param(20.0, 2, 2.5, "1.25 s (0.5 s x 2.5: busy machine)", id="much other work"),
        pytest.param(20.0, 16, 1.0, "0.5 s", id="the same work on many cores"),
    ],
)
def test_bounds_are_wider_on_a_busy_machine_and_say_so(load: float, cores: int, factor: float, words: str) -> None:
    assert allowance(load, cores) == factor
    assert bounded(0.5, factor) == words
