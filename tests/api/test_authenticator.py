"""Projected tokens as a real API server issues and reviews them."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from harness.polling import until_async
from regroup_operator.kube.authenticator import ClusterAuthenticator, ClusterReviewer
from regroup_operator.kube.client import PODS
from regroup_operator.model.ports import Forbidden, Unauthorized
from tests.api.conftest import Api
from tests.api.test_informer import store, worker


def token(api: Api, namespace: str, pod: str, audience: str = "regroup") -> str:
    """Return a token as the kubelet would project it into `pod`."""
    return api.done(
        "create", "token", "default", f"--namespace={namespace}", f"--audience={audience}",
        "--bound-object-kind=Pod", f"--bound-object-name={pod}",
    ).strip()  # fmt: skip


def test_agent_gets_in_with_its_pods_token_and_with_no_other(api: Api, namespace: str) -> None:
    api.done("create", "serviceaccount", "default", f"--namespace={namespace}")
    first, second = "digits-worker-0-0", "digits-worker-1-0"

    async def scenario() -> None:
        async with store(api.kubeconfig) as (client, pods, _):
            for slot in (0, 1):
                pod_body = worker(namespace, slot)
                pod_body["spec"]["serviceAccountName"] = "default"
                await client.create(PODS, namespace, pod_body)
            await until_async(lambda: len(pods.list((namespace, "digits"), "job-uid")) == 2, "both pods")
            subject = ClusterAuthenticator(pods, ClusterReviewer(client))
            own = await asyncio.to_thread(token, api, namespace, first)
            other = await asyncio.to_thread(token, api, namespace, second)
            foreign = await asyncio.to_thread(token, api, namespace, first, "elsewhere")

            pod = await subject.authenticate(own, namespace, first)
            assert (pod.name, pod.job_uid) == (first, "job-uid")
            with pytest.raises(Forbidden, match="bound to pod"):
                await subject.authenticate(other, namespace, first)
            with pytest.raises(Unauthorized, match="for elsewhere, not for regroup"):
                await subject.authenticate(foreign, namespace, first)
            head, claims, signature = own.split(".")
            forged = f"{head}.{claims}.{signature[::-1]}"
            with pytest.raises(Unauthorized, match="does not accept the token"):
                await subject.authenticate(forged, namespace, first)

            await client.delete(PODS, namespace, first)
            await until_async(lambda: pods.pod(namespace, first) is None, "the pod's end")
            with pytest.raises(Forbidden, match="not, or not yet, known"):
                await subject.authenticate(own, namespace, first)

    asyncio.run(scenario())


def signed_anew(api: Api, issued: str, **claims: Any) -> str:
    """Return a token with other claims, signed with the API server's own key: what it would have issued at another time."""
    head, body, _ = issued.split(".")
    payload = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))) | claims
    signing = f"{head}.{_encoded(json.dumps(payload).encode())}"
    key = load_pem_private_key((api.kubeconfig.parent / "sa.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = utils.decode_dss_signature(key.sign(signing.encode(), ec.ECDSA(hashes.SHA256())))
    signature = r.to_bytes(32, "big") + s.to_bytes(32, "big")
    return f"{signing}.{_encoded(signature)}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_token_that_has_expired_opens_nothing(api: Api, namespace: str) -> None:
    """By the operator's clock without a question; by the API server's where the operator's clock is behind; and a token that
    was good opens nothing from its last second on."""
    api.done("create", "serviceaccount", "default", f"--namespace={namespace}")
    name = "digits-worker-0-0"

    async def scenario() -> None:
        async with store(api.kubeconfig) as (client, pods, _):
            body = worker(namespace, 0)
            body["spec"]["serviceAccountName"] = "default"
            await client.create(PODS, namespace, body)
            await until_async(lambda: pods.list((namespace, "digits"), "job-uid") != (), "the pod")
            issued = await asyncio.to_thread(token, api, namespace, name)
            now = int(time.time())
            good = signed_anew(api, issued, iat=now - 60, nbf=now - 60, exp=now + 600)
            expired = signed_anew(api, issued, iat=now - 660, nbf=now - 660, exp=now - 60)
            clock = [time.time()]

            def authenticator() -> ClusterAuthenticator:
                return ClusterAuthenticator(pods, ClusterReviewer(client), wall_clock=lambda: clock[0])

            subject = authenticator()
            assert (await subject.authenticate(good, namespace, name)).name == name, "the key is the API server's"
            with pytest.raises(Unauthorized, match=r"expired 6\d s ago; read it again from its file"):
                await subject.authenticate(expired, namespace, name)
            clock[0] = now + 599.0
            assert (await subject.authenticate(good, namespace, name)).name == name
            clock[0] = now + 600.0
            with pytest.raises(Unauthorized, match="expired 0 s ago"):
                await subject.authenticate(good, namespace, name)
            clock[0] = now - 300.0
            with pytest.raises(Unauthorized, match=r"does not accept the token: .*expired"):
                await authenticator().authenticate(expired, namespace, name)

    asyncio.run(scenario())
