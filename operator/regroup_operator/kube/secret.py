"""Key material in a Secret of the operator's own namespace. The first replica makes it, and all others read it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping

from regroup_operator.api import NotFoundError
from regroup_operator.kube.client import SECRETS, ApiConflict, Client


async def load_or_create(
    client: Client, namespace: str, name: str, make: Callable[[], Mapping[str, bytes]]
) -> dict[str, bytes]:
    """Return the Secret's data. If there is none, store the result of `make()`, unless another replica was first.

    Raises ApiError if the Secret may not be read or created.
    """
    try:
        found = await client.get(SECRETS, namespace, name)
    except NotFoundError:
        data = {key: base64.b64encode(value).decode() for key, value in make().items()}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/name": "regroup"}},
            "type": "Opaque",
            "data": data,
        }
        try:
            found = await client.create(SECRETS, namespace, body)
        except ApiConflict:
            found = await client.get(SECRETS, namespace, name)
    return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
