"""What a candidate does with the lease that it sees."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from regroup_operator.kube.client import Client
from regroup_operator.kube.lease import Elector, LeaseTimes, ObservedLease, decide, look

ME, OTHER = "me", "other"


def sight(holder: str, since_s: float = 0.0, duration_s: float = 15.0) -> ObservedLease:
    return ObservedLease(holder, "7", duration_s, since_s)


@pytest.mark.parametrize(
    ("seen", "now_s", "want"),
    [
        pytest.param(None, 0.0, "create", id="no lease is created"),
        pytest.param(sight(ME), 0.0, "renew", id="ours is renewed"),
        pytest.param(sight(ME), 99.0, "renew", id="ours is renewed even when it ran out, by compare-and-swap"),
        pytest.param(sight(""), 0.0, "take", id="a released lease is taken at once"),
        pytest.param(sight(OTHER), 15.0, "wait", id="another's lease is respected for its whole duration"),
        pytest.param(sight(OTHER), 15.01, "take", id="another's lease that did not change for its duration is taken"),
        pytest.param(sight(OTHER, 10.0), 20.0, "wait", id="the duration counts from the last change seen"),
        pytest.param(sight(OTHER, duration_s=60), 20.0, "wait", id="the holder's own duration counts, not ours"),
    ],
)
def test_decide(seen: ObservedLease | None, now_s: float, want: str) -> None:
    assert decide(seen, ME, now_s) == want


def lease(version: str, holder: str | None = OTHER) -> dict[str, object]:
    return {"metadata": {"resourceVersion": version}, "spec": {"holderIdentity": holder, "leaseDurationSeconds": 3}}


def test_look_keeps_the_time_of_an_unchanged_lease_only() -> None:
    first = look(lease("1"), None, 10.0, 15)
    assert (first.unchanged_since_s, first.duration_s, first.holder) == (10.0, 3.0, OTHER)
    assert look(lease("1"), first, 12.0, 15).unchanged_since_s == 10.0
    assert look(lease("2"), first, 12.0, 15).unchanged_since_s == 12.0


def test_look_reads_a_lease_without_holder_as_released() -> None:
    assert look(lease("1", None), None, 0.0, 15).holder == ""
    bare = look({"metadata": {"resourceVersion": "1"}}, None, 0.0, 15)
    assert (bare.holder, bare.duration_s) == ("", 15.0)


class SlowApi:
    """The API server with a released lease, which it takes `read_s` seconds to show."""

    def __init__(self, read_s: float) -> None:
        self.now_s, self.read_s = 100.0, read_s
        self.left_s: list[float] = []
        """How long each request may take."""

    async def get(self, *_: object, timeout_s: float) -> dict[str, Any]:
        self.left_s.append(timeout_s)
        self.now_s += self.read_s
        return cast("dict[str, Any]", lease("1", None))

    async def replace(self, _: object, __: str, ___: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.left_s.append(timeout_s)
        return {"metadata": {"resourceVersion": "2"}, "spec": body["spec"]}


@pytest.mark.parametrize(
    ("read_s", "left_s"),
    [
        pytest.param(4.0, [6.0, 2.0], id="what is left of it"),
        pytest.param(6.0, [6.0, 0.1], id="all was spent"),
        pytest.param(6.9, [6.0, 0.1], id="more than all: time-outs are rounded up"),
    ],
)
def test_write_of_the_lease_has_a_deadline_however_long_the_read_took(read_s: float, left_s: list[float]) -> None:
    """Without one a candidate waits for as long as the API server does not answer, and nobody leads."""
    api = SlowApi(read_s)
    elector = Elector(
        cast(Client, api), "ns", "regroup", ME, LeaseTimes(8, 6.0, 2.0), clock=lambda: api.now_s, die=pytest.fail
    )

    async def scenario() -> None:
        await elector.acquire()
        await elector.release()

    asyncio.run(scenario())
    assert api.left_s[:2] == left_s
