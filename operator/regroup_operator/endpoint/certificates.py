"""The operator's own certificate authority: one CA for years, serving keys for days. Elliptic-curve P-256."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS = 3650
_CLOCK_SKEW = datetime.timedelta(minutes=5)


class Authority:
    """A CA that signs the endpoint's serving certificates. `ca_pem` is public, `key_pem` stays with the operator."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def create(cls) -> Authority:
        """Return a new CA, valid for CA_DAYS."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "regroup membership CA")])
        builder = (
            _builder(name, name, key.public_key(), CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, ca_pem: bytes, key_pem: bytes) -> Authority:
        """Return the CA of two PEM texts. Raises ValueError for what is not one."""
        key = serialization.load_pem_private_key(key_pem, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the CA's key is not an elliptic-curve key")
        return cls(x509.load_pem_x509_certificate(ca_pem), key)

    @property
    def ca_pem(self) -> bytes:
        """The CA's certificate: what agents verify against."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The CA's private key, unencrypted: for the operator's own Secret only."""
        return _key_pem(self._key)

    def issue(self, names: Iterable[str], ips: Iterable[str] = (), days: float = 7) -> tuple[bytes, bytes]:
        """Return (certificate, key) as PEM for a server of these DNS names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = list(names)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "regroup membership endpoint")])
        others = [x509.DNSName(n) for n in names] + [x509.IPAddress(ipaddress.ip_address(ip)) for ip in ips]
        authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(subject, self._certificate.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(others), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(authority_id, critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def certificates(pem: bytes) -> list[str]:
    """Return each certificate of a PEM text as one with a final newline, so that they can be joined. Raises ValueError if it has
    none, or one that cannot be read."""
    found = x509.load_pem_x509_certificates(pem)
    return [certificate.public_bytes(serialization.Encoding.PEM).decode() for certificate in found]


def server_context(certificate_pem: bytes, key_pem: bytes) -> ssl.SSLContext:
    """Return a server's TLS context. Loading again with `reload` serves a new key without a restart."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    reload(context, certificate_pem, key_pem)
    return context


def reload(context: ssl.SSLContext, certificate_pem: bytes, key_pem: bytes) -> None:
    """Have `context` serve another certificate from the next connection on."""
    with tempfile.TemporaryDirectory() as directory:  # ssl reads files only; mode 0700, gone at once
        path = Path(directory, "serving.pem")
        path.touch(mode=0o600)
        path.write_bytes(certificate_pem + key_pem)
        context.load_cert_chain(path)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
