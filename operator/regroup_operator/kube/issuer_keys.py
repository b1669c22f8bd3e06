"""The public keys of the service account issuer. With them the operator verifies agents' tokens itself.

The module owns the keys, the times at which they are fetched, and the proof by them. It does not read the claims of a
token (claims.py), and does not choose the pod (authenticator.py). ADR 0063 has the checks that
only a TokenReview makes (docs/design/adr/0063-tokens-verified-locally.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import InvalidTokenError, PyJWK, PyJWS, PyJWTError

from regroup_operator.api import RegroupError, UnavailableError
from regroup_operator.kube.claims import Claims
from regroup_operator.kube.client import Client

log = logging.getLogger(__name__)

ALGORITHMS = frozenset({"RS256", "ES256", "ES384", "ES512"})
"""All algorithms with which kube-apiserver 1.36 signs service account tokens (its pkg/serviceaccount/jwt.go)."""
LEEWAY_S = 60.0
"""Allowed difference of clocks. The API server allows as much."""
FETCH_TIMEOUT_S = 5.0
"""Deadline for each of the two documents."""
WAIT_S = 2.0
"""Longest wait of a request for keys that are being fetched."""
REFETCH_S = 10.0
"""Least time between two fetches because of a token with an unknown key, and the wait after a fetch without an answer."""
REFRESH_S = 600.0
"""Time between two fetches in any case. After it, a key that the API server does not serve any more proves nothing."""

_JWS = PyJWS()


@dataclass(frozen=True)
class IssuerKeys:
    """The keys that the API server serves."""

    issuer: str
    by_id: Mapping[str, PyJWK | None]
    """Key id -> key. None: its kind is not verified here."""


def keys_of(configuration: Mapping[str, Any], jwks: Mapping[str, Any]) -> IssuerKeys:
    """Return the keys in the two documents of OpenID Connect discovery. Raises RegroupError if none is usable. Pure."""
    try:
        keys = IssuerKeys(str(configuration["issuer"]), {str(jwk["kid"]): _usable(jwk) for jwk in jwks["keys"]})
    except (KeyError, TypeError, AttributeError, ValueError):
        raise RegroupError("The API server's OpenID configuration or key set is not of the expected form.") from None
    if not any(keys.by_id.values()):
        raise RegroupError(f"The API server serves no key for {', '.join(sorted(ALGORITHMS))}.")
    return keys


def _usable(jwk: dict[str, Any]) -> PyJWK | None:
    if jwk.get("alg") not in ALGORITHMS:
        return None
    try:
        key = PyJWK(jwk)
    except (PyJWTError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key.key, RSAPublicKey | EllipticCurvePublicKey) else None


def refusal_by(keys: IssuerKeys, token: str, claims: Claims, wall_s: float) -> str | None:
    """Return why the token is not the issuer's, or "" if it is. None means that only the API server can decide. Pure.

    `claims` are those of the token. The caller compares audience, expiry and pod.
    """
    key = keys.by_id.get(claims.key_id)
    if key is None:
        return None
    try:
        _JWS.decode(token, key, [key.algorithm_name])
    except InvalidTokenError:
        return f"The signature of the token is not that of key {claims.key_id} of {keys.issuer}."
    if claims.issuer != keys.issuer:
        return None  # an API server accepts several issuers while its own is changed, and names the newest only
    if claims.not_before > wall_s + LEEWAY_S:
        return None  # it is genuine, so the clocks differ
    return ""


async def fetch_keys(client: Client) -> IssuerKeys:
    """Return the keys that the API server serves now. Raises ApiError, and RegroupError if none is usable."""
    configuration = await client.document("/.well-known/openid-configuration", timeout_s=FETCH_TIMEOUT_S)
    jwks = await client.document("/openid/v1/jwks", accept="application/jwk-set+json", timeout_s=FETCH_TIMEOUT_S)
    return keys_of(configuration, jwks)


class KeyCache:
    """The newest keys. `run()` keeps them current until cancelled; a token with an unknown key has them fetched at once."""

    def __init__(
        self,
        fetch: Callable[[], Awaitable[IssuerKeys]],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        wait_s: float = WAIT_S,
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._sleep = sleep
        self._wait_s = wait_s
        self.keys: IssuerKeys | None = None
        """None: the API server does not serve them, or they have not been fetched yet."""
        self._fetching: asyncio.Task[bool] | None = None
        self._began_s = float("-inf")
        self._logged = ""

    async def run(self) -> None:
        """Fetch the keys, now and whenever they are old. A fetch that fails is no error."""
        try:
            while True:
                fetching = self._begin()
                await asyncio.wait({fetching})
                await self._sleep(REFRESH_S if fetching.result() else REFETCH_S)
        finally:
            if self._fetching is not None:
                self._fetching.cancel()

    async def having(self, key_id: str) -> IssuerKeys | None:
        """Return the newest keys. If they lack `key_id` they are fetched first, and the caller waits at most WAIT_S.

        All callers share one fetch. The next one because of an unknown key comes after REFETCH_S.
        """
        is_known = self.keys is not None and key_id in self.keys.by_id
        is_due = self._fetching is not None or self._clock() >= self._began_s + REFETCH_S
        if is_due and not is_known:
            await asyncio.wait({self._begin()}, timeout=self._wait_s)
        return self.keys

    def has_dropped(self, key_id: str) -> bool:
        """Return whether the API server serves keys, but not this one any more."""
        return self.keys is not None and key_id not in self.keys.by_id

    def _begin(self) -> asyncio.Task[bool]:
        if self._fetching is None:
            self._began_s = self._clock()
            self._fetching = asyncio.create_task(self._fetch_once(), name="issuer keys")
        return self._fetching

    async def _fetch_once(self) -> bool:
        """Fetch the keys. Return whether the API server has answered, with keys or without."""
        try:
            self.keys = await self._fetch()
        except UnavailableError as error:
            self._log(f"The keys of service account tokens cannot be fetched: {error}")
            return False
        except RegroupError as error:
            self.keys = None
            self._log(
                f"Each agent's token is reviewed by the API server, since there are no keys to verify it: {error}"
            )
        else:
            self._logged = ""
        finally:
            self._fetching = None
        return True

    def _log(self, sentence: str) -> None:
        """Log a sentence, unless it was the last one logged."""
        if sentence != self._logged:
            log.warning("%s", sentence)
            self._logged = sentence
