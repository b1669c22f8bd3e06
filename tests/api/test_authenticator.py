"""Projected tokens as a real API server issues and reviews them."""

from __future__ import annotations

import asyncio

import pytest

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
