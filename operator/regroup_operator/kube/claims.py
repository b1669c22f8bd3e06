"""The claims in a projected service account token. Nothing here is verified."""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass
from typing import Any

import orjson

from regroup_operator.model.ports import Unauthorized


@dataclass(frozen=True)
class Claims:
    """The claims of a token that is bound to a pod, unverified."""

    key_id: str
    """Key that signed the token; empty if the token names none."""
    issuer: str
    audiences: tuple[str, ...]
    not_before: float
    """Seconds since the epoch; 0 if the token is valid from the start."""
    expires_at: float
    """Seconds since the epoch."""
    namespace: str
    pod_name: str
    pod_uid: str


def claims_of(token: str) -> Claims:
    """Return the unverified claims. Raises Unauthorized if the text is no projected token that is bound to a pod."""
    parts = token.split(".")
    try:
        if len(parts) != 3 or len(token) > 16_384 or not token.isascii():
            raise ValueError
        header, payload = _decoded(parts[0]), _decoded(parts[1])
        bound = payload["kubernetes.io"]
        audiences = payload["aud"]
        if isinstance(audiences, str):
            audiences = [audiences]
        return Claims(
            key_id=str(header.get("kid") or ""),
            issuer=str(payload.get("iss") or ""),
            audiences=tuple(str(audience) for audience in audiences),
            not_before=_time(payload.get("nbf") or 0.0),
            expires_at=_time(payload["exp"]),
            namespace=str(bound["namespace"]),
            pod_name=str(bound["pod"]["name"]),
            pod_uid=str(bound["pod"]["uid"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        raise Unauthorized("The token is not a projected service account token that is bound to a pod.") from None


def _decoded(part: str) -> Any:
    return orjson.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def _time(seconds: Any) -> float:
    """Return a time claim as seconds. Raises ValueError or TypeError if it is none."""
    value = float(seconds)
    if not math.isfinite(value):
        raise ValueError
    return value
