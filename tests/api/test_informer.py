"""The pod store against a real API server: what it hears, and what it makes of a restart and of a lost history."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster import apiserver
from harness.polling import until_async
from regroup_operator.kube.client import NODES, PODS, Client, Resource
from regroup_operator.kube.pods import PodStore
from regroup_operator.model.records import Key, Pod
from tests.api.conftest import Api

DEADLINE_S = 40.0
NAMESPACES = Resource("", "v1", "namespaces")


def worker(namespace: str, slot: int, node: str = "") -> dict[str, Any]:
    owner = {
        "apiVersion": "regroup.dev/v1alpha1",
        "kind": "DistributedTrainingJob",
        "name": "digits",
        "uid": "job-uid",
        "controller": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"digits-worker-{slot}-0",
            "namespace": namespace,
            "labels": {"regroup.dev/role": "worker", "regroup.dev/job-name": "digits"},
            "ownerReferences": [owner],
        },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "trainer", "image": "example/trainer:1"}],
            **({"nodeName": node} if node else {}),
        },
    }


@asynccontextmanager
async def store(kubeconfig: Path) -> AsyncIterator[tuple[Client, PodStore, list[Key]]]:
    """Yield a client and a running, synced pod store with the keys that it called out."""
    client = await Client.connect(str(kubeconfig))
    pods = PodStore(client, drain_taints=["team/ends"])
    changed: list[Key] = []
    pods.on_change(changed.append)
    task = asyncio.create_task(pods.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await pods.synced()
        yield client, pods, changed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


def found(pods: PodStore, namespace: str) -> list[Pod]:
    return list(pods.list((namespace, "digits"), "job-uid"))


def test_store_hears_of_creation_change_and_deletion(api: Api, namespace: str) -> None:
    async def scenario() -> None:
        async with store(api.kubeconfig) as (client, pods, changed):
            await client.create(PODS, namespace, worker(namespace, 1))
            await client.create(PODS, namespace, worker(namespace, 0))
            await until_async(lambda: [pod.slot for pod in found(pods, namespace)] == [0, 1], "both pods, sorted")
            assert (namespace, "digits") in changed
            status = {"status": {"phase": "Running", "podIP": "10.9.8.7", "podIPs": [{"ip": "10.9.8.7"}]}}
            await client.patch(PODS, namespace, "digits-worker-0-0", status, subresource="status")
            await until_async(lambda: found(pods, namespace)[0].ip == "10.9.8.7", "the pod's address")
            changed.clear()
            pod = pods.pod(namespace, "digits-worker-1-0")
            assert pod is not None
            await client.delete(PODS, namespace, pod.name, uid=pod.uid)
            await until_async(lambda: len(found(pods, namespace)) == 1, "the deletion")
            assert set(changed) == {(namespace, "digits")}
            assert pods.pod(namespace, pod.name) is None

    asyncio.run(scenario())


def test_pods_readiness_follows_their_node(api: Api, namespace: str) -> None:
    async def scenario() -> None:
        node = f"node-{namespace}"
        async with store(api.kubeconfig) as (client, pods, changed):
            await client.create(NODES, None, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
            await set_ready(client, node, "True")
            await client.create(PODS, namespace, worker(namespace, 0, node))
            await until_async(
                lambda: any(pod.node == node and pod.node_ready for pod in found(pods, namespace)), "ready"
            )
            changed.clear()
            await set_ready(client, node, "Unknown")
            await until_async(lambda: not found(pods, namespace)[0].node_ready, "the node's loss")
            assert (namespace, "digits") in changed
            await set_ready(client, node, "True")
            await until_async(lambda: found(pods, namespace)[0].node_ready, "the node's return")
            await client.delete(NODES, None, node)
            await until_async(lambda: not found(pods, namespace)[0].node_ready, "the node's deletion")

    asyncio.run(scenario())


def test_notices_come_from_the_taints_of_a_node_and_the_conditions_of_a_pod(api: Api, namespace: str) -> None:
    async def scenario() -> None:
        node = f"node-{namespace}"
        async with store(api.kubeconfig) as (client, pods, changed):
            await client.create(NODES, None, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
            await client.create(PODS, namespace, worker(namespace, 0, node))
            await until_async(lambda: any(pod.node == node for pod in found(pods, namespace)), "the pod")
            changed.clear()
            for key, why in (("team/ends", f"its node {node} has taint team/ends"), ("team/else", "")):
                taints = [{"key": key, "effect": "NoSchedule"}]
                await client.patch(NODES, None, node, {"spec": {"taints": taints}})
                await until_async(partial(notice_is, pods, namespace, why), why or "no notice")
            assert (namespace, "digits") in changed
            conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
            status = {"status": {"conditions": conditions}}
            await client.patch(PODS, namespace, "digits-worker-0-0", status, subresource="status")
            why = "its condition DisruptionTarget says EvictionByEvictionAPI"
            await until_async(partial(notice_is, pods, namespace, why), why)

    asyncio.run(scenario())


def notice_is(pods: PodStore, namespace: str, why: str) -> bool:
    return [pod.notice for pod in found(pods, namespace)] == [why]


async def set_ready(client: Client, node: str, status: str) -> None:
    conditions = [{"type": "Ready", "status": status}]
    await client.patch(NODES, None, node, {"status": {"conditions": conditions}}, subresource="status")


@pytest.mark.slow
def test_store_outlives_the_api_server_and_believes_a_server_that_lost_its_history(tmp_path: Path) -> None:
    """First a plain restart: the copy stays and news arrive. Then etcd is emptied: everything must be reported gone."""
    server = apiserver.start(tmp_path)
    port = int(server.url.rsplit(":", 1)[1])

    async def scenario() -> None:
        async with store(server.kubeconfig) as (client, pods, changed):
            for _ in range(60):  # so that the history is longer than that of a new server
                await client.patch(NAMESPACES, None, "default", {"metadata": {"labels": {"n": str(_)}}})
            await client.create(PODS, "default", worker("default", 0))
            await until_async(lambda: len(found(pods, "default")) == 1, "the pod")
            await asyncio.to_thread(server.stop)
            assert len(found(pods, "default")) == 1
            await asyncio.to_thread(apiserver.start, tmp_path, port=port)
            await client.create(PODS, "default", worker("default", 1))
            await until_async(lambda: len(found(pods, "default")) == 2, "the pod made after the restart")

            await asyncio.to_thread(server.stop)
            shutil.rmtree(tmp_path / "etcd")
            changed.clear()
            await asyncio.to_thread(apiserver.start, tmp_path, port=port)
            await until_async(lambda: found(pods, "default") == [], "that both pods are gone")
            assert set(changed) == {("default", "digits")}
            await client.create(PODS, "default", worker("default", 7))
            await until_async(lambda: [pod.slot for pod in found(pods, "default")] == [7], "the pod of the new history")

    try:
        asyncio.run(scenario())
    finally:
        server.stop()
