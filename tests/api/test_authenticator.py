"""Projected tokens as a real API server issues and reviews them, and the keys that it serves."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from harness.polling import until_async
from regroup_operator.api import RegroupError
from regroup_operator.kube.authenticator import ClusterAuthenticator, ClusterReviewer
from regroup_operator.kube.client import PODS, ApiError, Client
from regroup_operator.kube.issuer_keys import IssuerKeys, KeyCache, fetch_keys
from regroup_operator.kube.pods import PodStore
from regroup_operator.model.ports import Forbidden, Unauthorized
from tests.api.conftest import Api
from tests.api.test_informer import store, worker


def token(api: Api, namespace: str, pod: str, audience: str = "regroup") -> str:
    """Return a token as the kubelet would project it into `pod`."""
    return api.done(
        "create", "token", "default", f"--namespace={namespace}", f"--audience={audience}",
        "--bound-object-kind=Pod", f"--bound-object-name={pod}",
    ).strip()  # fmt: skip


@asynccontextmanager
async def workers(api: Api, namespace: str, number: int = 1) -> AsyncIterator[tuple[Client, PodStore]]:
    """Yield a client and a pod store that has so many workers of a job."""
    await asyncio.to_thread(api.done, "create", "serviceaccount", "default", f"--namespace={namespace}")
    async with store(api.kubeconfig) as (client, pods, _):
        for slot in range(number):
            body = worker(namespace, slot)
            body["spec"]["serviceAccountName"] = "default"
            await client.create(PODS, namespace, body)
        await until_async(lambda: len(pods.list((namespace, "digits"), "job-uid")) == number, "the pods")
        yield client, pods


class Counted:
    """How many TokenReviews a client asks for."""

    def __init__(self, client: Client) -> None:
        self.reviews = 0
        client.observe = self._observe

    def _observe(self, verb: str, resource: str, code: int, seconds: float) -> None:  # noqa: ARG002
        self.reviews += resource == "tokenreviews"


async def not_served() -> IssuerKeys:
    raise RegroupError("No keys.")


def test_agent_gets_in_with_its_pods_token_and_with_no_other(api: Api, namespace: str) -> None:
    first, second = "digits-worker-0-0", "digits-worker-1-0"

    async def scenario() -> None:
        async with workers(api, namespace, 2) as (client, pods):
            counted = Counted(client)
            subject = ClusterAuthenticator(pods, KeyCache(lambda: fetch_keys(client)), ClusterReviewer(client))
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
            strange = ec.generate_private_key(ec.SECP256R1())
            for forged in (f"{head}.{claims}.{signature[::-1]}", signed_anew(own, strange)):
                with pytest.raises(Unauthorized, match="is not that of key"):
                    await subject.authenticate(forged, namespace, first)

            await client.delete(PODS, namespace, first)
            await until_async(lambda: pods.pod(namespace, first) is None, "the pod's end")
            with pytest.raises(Forbidden, match="not, or not yet, known"):
                await subject.authenticate(own, namespace, first)
            assert counted.reviews == 0

    asyncio.run(scenario())


def test_who_may_not_read_the_keys_has_tokens_reviewed(api: Api, namespace: str, tmp_path: Path) -> None:
    name = "digits-worker-0-0"
    api.done("create", "serviceaccount", "powerless", f"--namespace={namespace}")
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": api.done("create", "token", "powerless", f"--namespace={namespace}").strip()}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))

    async def scenario() -> None:
        powerless = await Client.connect(str(tmp_path / "kubeconfig"))
        async with workers(api, namespace) as (client, pods):
            counted = Counted(client)
            with pytest.raises(ApiError, match="forbidden") as caught:
                await fetch_keys(powerless)
            assert caught.value.status == 403
            subject = ClusterAuthenticator(pods, KeyCache(lambda: fetch_keys(powerless)), ClusterReviewer(client))
            own = await asyncio.to_thread(token, api, namespace, name)
            head, claims, signature = own.split(".")
            for _ in range(2):
                assert (await subject.authenticate(own, namespace, name)).name == name
                with pytest.raises(Unauthorized, match="The API server does not accept the token"):
                    await subject.authenticate(f"{head}.{claims}.{signature[::-1]}", namespace, name)
            assert counted.reviews == 2
        await powerless.close()

    asyncio.run(scenario())


def signing_key(api: Api) -> ec.EllipticCurvePrivateKey:
    """Return the API server's own key."""
    key = load_pem_private_key((api.kubeconfig.parent / "sa.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def signed_anew(issued: str, key: ec.EllipticCurvePrivateKey, **claims: Any) -> str:
    """Return a token with other claims, signed with `key`: with the API server's own, what it would have issued at another time."""
    head, body, _ = issued.split(".")
    payload = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))) | claims
    signing = f"{head}.{_encoded(json.dumps(payload).encode())}"
    r, s = utils.decode_dss_signature(key.sign(signing.encode(), ec.ECDSA(hashes.SHA256())))
    signature = r.to_bytes(32, "big") + s.to_bytes(32, "big")
    return f"{signing}.{_encoded(signature)}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_token_that_has_expired_opens_nothing(api: Api, namespace: str) -> None:
    """By the operator's clock without a question; by the API server's where it reviews tokens and the operator's clock is behind;
    and a token that was good opens nothing from its last second on."""
    name = "digits-worker-0-0"

    async def scenario() -> None:
        async with workers(api, namespace) as (client, pods):
            issued = await asyncio.to_thread(token, api, namespace, name)
            now = int(time.time())
            good = signed_anew(issued, signing_key(api), iat=now - 60, nbf=now - 60, exp=now + 600)
            expired = signed_anew(issued, signing_key(api), iat=now - 660, nbf=now - 660, exp=now - 60)
            clock = [time.time()]

            def authenticator(keys: Callable[[], Awaitable[IssuerKeys]] = not_served) -> ClusterAuthenticator:
                return ClusterAuthenticator(pods, KeyCache(keys), ClusterReviewer(client), wall_clock=lambda: clock[0])

            subject = authenticator(lambda: fetch_keys(client))
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


def test_operator_whose_clock_is_behind_asks_about_a_token_from_the_future(api: Api, namespace: str) -> None:
    name = "digits-worker-0-0"

    async def scenario() -> None:
        async with workers(api, namespace) as (client, pods):
            counted = Counted(client)
            own = await asyncio.to_thread(token, api, namespace, name)
            clock = [0.0]
            for behind_s, reviews in ((30.0, 0), (300.0, 1)):
                clock[0] = time.time() - behind_s
                subject = ClusterAuthenticator(
                    pods,
                    KeyCache(lambda: fetch_keys(client)),
                    ClusterReviewer(client),
                    wall_clock=lambda: clock[0],
                )
                assert (await subject.authenticate(own, namespace, name)).name == name
                assert counted.reviews == reviews

    asyncio.run(scenario())
