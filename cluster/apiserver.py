"""etcd and kube-apiserver as two plain processes: enough for tests of the resource, and the heart of `up`.

`start` and `stop` need no root. Without a controller manager and nodes nothing acts on stored objects: there are no
default service accounts, no garbage collection, and no pods run. So the bare form runs without service account
admission.
"""

import os
import shutil
import socket
import ssl
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import binaries, processes
from cluster.errors import ClusterError
from cluster.kubectl import wait_until
from cluster.pki import Authority

SERVICE_RANGE = "10.97.0.0/16"
SERVICE_ADDRESS = "10.97.0.1"
_READY_TIMEOUT_S = 60.0
_HOSTS = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "127.0.0.1",
    SERVICE_ADDRESS,
)


@dataclass(frozen=True)
class ApiServer:
    """A running API server with its own etcd; its administrator's kubeconfig lies at `kubeconfig`."""

    directory: Path
    url: str
    kubeconfig: Path

    def stop(self) -> None:
        """Stop both processes and wait until they are gone; the data stay."""
        stop(self.directory)


@contextmanager
def running(directory: Path) -> Iterator[ApiServer]:
    """Yield a fresh bare API server on free loopback ports whose state lies in `directory`; end it afterwards."""
    server = start(directory)
    try:
        yield server
    finally:
        kill(directory)
        shutil.rmtree(directory / "etcd", ignore_errors=True)


def start(
    directory: Path,
    *,
    address: str = "127.0.0.1",
    port: int | None = None,
    arguments: Sequence[str] = ("--disable-admission-plugins=ServiceAccount",),
) -> ApiServer:
    """Start etcd and kube-apiserver and return once /readyz says ok (about 3 s); what already runs is kept.

    `port` None takes a free one. `arguments` are appended to kube-apiserver's own. Builds the binaries if needed.
    """
    programs = binaries.ensure()
    authority = Authority(directory / "pki")
    authority.issue("apiserver", user="kube-apiserver", hosts=sorted({*_HOSTS, address}))
    authority.issue("admin", user="admin", groups=["system:masters"])
    authority.issue("apiserver-kubelet-client", user="kube-apiserver-kubelet-client", groups=["system:masters"])
    authority.issue("front-proxy-client", user="front-proxy-client")
    port_file = directory / "ports"
    if processes.recorded(directory, "kube-apiserver") and processes.recorded(directory, "etcd"):
        port = int(port_file.read_text())
    else:
        stop(directory)
        port = port or free_port()
        port_file.write_text(str(port))
        _start_processes(directory, programs, authority, address, port, arguments)
    url = f"https://{address}:{port}"
    kubeconfig = authority.kubeconfig("admin", url)
    _wait_ready(directory, authority, url)
    return ApiServer(directory, url, kubeconfig)


def stop(directory: Path) -> None:
    """Stop the API server, then etcd, and wait for both. The API server drains for up to 3 s and holds its port."""
    processes.stop(directory, "kube-apiserver", grace_s=8)
    processes.stop(directory, "etcd")


def kill(directory: Path) -> None:
    """End both without grace and wait for them. Data that etcd had not written is lost, so the state must not be read again."""
    for name in ("kube-apiserver", "etcd"):
        processes.stop(directory, name, grace_s=0)


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start_processes(
    directory: Path, programs: Path, authority: Authority, address: str, port: int, arguments: Sequence[str]
) -> None:
    pki = authority.directory
    client_url, peer_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    processes.spawn(
        directory,
        "etcd",
        [
            programs / "etcd",
            f"--data-dir={directory / 'etcd'}",
            # A throw-away cluster: after a power cut of the whole machine `up` starts anew anyway.
            "--unsafe-no-fsync",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--log-level=warn",
        ],
    )
    processes.spawn(
        directory,
        "kube-apiserver",
        [
            programs / "kube-apiserver",
            f"--etcd-servers={client_url}",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            f"--secure-port={port}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP,Hostname",
            f"--requestheader-client-ca-file={pki}/ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
            f"--proxy-client-key-file={pki}/front-proxy-client.key",
            "--allow-privileged=true",
            "--profiling=false",
            *arguments,
        ],
        environment={**os.environ, "GOMAXPROCS": "2"},
    )


def _wait_ready(directory: Path, authority: Authority, url: str) -> None:
    context = ssl.create_default_context(cafile=str(authority.certificate_file("ca")))
    context.load_cert_chain(authority.certificate_file("admin"), authority.key_file("admin"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))

    def ready() -> bool:
        for name in ("etcd", "kube-apiserver"):
            if not processes.recorded(directory, name):
                raise ClusterError(f"{name} ended at once: {processes.log_tail(directory, name)}")
        try:
            with opener.open(f"{url}/readyz", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    try:
        wait_until(ready, "the API server is ready", timeout_s=_READY_TIMEOUT_S)
    except ClusterError:
        stop(directory)
        raise
