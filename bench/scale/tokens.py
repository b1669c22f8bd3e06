"""Projected service account tokens as the kubelet has them, signed here with the API server's own key: without a request."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

ISSUER = "https://kubernetes.default.svc.cluster.local"
"""As cluster/apiserver.py starts the API server."""
VALID_S = 3600


@dataclass(frozen=True)
class ServiceAccount:
    """Whose token it is. The API server checks that the account with this UID exists."""

    namespace: str
    name: str
    uid: str


class TokenMint:
    """Signs tokens that the API server takes for its own."""

    def __init__(self, key_file: Path) -> None:
        """`key_file`: sa.key in the PKI directory of the API server, a P-256 key."""
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        public = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        header = {"alg": "ES256", "kid": _encoded(hashlib.sha256(public).digest())}
        self._head = _encoded(json.dumps(header).encode())

    def token(
        self,
        account: ServiceAccount,
        pod_name: str,
        pod_uid: str,
        *,
        audiences: Sequence[str] = ("regroup",),
        issued_s: float | None = None,
        valid_s: float = VALID_S,
    ) -> str:
        """Return a token that is bound to this pod. `issued_s`: seconds since the epoch, absent: now."""
        at = int(time.time() if issued_s is None else issued_s)
        claims: dict[str, Any] = {
            "aud": list(audiences),
            "exp": at + int(valid_s),
            "iat": at,
            "iss": ISSUER,
            "kubernetes.io": {
                "namespace": account.namespace,
                "pod": {"name": pod_name, "uid": pod_uid},
                "serviceaccount": {"name": account.name, "uid": account.uid},
            },
            "nbf": at,
            "sub": f"system:serviceaccount:{account.namespace}:{account.name}",
        }
        signing = f"{self._head}.{_encoded(json.dumps(claims).encode())}"
        r, s = utils.decode_dss_signature(self._key.sign(signing.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signing}.{_encoded(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
