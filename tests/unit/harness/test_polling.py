"""The one helper that waits: what it returns, and what it says of what never came."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from harness.polling import TimedOutError, until, until_async, within


def test_first_true_value_is_returned() -> None:
    values: Iterator[str] = iter(["", "", "there"])
    assert until(lambda: next(values), "a word", every_s=0.0) == "there"


def test_condition_is_asked_once_even_without_any_time() -> None:
    assert until(lambda: 7, "a number", timeout_s=-1.0) == 7


def test_deadline_names_what_did_not_come_with_the_details_and_the_last_exception() -> None:
    def refused() -> bool:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(TimedOutError) as caught:
        until(refused, "the port is open", timeout_s=0.01, every_s=0.0, details=lambda: "the log", passing=OSError)
    assert str(caught.value) == "Not within 0.01 s: the port is open (nobody listens)\nthe log"
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_exception_that_is_not_expected_ends_the_wait() -> None:
    def broken() -> bool:
        raise KeyError("status")

    with pytest.raises(KeyError):
        until(broken, "a status", passing=OSError)


def test_caller_chooses_the_exception() -> None:
    with pytest.raises(RuntimeError, match=r"Not within 0 s: an end"):
        until(lambda: False, "an end", timeout_s=0, every_s=0.0, error=RuntimeError)


def test_wait_that_may_end_without_what_was_waited_for_says_so() -> None:
    values: Iterator[str] = iter(["", "", "there"])
    assert within(lambda: next(values), 5, every_s=0.0)
    assert not within(lambda: False, 0.01, every_s=0.0)
    assert within(lambda: True, -1.0), "it is asked once even without any time"


def test_event_loop_goes_on_meanwhile() -> None:
    async def scene() -> int:
        seen: list[int] = []
        asyncio.get_running_loop().call_soon(seen.append, 3)
        return (await until_async(lambda: seen, "a number", timeout_s=5))[0]

    assert asyncio.run(scene()) == 3
    with pytest.raises(TimedOutError, match="Not within 0 s: a word"):
        asyncio.run(until_async(lambda: "", "a word", timeout_s=0))
