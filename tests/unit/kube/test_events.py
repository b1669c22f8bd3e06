"""Events: repeats become a series, and a noisy job is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from regroup_operator.kube.client import ApiConflict, ApiNotFound, ApiUnavailable, Client
from regroup_operator.kube.events import EventBook, EventRecorder, Regarding, event_body
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
        pytest.param("x" * 5000, "x" * 1021 + "...", id="ASCII"),
        pytest.param("ä" * 1000, "ä" * 509 + "...", id="two bytes a character: fewer characters than bytes"),
        pytest.param("x" + "ä" * 1000, "x" + "ä" * 508 + "...", id="never half a character"),
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


class Api:
    """The API server's events. `lost`: how many creations from now on are stored without an answer."""

    def __init__(self, lost: int = 0) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.lost = lost

    async def create(self, _: object, __: str, body: Mapping[str, Any]) -> None:
        self.calls.append("create")
        name = body["metadata"]["name"]
        if name in self.events:
            raise ApiConflict(409, "AlreadyExists", f"{name} already exists.")
        self.events[name] = dict(body)
        if self.lost:
            self.lost -= 1
            raise ApiUnavailable(0, "Transport", "No answer.")

    async def patch(self, _: object, __: str, name: str, body: Mapping[str, Any]) -> None:
        self.calls.append("patch")
        if name not in self.events:
            raise ApiNotFound(404, "NotFound", f"{name} not found.")
        self.events[name] |= body

    def counts(self) -> list[int]:
        """What each event says of how often it has happened."""
        return [event.get("series", {"count": 1})["count"] for event in self.events.values()]


def happens(api: Api, times: int, recorder: EventRecorder | None = None) -> EventRecorder:
    """Record the same note so many times, each one sent before the next."""
    recorder = recorder or EventRecorder(cast(Client, api), "pod-1", clock=lambda: 0.0)

    async def scenario() -> None:
        for _ in range(times):
            recorder.record(JOB, LOST)
            await recorder.drain()

    asyncio.run(scenario())
    return recorder


@pytest.mark.parametrize(
    ("lost", "calls"),
    [
        pytest.param(0, ["create", "patch", "patch"], id="answered"),
        pytest.param(1, ["create", "create", "patch", "patch"], id="stored, and the answer was lost"),
    ],
)
def test_event_that_repeats_is_counted_also_if_the_answer_to_its_creation_was_lost(lost: int, calls: list[str]) -> None:
    api = Api(lost)
    happens(api, 3)
    assert (api.calls, api.counts()) == (calls, [3])


def test_event_that_has_expired_begins_anew_also_if_the_answer_to_that_was_lost() -> None:
    api = Api()
    recorder = happens(api, 2)
    api.events.clear()
    api.lost = 1
    happens(api, 2, recorder)
    assert (api.calls[2:], api.counts()) == (["patch", "create", "patch"], [4])
