"""What `bench.quotas` makes of its steps."""

from __future__ import annotations

from typing import Any

from bench.quotas import SETTLE, summary


def steps(ms: float, shares: list[int], count: int) -> list[dict[str, Any]]:
    return [{"ms": ms, "shares": shares}] * count


def test_steps_after_the_deal_has_settled_are_compared() -> None:
    equal = steps(999.0, [7, 7, 7, 7], SETTLE) + steps(280.0, [7, 7, 7, 7], 10)
    uneven = steps(280.0, [7, 7, 7, 7], 20) + steps(175.0, [8, 8, 8, 4], SETTLE - 20 + 10)
    found = summary({"equal": equal, "uneven": uneven})
    assert found["equal"] == {"ms": 280.0, "shares": [7, 7, 7, 7], "steps": 10}
    assert found["uneven"] == {"ms": 175.0, "shares": [8, 8, 8, 4], "steps": 10, "changes": 1, "settled": 21}
    assert found["gain"] == 1.6


def test_deal_that_never_changed_says_so() -> None:
    same = steps(280.0, [7, 7, 7, 7], SETTLE + 10)
    assert summary({"equal": same, "uneven": same})["uneven"]["settled"] is None
