"""Who gets in with which token, and when the API server is asked at all."""

from __future__ import annotations

import asyncio
import base64
import heapq
import itertools
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from regroup_operator.api import UnavailableError
from regroup_operator.kube.authenticator import ClusterAuthenticator, admission_s
from regroup_operator.model.bucket import TokenBucket
from regroup_operator.model.ports import Forbidden, Unauthorized
from regroup_operator.model.records import Pod

NOW = 1_000_000.0
POD = Pod("team", "digits-worker-0-0", "pod-uid", "digits", "job-uid", 0, 0)


class Pods:
    """The informer's memory."""

    def pod(self, namespace: str, name: str) -> Pod | None:
        return POD if (namespace, name) == (POD.namespace, POD.name) else None


class Reviewer:
    """The API server: what it says of any token, and how often it was asked."""

    def __init__(self, **status: Any) -> None:
        self.asked = 0
        self.status: dict[str, Any] = {
            "authenticated": True,
            "audiences": ["regroup"],
            "user": {"extra": {"authentication.kubernetes.io/pod-uid": ["pod-uid"]}},
            **status,
        }

    async def review(self, token: str, audience: str) -> Mapping[str, Any]:
        assert (token.count("."), audience) == (2, "regroup")
        self.asked += 1
        return self.status


def jwt(**changes: Any) -> str:
    """A projected token as the API server makes them, with a signature that nobody checked yet."""
    claims: dict[str, Any] = {
        "aud": ["regroup"],
        "exp": NOW + 3600,
        "iss": "https://kubernetes.default.svc",
        "kubernetes.io": {
            "namespace": "team",
            "pod": {"name": "digits-worker-0-0", "uid": "pod-uid"},
            "serviceaccount": {"name": "default", "uid": "sa-uid"},
        },
        "sub": "system:serviceaccount:team:default",
    } | changes

    def part(data: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(data).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'RS256'})}.{part(claims)}.c2ln"


def bound(**pod: Any) -> dict[str, Any]:
    return {"namespace": "team", "pod": {"name": "digits-worker-0-0", "uid": "pod-uid", **pod}}


def authenticate(reviewer: Reviewer, token: str, name: str = POD.name, **kwargs: Any) -> Pod:
    return asyncio.run(
        ClusterAuthenticator(Pods(), reviewer, wall_clock=lambda: NOW, **kwargs).authenticate(token, "team", name)
    )


def test_pod_with_its_own_token_gets_in() -> None:
    reviewer = Reviewer()
    assert authenticate(reviewer, jwt()) is POD
    assert reviewer.asked == 1


@pytest.mark.parametrize(
    ("token", "name", "error", "sentence"),
    [
        pytest.param("nonsense", POD.name, Unauthorized, "not a projected", id="not a token"),
        pytest.param("a.b.c", POD.name, Unauthorized, "not a projected", id="not base64 JSON"),
        pytest.param("e30.W10.c2ln", POD.name, Unauthorized, "not a projected", id="claims that are a list"),
        pytest.param(jwt(**{"kubernetes.io": {"namespace": "team"}}), POD.name, Unauthorized, "not a projected", id="unbound"),
        pytest.param(jwt(exp="never"), POD.name, Unauthorized, "not a projected", id="no time of expiry"),
        pytest.param(jwt(aud=["other"]), POD.name, Unauthorized, "for other, not for regroup", id="another audience"),
        pytest.param(jwt(exp=NOW - 5), POD.name, Unauthorized, "expired 5 s ago", id="expired"),
        pytest.param(jwt(), "digits-worker-1-0", Forbidden, "bound to pod team/digits-worker-0-0", id="another pod's path"),
        pytest.param(
            jwt(**{"kubernetes.io": bound(name="digits-worker-1-0")}), "digits-worker-1-0", Forbidden, "not yet, known",
            id="a pod that is no worker",
        ),
        pytest.param(
            jwt(**{"kubernetes.io": bound(uid="old-uid")}), POD.name, Forbidden, "earlier pod", id="an earlier pod of the name"
        ),
    ],
)  # fmt: skip
def test_wrong_token_is_refused_without_asking(token: str, name: str, error: type[Exception], sentence: str) -> None:
    reviewer = Reviewer()
    with pytest.raises(error, match=sentence):
        authenticate(reviewer, token, name)
    assert reviewer.asked == 0


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        pytest.param({"authenticated": False, "error": "bad signature"}, "bad signature", id="a forged token"),
        pytest.param({"audiences": ["other"]}, "audience regroup", id="not for us after all"),
        pytest.param({"user": {"extra": {}}}, "another pod", id="not bound after all"),
        pytest.param(
            {"user": {"extra": {"authentication.kubernetes.io/pod-uid": ["other"]}}},
            "another pod",
            id="another pod's",
        ),
    ],
)
def test_api_servers_word_is_the_last(status: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Unauthorized, match=sentence):
        authenticate(Reviewer(**status), jwt())


def test_one_review_serves_a_token_until_it_expires() -> None:
    async def scenario() -> None:
        now = NOW
        reviewer = Reviewer()
        subject = ClusterAuthenticator(Pods(), reviewer, wall_clock=lambda: now)
        token = jwt(exp=NOW + 100)
        for _ in range(3):
            await subject.authenticate(token, "team", POD.name)
        assert reviewer.asked == 1
        await subject.authenticate(jwt(exp=NOW + 200), "team", POD.name)
        assert reviewer.asked == 2
        now = NOW + 101
        with pytest.raises(Unauthorized, match="expired"):
            await subject.authenticate(token, "team", POD.name)
        assert reviewer.asked == 2

    asyncio.run(scenario())


def test_refusal_is_remembered_for_a_while_only() -> None:
    async def scenario() -> None:
        now = NOW
        reviewer = Reviewer(authenticated=False)
        subject = ClusterAuthenticator(Pods(), reviewer, wall_clock=lambda: now)
        for _ in range(2):
            with pytest.raises(Unauthorized):
                await subject.authenticate(jwt(), "team", POD.name)
        assert reviewer.asked == 1
        now = NOW + 61
        reviewer.status["authenticated"] = True
        assert await subject.authenticate(jwt(), "team", POD.name) is POD

    asyncio.run(scenario())


class Time:
    """A clock that stands still while anybody has something to do, and then goes to the next waker."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._wakers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ids = itertools.count()

    async def sleep(self, seconds: float) -> None:
        waker = asyncio.get_running_loop().create_future()
        heapq.heappush(self._wakers, (self.now_s + seconds, next(self._ids), waker))
        await waker

    async def run(self, *tasks: asyncio.Task[None]) -> None:
        """Let time pass until the tasks are done."""
        while not all(task.done() for task in tasks):
            for _ in range(10):
                await asyncio.sleep(0)
            if self._wakers and not all(task.done() for task in tasks):
                self.now_s, _, waker = heapq.heappop(self._wakers)
                waker.set_result(None)
        for task in tasks:
            task.result()


class ManyPods:
    def pod(self, namespace: str, name: str) -> Pod | None:  # noqa: ARG002
        slot = int(name.split("-")[2])
        return Pod("team", name, f"uid{slot}", "digits", "job-uid", slot, 0)


class ManyReviewer(Reviewer):
    """Every token is its pod's own, unless it says so itself."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self.time, self.asked_at_s = time, list[float]()

    async def review(self, token: str, audience: str) -> Mapping[str, Any]:  # noqa: ARG002
        self.asked_at_s.append(self.time.now_s)
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        uid = claims["kubernetes.io"]["pod"]["uid"] if "stolen" not in claims else "uid-of-another"
        return self.status | {"user": {"extra": {"authentication.kubernetes.io/pod-uid": [uid]}}}


def token_of(slot: int, **claims: Any) -> str:
    pod = {"name": f"digits-worker-{slot}-0", "uid": f"uid{slot}"}
    return jwt(**{"kubernetes.io": {"namespace": "team", "pod": pod}}, **claims)


def many(time: Time, **kwargs: Any) -> tuple[ClusterAuthenticator, ManyReviewer]:
    reviewer = ManyReviewer(time)
    subject = ClusterAuthenticator(
        ManyPods(), reviewer, clock=lambda: time.now_s, wall_clock=lambda: NOW + time.now_s, sleep=time.sleep, **kwargs
    )
    return subject, reviewer


def test_of_4000_agents_that_call_within_a_second_all_are_admitted_within_30_s_and_count_as_alive_until_then() -> None:
    async def scenario() -> None:
        time, rng = Time(), random.Random(1)
        subject, reviewer = many(time)
        admitted: dict[int, float] = {}
        longest_s = num_refused = 0.0

        async def agent(slot: int) -> None:
            nonlocal longest_s, num_refused
            await time.sleep(rng.random())
            while True:
                called_s = time.now_s
                try:
                    await subject.authenticate(token_of(slot), "team", f"digits-worker-{slot}-0")
                except UnavailableError:
                    num_refused += 1
                    assert f"uid{slot}" in subject.waiting()
                    longest_s = max(longest_s, time.now_s - called_s)
                    await time.sleep(rng.uniform(0.5, 2.0))
                else:
                    admitted[slot] = time.now_s
                    longest_s = max(longest_s, time.now_s - called_s)
                    return

        await time.run(*(asyncio.ensure_future(agent(slot)) for slot in range(4000)))
        assert max(admitted.values()) <= min(30.0, admission_s(4000))
        assert longest_s < 10.0, "an agent gives an answer up after 10 s"
        assert num_refused < 2 * 4000, "each call costs a TLS handshake"
        assert len(reviewer.asked_at_s) == 4000
        for count, at_s in enumerate(sorted(reviewer.asked_at_s), 1):
            assert count <= 500 + 200 * at_s + 1
        assert subject.waiting() == frozenset()

    asyncio.run(scenario())


def test_who_is_turned_away_keeps_its_place_for_a_while() -> None:
    async def scenario() -> None:
        time = Time()
        subject, _ = many(time, bucket=TokenBucket(0.1, 1))  # one review in ten seconds

        async def call(slot: int) -> None:
            await subject.authenticate(token_of(slot), "team", f"digits-worker-{slot}-0")

        async def story() -> None:
            await call(0)
            with pytest.raises(
                UnavailableError, match="1 agents wait to be admitted; the turn of this one comes in 2 s"
            ):
                await call(1)
            assert (time.now_s, subject.waiting()) == (8.0, frozenset({"uid1"}))
            await time.sleep(1.0)
            await call(1)
            assert (time.now_s, subject.waiting()) == (10.0, frozenset())
            with pytest.raises(UnavailableError):
                await call(2)  # its turn would come at 20 s
            await time.sleep(20.0)
            assert subject.waiting() == frozenset(), "it came no more"
            await call(3)
            assert list(subject._places) == []

        await time.run(asyncio.ensure_future(story()))

    asyncio.run(scenario())


def test_requests_with_one_token_share_its_review_and_a_stolen_one_is_refused() -> None:
    async def scenario() -> None:
        time = Time()
        subject, reviewer = many(time)

        async def call(token: str) -> None:
            await subject.authenticate(token, "team", "digits-worker-7-0")

        await time.run(*(asyncio.ensure_future(call(token_of(7))) for _ in range(20)))
        assert len(reviewer.asked_at_s) == 1
        with pytest.raises(Unauthorized, match="belongs to another pod"):
            await call(token_of(7, stolen=True))
        with pytest.raises(Forbidden, match="is bound to pod team/digits-worker-8-0"):
            await call(token_of(8))

    asyncio.run(scenario())


@pytest.mark.parametrize(("num_agents", "want"), [(0, 0.0), (500, 0.0), (4000, 25.5), (10_000, 55.5)])
def test_time_until_all_can_have_been_admitted(num_agents: int, want: float) -> None:
    assert admission_s(num_agents) == want
