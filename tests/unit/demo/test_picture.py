"""The picture of `make run` in the README."""

from __future__ import annotations

from demo.picture import chosen, drawn

LINES = [
    "$ regroup run --workers 3 manifests/samples/digits.py",
    "regroup: job in /tmp/x/job.json; resize it with: regroup scale /tmp/x N",
    "regroup: Normal Started: Generation 1: All 3 workers are ready.",
    "regroup: Running  3/3 ready  generation 1 (3 ranks)  step 0/1000  loss 2.3",
    "regroup: Running  3/3 ready  generation 1 (3 ranks)  step 120/1000  loss 0.3",
    "step 200  loss 0.0874  generation 1  ranks 3",
    ">>> kill -9 11: the process of local-worker-1-0, one of 3",
    "regroup: Running  2/3 ready  generation 2 (2 ranks)  step 313/1000  loss 0.1",
    "What happened",
    "  0.12 s later the others had committed the next step.",
]


def test_each_state_is_there_once_and_events_always() -> None:
    assert list(chosen(LINES)) == [line for number, line in enumerate(LINES) if number not in (1, 4)]


def test_picture_names_no_other_host_and_has_the_lines() -> None:
    svg = drawn(list(chosen(LINES)))
    assert "http" not in svg.replace("http://www.w3.org/", "")
    assert "the&#160;process&#160;of&#160;local-worker-1-0" in svg
