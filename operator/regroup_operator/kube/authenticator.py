"""Whose token is it: from an agent's projected token to the pod that it is bound to.

The token's own words are read first, unverified: they must fit a worker in the informer's memory, whose controller
ownerReference (never a label) is a job. Only then is the API server asked, once per token until the token expires, within
a rate. So a stranger cannot make the operator ask at all. Implements model.ports.Authenticator.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from regroup_operator.api import UnavailableError
from regroup_operator.kube.client import TOKEN_REVIEWS, Client
from regroup_operator.model.bucket import TokenBucket
from regroup_operator.model.ports import Forbidden, PodLookup, Unauthorized
from regroup_operator.model.records import Pod

AUDIENCE = "regroup"
REVIEWS_PER_S = 100.0
REVIEW_BURST = 500
MAX_TOKENS = 20_000
REFUSED_FOR_S = 60.0
"""How long a token that the API server refused is refused without asking again."""
POD_UID_EXTRA = "authentication.kubernetes.io/pod-uid"


class TokenReviewer(Protocol):
    """The network's edge: TokenReview."""

    async def review(self, token: str, audience: str) -> Mapping[str, Any]:
        """Return the TokenReview's status. Raises UnavailableError."""
        ...


class ClusterReviewer:
    """TokenReview by the API server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def review(self, token: str, audience: str) -> Mapping[str, Any]:
        """Return the TokenReview's status. Raises ApiError."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        answer = await self._client.create(TOKEN_REVIEWS, None, body, timeout_s=10)
        status: Mapping[str, Any] = answer.get("status") or {}
        return status


@dataclass(frozen=True)
class Claims:
    """What a projected token says of itself, unverified."""

    audiences: tuple[str, ...]
    expires_at: float
    """Seconds since the epoch."""
    namespace: str
    pod_name: str
    pod_uid: str


def claims_of(token: str) -> Claims:
    """Return the unverified claims. Raises Unauthorized when it is no projected token that is bound to a pod."""
    parts = token.split(".")
    try:
        if len(parts) != 3 or len(token) > 16_384:
            raise ValueError
        payload = orjson.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        bound = payload["kubernetes.io"]
        audiences = payload["aud"]
        if isinstance(audiences, str):
            audiences = [audiences]
        expires_at = float(payload["exp"])
        if not math.isfinite(expires_at):
            raise ValueError
        return Claims(
            audiences=tuple(str(audience) for audience in audiences),
            expires_at=expires_at,
            namespace=str(bound["namespace"]),
            pod_name=str(bound["pod"]["name"]),
            pod_uid=str(bound["pod"]["uid"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        raise Unauthorized("The token is not a projected service account token that is bound to a pod.") from None


def pod_of(claims: Claims, namespace: str, pod_name: str, pods: PodLookup, wall_s: float) -> Pod:
    """Return the worker that may have this token, if the reviewer agrees. Raises Unauthorized, Forbidden. Pure."""
    if AUDIENCE not in claims.audiences:
        raise Unauthorized(f"The token is for {', '.join(claims.audiences) or 'nobody'}, not for {AUDIENCE}.")
    if claims.expires_at <= wall_s:
        raise Unauthorized(f"The token expired {wall_s - claims.expires_at:.0f} s ago; read it again from its file.")
    if (claims.namespace, claims.pod_name) != (namespace, pod_name):
        raise Forbidden(
            f"The token is bound to pod {claims.namespace}/{claims.pod_name}, not to {namespace}/{pod_name}."
        )
    pod = pods.pod(namespace, pod_name)
    if pod is None:
        raise Forbidden(f"Pod {namespace}/{pod_name} is not, or not yet, known as a worker of a job.")
    if pod.uid != claims.pod_uid:
        raise Forbidden(f"The token is bound to an earlier pod {namespace}/{pod_name} with UID {claims.pod_uid}.")
    return pod


class ClusterAuthenticator:
    """Authenticates agents by TokenReview, as seldom as is safe."""

    def __init__(
        self,
        pods: PodLookup,
        reviewer: TokenReviewer,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        bucket: TokenBucket | None = None,
    ) -> None:
        self._pods = pods
        self._reviewer = reviewer
        self._clock = clock
        self._wall_clock = wall_clock
        self._bucket = bucket or TokenBucket(REVIEWS_PER_S, REVIEW_BURST)
        self._verdicts: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        """Digest of a token -> until when (wall clock), and the sentence that refuses it or empty."""

    async def authenticate(self, token: str, namespace: str, pod_name: str) -> Pod:
        """Return the pod that `token` is bound to, which is the one named. Raises Unauthorized, Forbidden, UnavailableError."""
        claims = claims_of(token)
        pod = pod_of(claims, namespace, pod_name, self._pods, self._wall_clock())
        digest = hashlib.sha256(token.encode()).digest()
        until, refusal = self._verdicts.get(digest, (0.0, ""))
        if until <= self._wall_clock():
            if not self._bucket.take(self._clock()):
                raise UnavailableError("Too many new tokens at once; try again in a second.")
            refusal = refusal_in(await self._reviewer.review(token, AUDIENCE), pod)
            until = min(claims.expires_at, self._wall_clock() + REFUSED_FOR_S) if refusal else claims.expires_at
            self._verdicts[digest] = (until, refusal)
            while len(self._verdicts) > MAX_TOKENS:
                self._verdicts.popitem(last=False)
        if refusal:
            raise Unauthorized(refusal)
        return pod


def refusal_in(status: Mapping[str, Any], pod: Pod) -> str:
    """Return why the TokenReview's status does not prove that the token is the pod's; empty when it does."""
    if not status.get("authenticated"):
        return f"The API server does not accept the token: {status.get('error') or 'not authenticated'}."
    if AUDIENCE not in (status.get("audiences") or ()):
        return f"The API server does not accept the token for audience {AUDIENCE}."
    extra = (status.get("user") or {}).get("extra") or {}
    if pod.uid not in (extra.get(POD_UID_EXTRA) or ()):
        return "The API server says that the token belongs to another pod."
    return ""
