"""What the issuer's keys prove of a token, and when they are fetched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from regroup_operator.api import RegroupError
from regroup_operator.kube.claims import claims_of
from regroup_operator.kube.client import ApiError, ApiNotFound, ApiUnavailable
from regroup_operator.kube.issuer_keys import IssuerKeys, KeyCache, keys_of, refusal_by
from tests.unit.kube.issuer import NOW, Key, documents, jwk_of, key

OKP = {
    "kty": "OKP",
    "crv": "Ed25519",
    "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
    "kid": "edwards",
    "alg": "EdDSA",
}
SECRET = {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"}
PRIVATE = jwk_of(key().private) | {"kid": "secret", "alg": "ES256"}
ASK = None
FORGED = "is not that of key key-1"


def served(*keys: Key, also: tuple[dict[str, Any], ...] = ()) -> IssuerKeys:
    configuration, jwks = documents(*keys)
    return keys_of(configuration, {"keys": [*jwks["keys"], *also]})


def thief(algorithm: str = "ES256") -> Key:
    """Another key that claims the id of the issuer's."""
    return key(algorithm, "key-1", 1)


def altered(token: str) -> str:
    """Return a token whose claims are of another token with its signature."""
    head, _, signature = token.split(".")
    return f"{head}.{key().token(exp=NOW + 9e9).split('.')[1]}.{signature}"


@pytest.mark.parametrize(
    ("token", "want"),
    [
        pytest.param(key().token(), "", id="genuine"),
        pytest.param(key("RS256", "rsa").token(), "", id="genuine, RS256"),
        pytest.param(key("ES384", "p384").token(), "", id="genuine, ES384"),
        pytest.param(key("ES512", "p521").token(), "", id="genuine, ES512"),
        pytest.param(key().token(nbf=NOW + 59), "", id="not valid before the clocks' leeway is over"),
        pytest.param(thief().token(), FORGED, id="signed with another key under the id of ours"),
        pytest.param(thief("RS256").token(), FORGED, id="another key of another kind"),
        pytest.param(altered(key().token()), FORGED, id="signature of other claims"),
        pytest.param(key().token().rpartition(".")[0] + ".", FORGED, id="no signature"),
        pytest.param(key().unsigned(), FORGED, id="algorithm none"),
        pytest.param(key().by_hmac(), FORGED, id="HMAC with the public key as the secret"),
        pytest.param(key("RS256", "rsa").by_hmac(), "is not that of key rsa", id="HMAC with the public RSA key"),
        pytest.param(thief().token(iss="https://other"), FORGED, id="forged and of another issuer"),
        pytest.param(key(key_id="key-9").token(), ASK, id="unknown key"),
        pytest.param(key(key_id="").token(), ASK, id="no key is named"),
        pytest.param(key(key_id="edwards").token(), ASK, id="a key that is not verified here"),
        pytest.param(key("RS512", "rsa512").token(), ASK, id="an algorithm that the API server does not sign with"),
        pytest.param(key(key_id="secret").token(), ASK, id="a secret among the keys"),
        pytest.param(key().token(iss="https://other"), ASK, id="another issuer, perhaps the one of before"),
        pytest.param(key().token(nbf=NOW + 61), ASK, id="genuine, but from the future: the clocks differ"),
    ],
)
def test_refusal_by(token: str, want: str | None) -> None:
    ours = (key(), key("RS256", "rsa"), key("ES384", "p384"), key("ES512", "p521"), key("RS512", "rsa512"))
    keys = served(*ours, also=(OKP, SECRET))
    got = refusal_by(keys, token, claims_of(token), NOW)
    if want:
        assert want in (got or "")
    else:
        assert got == want


@pytest.mark.parametrize(
    "jwk",
    [
        pytest.param(SECRET, id="a secret"),
        pytest.param(SECRET | {"alg": "ES256"}, id="a secret that is called a key"),
        pytest.param(SECRET | {"alg": ""}, id="a secret of no algorithm"),
        pytest.param(OKP, id="Ed25519"),
        pytest.param(key().jwk() | {"kid": "secret", "alg": "RS256"}, id="another kind than it says"),
        pytest.param(key().jwk() | {"kid": "secret", "alg": "none"}, id="none"),
        pytest.param({k: v for k, v in key().jwk().items() if k != "alg"} | {"kid": "secret"}, id="no algorithm"),
        pytest.param(PRIVATE, id="a private key"),
    ],
)
def test_what_is_no_public_key_of_a_known_algorithm_proves_nothing(jwk: dict[str, Any]) -> None:
    keys = served(key(), also=(jwk,))
    assert {name for name, usable in keys.by_id.items() if usable is not None} == {"key-1"}
    assert len(keys.by_id) == 2


@pytest.mark.parametrize(
    ("configuration", "jwks", "sentence"),
    [
        pytest.param({}, documents(key())[1], "not of the expected form", id="no issuer"),
        pytest.param(documents(key())[0], {"keys": 1}, "not of the expected form", id="no list"),
        pytest.param(documents(key())[0], {"keys": [1]}, "not of the expected form", id="no keys in it"),
        pytest.param(documents(key())[0], {"keys": [{"kty": "RSA"}]}, "not of the expected form", id="a key without id"),
        pytest.param(documents(key())[0], {"keys": []}, "no key for ES256, ES384, ES512, RS256", id="no key"),
        pytest.param(documents(key())[0], {"keys": [OKP]}, "no key for ES256", id="only keys that are not verified here"),
        pytest.param(
            documents(key())[0], {"keys": [key().jwk() | {"x": "AA"}]}, "no key for ES256", id="not on the curve"
        ),
    ],
)  # fmt: skip
def test_documents_without_a_key_of_use_are_an_error(configuration: Any, jwks: Any, sentence: str) -> None:
    with pytest.raises(RegroupError, match=sentence):
        keys_of(configuration, jwks)


class Source:
    """The API server: what it serves now, and how often it was asked. `hold` keeps its answers back."""

    def __init__(self, *keys: Key) -> None:
        self.answer: IssuerKeys | Exception = served(*keys)
        self.asked = 0
        self.hold: asyncio.Event | None = None

    async def fetch(self) -> IssuerKeys:
        self.asked += 1
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Clock:
    """A clock that its owner sets. Who sleeps is woken by `pass_`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self._wake = asyncio.Event()

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self._wake.wait()
        self._wake.clear()

    async def pass_(self) -> None:
        """Wake who sleeps and let it do what it does."""
        self.now_s += self.slept[-1]
        self._wake.set()
        for _ in range(10):
            await asyncio.sleep(0)


def story(run: Callable[[Source, Clock, KeyCache], Coroutine[Any, Any, None]], wait_s: float = 5.0) -> None:
    async def scenario() -> None:
        source, clock = Source(key()), Clock()
        await run(source, clock, KeyCache(source.fetch, clock=clock, sleep=clock.sleep, wait_s=wait_s))

    asyncio.run(scenario())


def ids(keys: IssuerKeys | None) -> set[str] | None:
    return None if keys is None else set(keys.by_id)


@pytest.mark.parametrize("new", [pytest.param("key-2", id="found"), pytest.param("key-3", id="not found")])
def test_100_tokens_with_an_unknown_key_share_one_fetch(new: str) -> None:
    async def run(source: Source, clock: Clock, cache: KeyCache) -> None:
        await cache.having("key-1")
        clock.now_s += 10
        source.answer, source.hold = served(key(), key(key_id=new)), asyncio.Event()
        waiters = [asyncio.create_task(cache.having("key-2")) for _ in range(100)]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        source.hold.set()
        assert [ids(await waiter) for waiter in waiters] == [{"key-1", new}] * 100
        assert source.asked == 2

    story(run)


def test_unknown_key_has_keys_fetched_at_most_every_10_s_and_a_known_one_never() -> None:
    async def run(source: Source, clock: Clock, cache: KeyCache) -> None:
        for now_s, asked in [(0.0, 1), (9.9, 1), (10.0, 2), (19.9, 2), (20.0, 3)]:
            clock.now_s = now_s
            await cache.having("key-2")
            assert source.asked == asked, now_s
        clock.now_s = 1000.0
        await cache.having("key-1")
        assert source.asked == 3

    story(run)


def test_fetch_that_takes_long_is_not_waited_for_and_not_lost() -> None:
    async def run(source: Source, clock: Clock, cache: KeyCache) -> None:  # noqa: ARG001
        source.hold = asyncio.Event()
        assert await asyncio.wait_for(cache.having("key-1"), 5) is None
        source.hold.set()
        assert ids(await cache.having("key-1")) == {"key-1"}
        assert source.asked == 1

    story(run, wait_s=0.01)


@pytest.mark.parametrize(
    "error", [ApiError(403, "Forbidden", "no"), ApiNotFound(404, "NotFound", "no"), RegroupError("odd")]
)
def test_keys_that_are_not_served_any_more_are_not_kept(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def run(source: Source, clock: Clock, cache: KeyCache) -> None:
        await cache.having("key-1")
        source.answer = error
        for _ in range(3):
            clock.now_s += 10
            assert ids(await cache.having("key-2")) is None
        assert not cache.has_dropped("key-1"), "nothing is known of any key"
        assert source.asked == 4

    with caplog.at_level(logging.WARNING):
        story(run)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "Each agent's token is reviewed by the API server"
    ]


def test_keys_are_kept_while_the_api_server_does_not_answer_and_fetched_again_after_10_s() -> None:
    async def run(source: Source, clock: Clock, cache: KeyCache) -> None:
        await cache.having("key-1")
        source.answer = ApiUnavailable(0, "Transport", "No answer.")
        clock.now_s += 10
        assert ids(await cache.having("key-2")) == {"key-1"}
        running = asyncio.create_task(cache.run())
        await asyncio.sleep(0.01)
        assert (clock.slept, ids(cache.keys)) == ([10.0], {"key-1"})
        source.answer = served(key(key_id="key-2"))
        await clock.pass_()
        assert (clock.slept, ids(cache.keys)) == ([10.0, 600.0], {"key-2"})
        running.cancel()

    story(run)


def test_key_that_is_served_no_more_is_dropped_at_the_next_refresh() -> None:
    async def run(source: Source, clock: Clock, cache: KeyCache) -> None:
        running = asyncio.create_task(cache.run())
        await asyncio.sleep(0.01)
        assert (source.asked, ids(cache.keys), clock.slept) == (1, {"key-1"}, [600.0]), (
            "at the start, before any token comes"
        )
        source.answer = served(key(key_id="key-2"))
        await clock.pass_()
        assert (ids(cache.keys), cache.has_dropped("key-1"), cache.has_dropped("key-2")) == ({"key-2"}, True, False)
        running.cancel()

    story(run)


def test_nothing_is_fetched_after_the_end() -> None:
    async def run(source: Source, clock: Clock, cache: KeyCache) -> None:  # noqa: ARG001
        source.hold = asyncio.Event()
        running = asyncio.create_task(cache.run(), name="run")
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        await asyncio.sleep(0)
        left = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        assert "issuer keys" not in left

    story(run)
