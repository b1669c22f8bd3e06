"""A service account issuer: tokens as the kubelet has them, and the documents that the API server serves of its keys."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

ISSUER = "https://kubernetes.default.svc"
NOW = 1_000_000.0
POD_NAME, POD_UID = "digits-worker-0-0", "pod-uid"

_CURVES = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}


class Key:
    """A signing key. Its id is its name, not a digest: a thief's key may claim another one's id."""

    def __init__(self, algorithm: str, key_id: str, private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> None:
        self.algorithm, self.key_id, self.private = algorithm, key_id, private

    @property
    def pem(self) -> bytes:
        """The public key."""
        return self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def jwk(self) -> dict[str, Any]:
        """Return the public key as the API server serves it."""
        return jwk_of(self.private.public_key()) | {"use": "sig", "kid": self.key_id, "alg": self.algorithm}

    def token(self, **changes: Any) -> str:
        """Return a token of the pod, signed with this key."""
        return jwt.encode(claims(**changes), self.private, self.algorithm, {"kid": self.key_id})

    def by_hmac(self, **changes: Any) -> str:
        """Return a token that is signed with the public key as the secret of an HMAC."""
        signing = _signing({"alg": "HS256", "kid": self.key_id}, claims(**changes))
        return f"{signing}.{_encoded(hmac.digest(self.pem, signing.encode(), hashlib.sha256))}"

    def unsigned(self, **changes: Any) -> str:
        """Return a token without signature that says so."""
        return _signing({"alg": "none", "kid": self.key_id}, claims(**changes)) + "."


def jwk_of(
    key: rsa.RSAPublicKey | rsa.RSAPrivateKey | ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey,
) -> dict[str, Any]:
    """Return the key's numbers as a JSON Web Key."""
    if isinstance(key, rsa.RSAPublicKey | rsa.RSAPrivateKey):
        found: dict[str, Any] = json.loads(RSAAlgorithm.to_jwk(key))
    else:
        found = json.loads(ECAlgorithm.to_jwk(key))
    found.pop("key_ops", None)
    return found


@cache
def key(algorithm: str = "ES256", key_id: str = "key-1", number: int = 0) -> Key:  # noqa: ARG001
    """Return the same key for the same arguments, and another one for another `number`."""
    if algorithm.startswith("RS"):
        return Key(algorithm, key_id, rsa.generate_private_key(65537, 2048))
    return Key(algorithm, key_id, ec.generate_private_key(_CURVES[algorithm]))


def claims(**changes: Any) -> dict[str, Any]:
    """Return the claims of a projected token of the pod, which was issued at NOW for an hour."""
    return {
        "aud": ["regroup"],
        "exp": NOW + 3600,
        "iat": NOW,
        "iss": ISSUER,
        "kubernetes.io": bound(),
        "nbf": NOW,
        "sub": "system:serviceaccount:team:default",
    } | changes


def bound(**pod: Any) -> dict[str, Any]:
    """Return the claim that binds a token to the pod."""
    account = {"name": "default", "uid": "sa-uid"}
    return {"namespace": "team", "pod": {"name": POD_NAME, "uid": POD_UID, **pod}, "serviceaccount": account}


def documents(*keys: Key, issuer: str = ISSUER) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the OpenID configuration and the key set."""
    return {"issuer": issuer, "jwks_uri": f"{issuer}/openid/v1/jwks"}, {"keys": [key.jwk() for key in keys]}


def unverified(**changes: Any) -> str:
    """Return a token whose key is not named and whose signature is none."""
    return _signing({"alg": "RS256"}, claims(**changes)) + ".c2ln"


def _signing(header: Mapping[str, Any], payload: Mapping[str, Any]) -> str:
    return f"{_encoded(json.dumps(header).encode())}.{_encoded(json.dumps(payload).encode())}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
