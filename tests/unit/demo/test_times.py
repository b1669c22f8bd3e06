"""What the tour says of its own length."""

from demo.times import sentences

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
