"""Events: repeats become a series, and a noisy job is bounded."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.kube.events import EventBook, Regarding, event_body
from regroup_operator.model.bucket import TokenBucket
from regroup_operator.model.ports import EventNote

JOB = Regarding("team", "digits", "job-uid", "17")
LOST = EventNote("Warning", "WorkerLost", "Worker 2 is gone.")
AT = "2025-11-21T13:00:00.000000Z"


def test_first_note_is_a_new_event_about_the_job() -> None:
    series = EventBook().note(JOB, LOST, 0.0, AT)
    assert series is not None
    body: dict[str, Any] = series.body
    assert series.count == 1
    assert body["regarding"]["uid"] == "job-uid"
    assert (body["type"], body["reason"], body["note"]) == ("Warning", "WorkerLost", "Worker 2 is gone.")
    assert body["metadata"]["name"].startswith("digits.")
    assert body["action"]


def test_note_that_repeats_raises_the_count_of_the_same_event() -> None:
    book = EventBook()
    first = book.note(JOB, LOST, 0.0, AT)
    assert first is not None
    assert book.note(JOB, LOST, 1.0, AT) is None, "it waits to be sent already"
    first.queued = False
    again = book.note(JOB, LOST, 2.0, AT)
    assert again is first
    assert again.count == 3


def test_another_text_or_a_long_pause_is_another_event() -> None:
    book = EventBook(window_s=60)
    first = book.note(JOB, LOST, 0.0, AT)
    other = book.note(JOB, EventNote("Warning", "WorkerLost", "Worker 3 is gone."), 0.0, AT)
    later = book.note(JOB, LOST, 61.0, AT)
    assert first is not None
    assert other is not None
    assert later is not None
    assert len({first.name, other.name, later.name}) == 3
    assert later.count == 1


def test_noisy_job_is_bounded_and_recovers_slowly() -> None:
    book = EventBook(per_s=0.1, burst=3)
    notes = [EventNote("Normal", "Resized", f"Size {n}.") for n in range(10)]
    assert sum(book.note(JOB, note, 0.0, AT) is not None for note in notes) == 3
    assert book.note(JOB, notes[5], 9.0, AT) is None
    assert book.note(JOB, notes[5], 11.0, AT) is not None


def test_dropped_note_is_not_a_series_later() -> None:
    book = EventBook(per_s=1, burst=1)
    assert book.note(JOB, LOST, 0.0, AT) is not None
    other = EventNote("Normal", "Resized", "Size 3.")
    assert book.note(JOB, other, 0.0, AT) is None
    series = book.note(JOB, other, 2.0, AT)
    assert series is not None
    assert series.count == 1


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param("x" * 5000, "x" * 1024, id="ASCII"),
        pytest.param("ä" * 1000, "ä" * 512, id="two bytes a character: fewer characters than bytes"),
        pytest.param("x" + "ä" * 1000, "x" + "ä" * 511, id="never half a character"),
        pytest.param("数据" * 170 + "xxxx", "数据" * 170 + "xxxx", id="what fits is whole"),
        pytest.param("lost: \ud800", "lost: ?", id="half a pair of UTF-16, as JSON may have it"),
    ],
)
def test_long_note_is_cut_to_the_bytes_that_the_api_server_takes(text: str, kept: str) -> None:
    body = event_body(JOB, EventNote("Normal", "Resized", text), "digits.1", AT)
    assert body["note"] == kept
    assert len(kept.encode()) <= 1024


def test_long_reason_is_cut_to_what_the_api_server_takes_of_a_word() -> None:
    body = event_body(JOB, EventNote("Normal", "Größe" * 100, "Size 3."), "digits.1", AT)
    assert {len(body[key].encode()) for key in ("reason", "action")} == {128}


def test_bucket_refills_to_its_burst_only() -> None:
    bucket = TokenBucket(per_s=1, burst=2)
    assert [bucket.take(0.0) for _ in range(3)] == [True, True, False]
    assert [bucket.take(100.0) for _ in range(3)] == [True, True, False]
