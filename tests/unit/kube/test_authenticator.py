"""Who gets in with which token, and when the API server is asked at all."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest

from regroup_operator.api import UnavailableError
from regroup_operator.kube.authenticator import ClusterAuthenticator
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


def test_reviews_are_limited_in_rate() -> None:
    async def scenario() -> None:
        reviewer = Reviewer()
        subject = ClusterAuthenticator(
            Pods(), reviewer, wall_clock=lambda: NOW, clock=lambda: 0.0, bucket=TokenBucket(1, 2)
        )
        for n in range(2):
            await subject.authenticate(jwt(jti=n), "team", POD.name)
        with pytest.raises(UnavailableError, match="Too many"):
            await subject.authenticate(jwt(jti=3), "team", POD.name)
        await subject.authenticate(jwt(jti=1), "team", POD.name)
        assert reviewer.asked == 2

    asyncio.run(scenario())
