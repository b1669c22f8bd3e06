"""Authenticates agents: from a projected token to the pod that it is bound to. Implements model.ports.Authenticator.

The token's claims are read first, unverified. They must fit a worker in the informer's memory, whose controller
ownerReference (never a label) is a job. Then the issuer's keys verify the signature (issuer_keys.py). If the keys
cannot decide, the API server is asked, once per token until the token expires, within a rate. So a stranger cannot make
the operator ask at all.

Without keys all agents need a TokenReview at once after a fail-over. An agent waits for its turn. If that takes longer
than it waits for an answer, it is turned away and keeps its place. Meanwhile it counts as alive (`waiting`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from regroup_operator.api import UnavailableError
from regroup_operator.kube.claims import Claims, claims_of
from regroup_operator.kube.client import TOKEN_REVIEWS, Client
from regroup_operator.kube.issuer_keys import KeyCache, refusal_by
from regroup_operator.model.bucket import TokenBucket
from regroup_operator.model.ports import Forbidden, PodLookup, Unauthorized
from regroup_operator.model.records import Pod

AUDIENCE = "regroup"
REVIEWS_PER_S = 200.0
REVIEW_BURST = 500
WAIT_S = 8.0
"""Longest wait of a request for its turn. The agent gives up after 10 s."""
PLACE_KEPT_S = 15.0
"""Time after its turn for which the place of an agent is kept. An agent calls again within two seconds."""
MAX_TOKENS = 20_000
REFUSED_FOR_S = 60.0
"""Time for which a token that the API server refused is refused without another request."""
POD_UID_EXTRA = "authentication.kubernetes.io/pod-uid"


class TokenReviewer(Protocol):
    """The port to TokenReview, so that tests need no API server."""

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


def pod_of(claims: Claims, namespace: str, pod_name: str, pods: PodLookup, wall_s: float) -> Pod:
    """Return the worker that may have this token, if it is genuine. Raises Unauthorized, Forbidden. Pure."""
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


class _Verdict(NamedTuple):
    until_s: float  # since the epoch
    refusal: str
    key_id: str
    """Key that verified the token; empty if the API server was asked."""
    claims: Claims


class ClusterAuthenticator:
    """Authenticates agents by the issuer's keys, else by TokenReview, as seldom as is safe."""

    def __init__(
        self,
        pods: PodLookup,
        keys: KeyCache,
        reviewer: TokenReviewer,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        bucket: TokenBucket | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._pods = pods
        self._keys = keys
        self._reviewer = reviewer
        self._clock = clock
        self._wall_clock = wall_clock
        self._bucket = bucket or TokenBucket(REVIEWS_PER_S, REVIEW_BURST)
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        """Digest of a token -> verdict. An agent calls often with one token, and verifying it takes about 0.1 ms."""
        self._sleep = sleep
        self._places: dict[str, float] = {}
        """Pod UID -> time of its turn. A worker's pod has at most one; places of agents that stay away are swept out."""
        self._swept_s = float("-inf")
        self._reviews: dict[bytes, asyncio.Task[Mapping[str, Any]]] = {}
        """Digest of a token -> the review that is under way. Several requests with one token share it."""

    async def authenticate(self, token: str, namespace: str, pod_name: str) -> Pod:
        """Return the pod that `token` is bound to, which must be the named one.

        Raises Unauthorized, Forbidden, UnavailableError.
        """
        digest = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        verdict = self._verdicts.get(digest)
        claims = claims_of(token) if verdict is None else verdict.claims
        pod = pod_of(claims, namespace, pod_name, self._pods, self._wall_clock())
        if verdict is None or verdict.until_s <= self._wall_clock() or self._is_dropped(verdict.key_id):
            verdict = self._verdicts[digest] = await self._judge(token, digest, claims, pod)
            while len(self._verdicts) > MAX_TOKENS:
                self._verdicts.popitem(last=False)
        if verdict.refusal:
            raise Unauthorized(verdict.refusal)
        return pod

    def known(self, pod: Pod) -> Pod:
        now = self._pods.pod(pod.namespace, pod.name)
        if now is None or now.uid != pod.uid:
            raise Forbidden(f"Pod {pod.namespace}/{pod.name} with UID {pod.uid} is gone.")
        return now

    def admission_s(self, num_agents: int) -> float:
        """Return the seconds until the last of `num_agents` agents that call at once can have been admitted."""
        return 0.0 if self._keys.keys is not None else review_s(num_agents)

    def waiting(self) -> frozenset[str]:
        """Return the UIDs of pods whose agents wait for their turn, or were told to call again for it."""
        now_s = self._clock()
        return frozenset(uid for uid, due_s in self._places.items() if now_s <= due_s + PLACE_KEPT_S)

    def _is_dropped(self, key_id: str) -> bool:
        return bool(key_id) and self._keys.has_dropped(key_id)

    async def _judge(self, token: str, digest: bytes, claims: Claims, pod: Pod) -> _Verdict:
        """Return the verdict on a token, by the keys or the API server. Raises Unauthorized, UnavailableError."""
        keys = await self._keys.having(claims.key_id)
        refusal = None if keys is None else refusal_by(keys, token, claims, self._wall_clock())
        if refusal:
            raise Unauthorized(refusal)  # not cached, so that forged tokens drive out no good one
        if refusal is not None:
            self._places.pop(pod.uid, None)
            return _Verdict(claims.expires_at, "", claims.key_id, claims)
        refusal = refusal_in(await self._review(token, digest, pod.uid), pod)
        until_s = min(claims.expires_at, self._wall_clock() + REFUSED_FOR_S) if refusal else claims.expires_at
        return _Verdict(until_s, refusal, "", claims)

    async def _review(self, token: str, digest: bytes, pod_uid: str) -> Mapping[str, Any]:
        review = self._reviews.get(digest)
        if review is None:
            await self._turn(pod_uid)
            review = self._reviews.get(digest)
        if review is None:
            review = asyncio.ensure_future(self._reviewer.review(token, AUDIENCE))
            self._reviews[digest] = review
            review.add_done_callback(lambda _: self._reviews.pop(digest, None))
        try:
            return await asyncio.shield(review)  # an agent that hangs up does not end a shared review
        finally:
            self._places.pop(pod_uid, None)

    async def _turn(self, pod_uid: str) -> None:
        """Wait for the turn of this pod. If that takes too long, keep its place and raise UnavailableError."""
        now_s = self._clock()
        due_s = self._places.get(pod_uid)
        if due_s is None or now_s > due_s + PLACE_KEPT_S:
            self._sweep(now_s)
            due_s = self._places[pod_uid] = self._bucket.reserve(now_s)
        if due_s <= now_s:
            return
        await self._sleep(min(due_s - now_s, WAIT_S))
        if due_s > now_s + WAIT_S:
            raise UnavailableError(
                f"{len(self._places)} agents wait to be admitted; the turn of this one comes in {due_s - now_s - WAIT_S:.0f} s. "
                "Call again."
            )

    def _sweep(self, now_s: float) -> None:
        if now_s >= self._swept_s + PLACE_KEPT_S:
            self._swept_s = now_s
            self._places = {uid: due_s for uid, due_s in self._places.items() if now_s <= due_s + PLACE_KEPT_S}


def review_s(num_agents: int, per_s: float = REVIEWS_PER_S, burst: float = REVIEW_BURST) -> float:
    """Return the seconds until the tokens of `num_agents` agents that call at once can have been reviewed. Pure."""
    return 0.0 if num_agents <= burst else (num_agents - burst) / per_s + WAIT_S


def refusal_in(status: Mapping[str, Any], pod: Pod) -> str:
    """Return why the TokenReview's status does not prove that the token is the pod's, or "" if it does."""
    if not status.get("authenticated"):
        return f"The API server does not accept the token: {status.get('error') or 'not authenticated'}."
    if AUDIENCE not in (status.get("audiences") or ()):
        return f"The API server does not accept the token for audience {AUDIENCE}."
    extra = (status.get("user") or {}).get("extra") or {}
    if pod.uid not in (extra.get(POD_UID_EXTRA) or ()):
        return "The API server says that the token belongs to another pod."
    return ""
