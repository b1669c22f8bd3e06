"""The certificates, the service-account key and the kubeconfigs of one cluster, in one directory, made once."""

import datetime
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=3650)
_Key = ec.EllipticCurvePrivateKey


class Authority:
    """The cluster's certificate authority. It writes its files into `directory`, and keeps those that exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        if not self.certificate_file("ca").exists():
            key = _new_key(self.key_file("ca"))
            name = _name("kube-ca", ())
            builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
            _write(self.certificate_file("ca"), builder.sign(key, hashes.SHA256()))
        self._key = _load_key(self.key_file("ca"))
        self._name = x509.load_pem_x509_certificate(self.certificate_file("ca").read_bytes()).subject
        if not (directory / "sa.pub").exists():
            public = _new_key(self.key_file("sa")).public_key()
            (directory / "sa.pub").write_bytes(
                public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            )

    def certificate_file(self, name: str) -> Path:
        """Return the path of a certificate."""
        return self.directory / f"{name}.crt"

    def key_file(self, name: str) -> Path:
        """Return the path of a private key."""
        return self.directory / f"{name}.key"

    def issue(self, name: str, *, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        """Write a key and a certificate for a user in `groups`. With `hosts` (DNS names and addresses) it is one for a
        server, too."""
        if self.certificate_file(name).exists():
            return
        key = _new_key(self.key_file(name))
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = _builder(_name(user, groups), self._name, key).add_extension(usages, False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), False)
        _write(self.certificate_file(name), builder.sign(self._key, hashes.SHA256()))

    def kubeconfig(self, name: str, server: str) -> Path:
        """Write a self-contained kubeconfig for an issued certificate, and return its path."""
        file = self.directory / f"{name}.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "regroup",
            "contexts": [{"name": "regroup", "context": {"cluster": "regroup", "user": name}}],
            "clusters": [
                {
                    "name": "regroup",
                    "cluster": {"server": server, "certificate-authority": str(self.certificate_file("ca"))},
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate": str(self.certificate_file(name)),
                        "client-key": str(self.key_file(name)),
                    },
                }
            ],
        }
        file.write_text(json.dumps(config, indent=1))
        file.chmod(0o600)
        return file


def _builder(subject: x509.Name, issuer: x509.Name, key: _Key) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
    )


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key(file: Path) -> _Key:
    key = ec.generate_private_key(ec.SECP256R1())
    file.touch(mode=0o600)
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return key


def _load_key(file: Path) -> _Key:
    key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    assert isinstance(key, _Key)
    return key


def _write(file: Path, certificate: x509.Certificate) -> None:
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
