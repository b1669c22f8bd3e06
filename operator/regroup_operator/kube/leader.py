"""The label by which the membership Service finds the leader among the operator's pods."""

from __future__ import annotations

import asyncio
import logging

from regroup_operator.api.names import LABEL_LEADER
from regroup_operator.kube.client import PODS, ApiError, Client

log = logging.getLogger(__name__)

RETRY_S = 2.0


async def claim(client: Client, namespace: str, pod_name: str) -> None:
    """Label this pod as the leader and take the label from all others. Return when both are done.

    The leader calls it at the start of its term. It retries for ever: without the label no agent finds the leader.
    """
    while True:
        try:
            await client.patch(PODS, namespace, pod_name, _label("true"))
            page = await client.list(PODS, namespace, label_selector=f"{LABEL_LEADER}=true")
            for pod in page.get("items") or ():
                if pod["metadata"]["name"] != pod_name:
                    await client.patch(PODS, namespace, pod["metadata"]["name"], _label(None))
            return
        except ApiError as error:
            log.warning("The leader's label could not be set: %s", error)
        await asyncio.sleep(RETRY_S)


async def give_up(client: Client, namespace: str, pod_name: str, timeout_s: float = 2.0) -> None:
    """Take the label from this pod. A failure is only logged, since the next leader takes it, too."""
    try:
        await client.patch(PODS, namespace, pod_name, _label(None), timeout_s=timeout_s)
    except ApiError as error:
        log.warning("The leader's label could not be removed: %s", error)


def _label(value: str | None) -> dict[str, object]:
    return {"metadata": {"labels": {LABEL_LEADER: value}}}
