"""What open browsers cost the API server, and what they see while it does not answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from regroup_cli.page import cache
from regroup_cli.page.cache import Cache, Kept
from regroup_client.errors import ApiError, ClientError, JobError
from regroup_client.log_streams import LogsError

AWAY = ApiError(0, "NoAnswer", "The API server gave no answer.")
FORBIDDEN = ApiError(403, "Forbidden", "You may not.")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Api:
    """Answers with numbers, or with an error."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self) -> int:
        self.asked += 1
        self.may_answer.wait(30)
        if self.error is not None:
            raise self.error
        return self.asked


def in_loop(test: Callable[[Cache, Clock, Api], Awaitable[None]]) -> None:
    async def run() -> None:
        clock, api = Clock(), Api()
        kept = Cache(clock, lambda: "12:00:00")
        try:
            await test(kept, clock, api)
        finally:
            api.may_answer.set()
            kept.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("took_s", "failed", "want"),
    [
        pytest.param(0.01, False, cache.FRESH_S, id="a quick answer"),
        pytest.param(2.0, False, 8.0, id="a slow answer is asked for less often"),
        pytest.param(0.01, True, cache.RETRY_S, id="a failure"),
        pytest.param(900.0, True, cache.MAX_REST_S, id="never rarer than that"),
    ],
)
def test_rest(took_s: float, failed: bool, want: float) -> None:
    assert cache.rest_s(took_s, failed=failed) == want


@pytest.mark.parametrize(
    ("value", "want"),
    [
        pytest.param(2, Kept(2, "now"), id="the new value"),
        pytest.param(AWAY, Kept(1, "before", str(AWAY)), id="no answer: the last value stays"),
        pytest.param(LogsError("A log."), Kept(1, "before", "A log."), id="a log cannot be read now"),
        pytest.param(FORBIDDEN, Kept(trouble="You may not.", is_refused=True), id="refused: the value is forgotten"),
        pytest.param(JobError("No job."), Kept(trouble="No job.", is_refused=True), id="no such job"),
    ],
)
def test_what_is_known_after_a_reading(value: Any, want: Kept) -> None:
    assert cache.after(Kept(1, "before"), value, "now") == want


def test_many_who_ask_are_one_reading() -> None:
    async def test(kept: Cache, clock: Clock, api: Api) -> None:
        for second in range(100):
            clock.now_s = second / 10
            found = await asyncio.gather(*(kept.get("jobs", api) for _ in range(20)))
            assert len(set(found)) == 1
        assert api.asked == 5  # 10 s, one every 2 s

    in_loop(test)


def test_nobody_asks_nothing_is_read() -> None:
    async def test(kept: Cache, clock: Clock, api: Api) -> None:
        assert (await kept.get("jobs", api)).value == 1
        clock.now_s = 3600
        await asyncio.sleep(0)
        assert api.asked == 1
        assert (await kept.get("jobs", api)).value == 2

    in_loop(test)


def test_the_last_value_stays_while_the_api_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "NEXT_WAIT_S", 0.01)

    async def test(kept: Cache, clock: Clock, api: Api) -> None:
        await kept.get("jobs", api)
        clock.now_s, api.error = 10, AWAY
        assert await kept.get("jobs", api) == Kept(1, "12:00:00", str(AWAY))
        clock.now_s = 20
        api.may_answer.clear()  # it hangs now
        assert await kept.get("jobs", api) == Kept(1, "12:00:00", str(AWAY))
        assert await kept.get("jobs", api) == Kept(1, "12:00:00", str(AWAY))
        assert api.asked == 3
        api.error = None
        reading = kept._entries["jobs"].reading
        assert reading is not None
        api.may_answer.set()
        await reading
        assert await kept.get("jobs", api) == Kept(3, "12:00:00")

    in_loop(test)


def test_the_first_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FIRST_WAIT_S", 0.01)

    async def test(kept: Cache, clock: Clock, api: Api) -> None:  # noqa: ARG001
        api.may_answer.clear()
        assert (await kept.get("jobs", api)).trouble == "There is no answer yet."

    in_loop(test)


def test_a_bug_is_shown_and_does_not_end_the_page() -> None:
    async def test(kept: Cache, clock: Clock, api: Api) -> None:
        api.error = KeyError("status")
        assert "KeyError" in (await kept.get("jobs", api)).trouble
        clock.now_s, api.error = 10, None
        assert (await kept.get("jobs", api)).value == 2

    in_loop(test)


def test_what_nobody_asks_for_is_forgotten() -> None:
    async def test(kept: Cache, clock: Clock, api: Api) -> None:  # noqa: ARG001
        for number in range(cache.MAX_KEPT + 10):
            await kept.get(number, api)
        assert len(kept._entries) == cache.MAX_KEPT
        assert 0 not in kept._entries

    in_loop(test)


def test_what_is_being_read_is_not_forgotten_and_no_more_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FIRST_WAIT_S", 0.01)

    async def test(kept: Cache, clock: Clock, api: Api) -> None:  # noqa: ARG001
        api.may_answer.clear()
        for _ in range(2):
            await asyncio.gather(*(kept.get(number, api) for number in range(cache.MAX_KEPT)))
        assert (await kept.get("one more", api)).trouble == "Too many things are read at once."
        assert len(kept._entries) == cache.MAX_KEPT
        readings = [entry.reading for entry in kept._entries.values() if entry.reading is not None]
        api.may_answer.set()
        await asyncio.gather(*readings)
        assert api.asked == cache.MAX_KEPT
        assert (await kept.get("one more", api)).value is not None

    in_loop(test)


def test_an_old_value_is_called_old_while_the_next_one_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "NEXT_WAIT_S", 0.01)

    async def test(kept: Cache, clock: Clock, api: Api) -> None:
        await kept.get("jobs", api)
        api.may_answer.clear()
        clock.now_s = 3
        assert await kept.get("jobs", api) == Kept(1, "12:00:00")
        clock.now_s = 6
        assert await kept.get("jobs", api) == Kept(1, "12:00:00", "There is no newer answer yet.")

    in_loop(test)


def test_logs_that_hang_leave_readers_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FIRST_WAIT_S", 0.01)

    async def test(kept: Cache, clock: Clock, api: Api) -> None:  # noqa: ARG001
        api.may_answer.clear()
        await asyncio.gather(*(kept.get(number, api, is_long=True) for number in range(8)))
        assert api.asked == cache.MAX_LONG
        monkeypatch.setattr(cache, "FIRST_WAIT_S", 10.0)
        assert (await kept.get("jobs", lambda: "a list")).value == "a list"

    in_loop(test)


def test_nothing_is_begun_after_the_end() -> None:
    async def test(kept: Cache, clock: Clock, api: Api) -> None:  # noqa: ARG001
        waits = asyncio.gather(*(kept.get(number, api) for number in range(cache.MAX_READERS + 1)))
        api.may_answer.clear()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        kept.close()
        api.may_answer.set()
        await waits
        assert api.asked <= cache.MAX_READERS

    in_loop(test)


HANGS = """\
import asyncio, threading
from regroup_cli.page import cache

cache.FIRST_WAIT_S = 0.01

async def run():
    kept = cache.Cache()
    print((await kept.get("jobs", threading.Event().wait)).trouble)
    kept.close()

asyncio.run(run())
"""


def test_the_end_of_the_process_waits_for_no_reading() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "There is no answer yet.\n", "")


def test_errors_of_the_client_are_sentences() -> None:
    assert not cache.is_final(ClientError("x"))
    assert cache.is_final(ApiError(404, "NotFound", "x"))
    assert cache.is_final(LogsError("x", is_final=True))
