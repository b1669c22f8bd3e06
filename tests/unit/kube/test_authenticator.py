"""Who gets in with which token, and when the API server is asked at all."""

from __future__ import annotations

import asyncio
import base64
import heapq
import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from regroup_operator.api import RegroupError, UnavailableError
from regroup_operator.kube.authenticator import ClusterAuthenticator, review_s
from regroup_operator.kube.issuer_keys import IssuerKeys, KeyCache, keys_of
from regroup_operator.model.bucket import TokenBucket
from regroup_operator.model.ports import Forbidden, Unauthorized
from regroup_operator.model.records import Pod
from tests.unit.kube.issuer import NOW, Key, bound, documents, key
from tests.unit.kube.issuer import unverified as jwt

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


class Served:
    """The keys that the API server serves, and how often it was asked for them."""

    def __init__(self, *keys: Key) -> None:
        self.keys, self.asked = keys, 0

    async def fetch(self) -> IssuerKeys:
        self.asked += 1
        await asyncio.sleep(0)
        if not self.keys:
            raise RegroupError("No keys are served.")
        return keys_of(*documents(*self.keys))


def cache_of(*keys: Key) -> KeyCache:
    return KeyCache(Served(*keys).fetch)


def authenticate(reviewer: Reviewer, token: str, name: str = POD.name, keys: tuple[Key, ...] = ()) -> Pod:
    async def call() -> Pod:
        subject = ClusterAuthenticator(Pods(), cache_of(*keys), reviewer, wall_clock=lambda: NOW)
        return await subject.authenticate(token, "team", name)

    return asyncio.run(call())


def test_pod_with_its_own_token_gets_in() -> None:
    reviewer = Reviewer()
    assert authenticate(reviewer, jwt()) is POD
    assert reviewer.asked == 1


def test_pod_is_known_until_it_is_gone_or_another_one_has_its_name() -> None:
    subject = ClusterAuthenticator(Pods(), cache_of(), Reviewer())
    assert subject.known(replace(POD, ip="10.0.0.9")) is POD, "as it is now"
    for gone in (replace(POD, uid="old-uid"), replace(POD, name="digits-worker-1-0"), replace(POD, namespace="other")):
        with pytest.raises(Forbidden, match="is gone"):
            subject.known(gone)


@pytest.mark.parametrize(
    ("token", "name", "error", "sentence"),
    [
        pytest.param("nonsense", POD.name, Unauthorized, "not a projected", id="not a token"),
        pytest.param("a.b.c", POD.name, Unauthorized, "not a projected", id="not base64 JSON"),
        pytest.param("e30.W10.c2ln", POD.name, Unauthorized, "not a projected", id="claims that are a list"),
        pytest.param(jwt(**{"kubernetes.io": {"namespace": "team"}}), POD.name, Unauthorized, "not a projected", id="unbound"),
        pytest.param(jwt(exp="never"), POD.name, Unauthorized, "not a projected", id="no time of expiry"),
        pytest.param(key().token(aud=["other"]), POD.name, Unauthorized, "for other, not for regroup", id="another audience"),
        pytest.param(jwt(exp=NOW - 5), POD.name, Unauthorized, "expired 5 s ago", id="expired"),
        pytest.param(key().token(exp=NOW - 5), POD.name, Unauthorized, "expired 5 s ago", id="genuine and expired"),
        pytest.param(jwt() + "\udce9", POD.name, Unauthorized, "not a projected", id="bytes that are no text"),
        pytest.param(jwt() + "\u00e9", POD.name, Unauthorized, "not a projected", id="letters that no token has"),
        pytest.param(jwt(nbf="never"), POD.name, Unauthorized, "not a projected", id="no time of beginning"),
        pytest.param(jwt(), "digits-worker-1-0", Forbidden, "bound to pod team/digits-worker-0-0", id="another pod's path"),
        pytest.param(
            key().token(**{"kubernetes.io": bound(name="digits-worker-1-0")}), "digits-worker-1-0", Forbidden, "not yet, known",
            id="a pod that is no worker",
        ),
        pytest.param(
            key().token(**{"kubernetes.io": bound(uid="old-uid")}), POD.name, Forbidden, "earlier pod",
            id="an earlier pod of the name",
        ),
    ],
)  # fmt: skip
def test_wrong_token_is_refused_without_asking(token: str, name: str, error: type[Exception], sentence: str) -> None:
    reviewer = Reviewer()
    with pytest.raises(error, match=sentence):
        authenticate(reviewer, token, name, keys=(key(),))
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


@pytest.mark.parametrize(
    "keys", [pytest.param((), id="no keys are served"), pytest.param((key(),), id="another key is served")]
)
def test_one_review_serves_a_token_until_it_expires(keys: tuple[Key, ...]) -> None:
    async def scenario() -> None:
        now = NOW
        reviewer = Reviewer()
        subject = ClusterAuthenticator(Pods(), cache_of(*keys), reviewer, wall_clock=lambda: now)
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
        subject = ClusterAuthenticator(Pods(), cache_of(), reviewer, wall_clock=lambda: now)
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
        ManyPods(),
        cache_of(),
        reviewer,
        clock=lambda: time.now_s,
        wall_clock=lambda: NOW + time.now_s,
        sleep=time.sleep,
        **kwargs,
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
        assert max(admitted.values()) <= min(30.0, subject.admission_s(4000))
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
def test_time_until_all_can_have_been_reviewed(num_agents: int, want: float) -> None:
    assert review_s(num_agents) == want


def test_token_that_a_key_proves_costs_no_review() -> None:
    reviewer = Reviewer(authenticated=False)
    assert authenticate(reviewer, key().token(), keys=(key(),)) is POD
    assert reviewer.asked == 0


@pytest.mark.parametrize("token", [key("ES256", "key-1", 1).token(), key().unsigned(), key().by_hmac()])
def test_forged_token_is_refused_although_the_api_server_is_not_asked(token: str) -> None:
    reviewer = Reviewer()
    with pytest.raises(Unauthorized, match="is not that of key key-1"):
        authenticate(reviewer, token, keys=(key(),))
    assert reviewer.asked == 0


@pytest.mark.parametrize(
    ("token", "keys"),
    [
        pytest.param(key().token(), (), id="no keys are served"),
        pytest.param(key().token(), (key(key_id="key-2"),), id="the key is not among them"),
        pytest.param(key().token(iss="https://other"), (key(),), id="another issuer"),
    ],
)
@pytest.mark.parametrize("genuine", [True, False])
def test_what_keys_cannot_decide_the_api_server_does(token: str, keys: tuple[Key, ...], genuine: bool) -> None:
    reviewer = Reviewer(authenticated=genuine)
    if genuine:
        assert authenticate(reviewer, token, keys=keys) is POD
    else:
        with pytest.raises(Unauthorized, match="The API server does not accept the token"):
            authenticate(reviewer, token, keys=keys)
    assert reviewer.asked == 1


@pytest.mark.parametrize(
    ("keys", "reviews"),
    [
        pytest.param((key(), key(key_id="key-2")), 0, id="found"),
        pytest.param((key(),), 100, id="not found"),
        pytest.param((), 100, id="no keys are served any more"),
    ],
)
def test_100_tokens_of_a_new_key_cost_one_fetch(keys: tuple[Key, ...], reviews: int) -> None:
    async def scenario() -> None:
        served, reviewer, clock_s = Served(key()), Reviewer(), [0.0]
        cache = KeyCache(served.fetch, clock=lambda: clock_s[0])
        subject = ClusterAuthenticator(Pods(), cache, reviewer, wall_clock=lambda: NOW)
        await subject.authenticate(key().token(), "team", POD.name)
        clock_s[0], served.keys = 60.0, keys
        tokens = [key(key_id="key-2").token(exp=NOW + 1 + i) for i in range(100)]
        pods = await asyncio.gather(*(subject.authenticate(token, "team", POD.name) for token in tokens))
        assert pods == [POD] * 100
        assert (served.asked, reviewer.asked) == (2, reviews)

    asyncio.run(scenario())


def test_token_whose_key_is_dropped_needs_a_review() -> None:
    async def scenario() -> None:
        served, reviewer, clock_s = Served(key(), key(key_id="key-2")), Reviewer(authenticated=False), [0.0]
        cache = KeyCache(served.fetch, clock=lambda: clock_s[0])
        subject = ClusterAuthenticator(Pods(), cache, reviewer, wall_clock=lambda: NOW)
        first, second = key().token(), key(key_id="key-2").token()
        for token in (first, second):
            await subject.authenticate(token, "team", POD.name)
        clock_s[0], served.keys = 60.0, (key(key_id="key-2"),)
        await cache.having("key-3")
        await subject.authenticate(second, "team", POD.name)
        with pytest.raises(Unauthorized, match="The API server does not accept the token"):
            await subject.authenticate(first, "team", POD.name)
        assert reviewer.asked == 1

    asyncio.run(scenario())


def test_token_that_a_key_proved_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        reviewer = Reviewer()
        subject = ClusterAuthenticator(Pods(), cache_of(key()), reviewer, wall_clock=lambda: NOW)
        token = key().token()
        await subject.authenticate(token, "team", POD.name)
        monkeypatch.setattr("regroup_operator.kube.authenticator.refusal_by", None)
        assert await subject.authenticate(token, "team", POD.name) is POD

    asyncio.run(scenario())


def test_nobody_waits_to_be_admitted_while_keys_are_there() -> None:
    async def scenario() -> None:
        served, clock_s = Served(), [0.0]
        cache = KeyCache(served.fetch, clock=lambda: clock_s[0])
        subject = ClusterAuthenticator(Pods(), cache, Reviewer())
        assert subject.admission_s(4000) == 25.5, "not fetched yet"
        await cache.having("key-1")
        assert subject.admission_s(4000) == 25.5, "not served"
        clock_s[0], served.keys = 60.0, (key(),)
        await cache.having("key-1")
        assert subject.admission_s(4000) == 0.0

    asyncio.run(scenario())


def test_who_waits_for_a_review_waits_no_more_once_a_key_proves_its_token() -> None:
    async def scenario() -> None:
        time, served, clock_s = Time(), Served(), [0.0]
        subject = ClusterAuthenticator(
            Pods(),
            KeyCache(served.fetch, clock=lambda: clock_s[0]),
            Reviewer(),
            clock=lambda: time.now_s,
            wall_clock=lambda: NOW,
            bucket=TokenBucket(0.1, 0),
            sleep=time.sleep,
        )
        token = key().token()

        async def story() -> None:
            with pytest.raises(UnavailableError):
                await subject.authenticate(token, "team", POD.name)
            assert subject.waiting() == frozenset({POD.uid})
            clock_s[0], served.keys = 60.0, (key(),)
            assert await subject.authenticate(token, "team", POD.name) is POD
            assert subject.waiting() == frozenset()

        await time.run(asyncio.ensure_future(story()))

    asyncio.run(scenario())
