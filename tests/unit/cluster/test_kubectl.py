"""What is read without kubectl: the answer, or the sentence of a call that may succeed later."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, NotYetError


class _Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections: ClassVar[set[tuple[str, int]]] = set()

    def do_GET(self) -> None:
        """Answer with the query, or as the API server does where nothing is, or nobody may look."""
        self.connections.add(self.client_address)
        path, _, query = self.path.partition("?")
        status, message = (200, "") if path == "/api/v1/pods" else (404, 'pods "x" not found')
        if self.headers["Authorization"] != "Bearer t":
            status, message = 401, "Unauthorized"
        body = query if status == 200 else json.dumps({"kind": "Status", "message": message})
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _kubeconfig(directory: Path, port: int, token: str = "t") -> Path:
    file = directory / "kubeconfig"
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    users = [{"name": "u", "user": {"token": token}}]
    file.write_text(json.dumps({"contexts": [context], "clusters": [cluster], "users": users, "current-context": "c"}))
    return file


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    _Api.connections.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Api) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_answers_come_over_one_connection(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    kubectl = Kubectl(_kubeconfig(tmp_path, server.server_port))
    for _ in range(3):
        assert kubectl.read("/api/v1/pods", labelSelector="a=b") == "labelSelector=a%3Db"
    assert len(_Api.connections) == 1


def test_refusal_carries_the_servers_message(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    with pytest.raises(NotYetError, match='GET /api/v1/pods/x: 404 pods "x" not found'):
        Kubectl(_kubeconfig(tmp_path, server.server_port)).read("/api/v1/pods/x")


def test_wrong_token_is_refused(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    with pytest.raises(NotYetError, match="401 Unauthorized"):
        Kubectl(_kubeconfig(tmp_path, server.server_port, token="wrong")).read("/api/v1/pods")


def test_proxy_of_the_environment_is_not_asked_for_our_own_cluster(
    tmp_path: Path, server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert Kubectl(_kubeconfig(tmp_path, server.server_port)).read("/api/v1/pods", a="b") == "a=b"


def test_no_server_is_not_yet(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(NotYetError, match="GET /api/v1/pods: "):
        Kubectl(_kubeconfig(tmp_path, server.server_port)).read("/api/v1/pods")


@pytest.mark.parametrize("text", [None, "{", ""], ids=["not there", "half written", "empty"])
def test_kubeconfig_that_cannot_be_read_is_a_sentence(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "kubeconfig"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ClusterError, match="The kubeconfig cannot be used: "):
        Kubectl(file).read("/api/v1/pods")
