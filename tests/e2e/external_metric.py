"""An external metric for autoscalers, as an adapter of a monitoring system would serve it: an aggregated API of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cluster import addresses
from cluster.kubectl import Kubectl, wait_until
from regroup_operator.endpoint.certificates import Authority, server_context

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
NAME = "queued-samples"
"""Of the metric, and of the Service that leads to this process."""


class ExternalMetric:
    """One number, for every namespace. Set `value`; autoscalers read it every 15 s."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.num_reads = 0

    def answer(self, path: str) -> dict[str, Any]:
        """Return what the API says to a GET."""
        version = f"{GROUP}/{VERSION}"
        if not path.split("?")[0].endswith(f"/{NAME}"):
            verbs = {"name": NAME, "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": [verbs]}
        self.num_reads += 1
        item = {"metricName": NAME, "metricLabels": {}, "value": str(self.value)}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "kind": "ExternalMetricValueList",
            "apiVersion": version,
            "metadata": {},
            "items": [item | {"timestamp": now}],
        }


@contextmanager
def external_metric(kubectl: Kubectl, namespace: str, value: int) -> Iterator[ExternalMetric]:
    """Serve the metric while the block lasts. The Service is in `namespace`; the API is the whole cluster's."""
    metric = ExternalMetric(value)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.dumps(metric.answer(self.path)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer((addresses.HOST_ADDRESS, 0), Handler)
    context = server_context(*Authority.create().issue([NAME], [addresses.HOST_ADDRESS]))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        kubectl.apply(*_documents(namespace, server.server_address[1]))
        service = f"{VERSION}.{GROUP}"
        wait_until(
            lambda: "True" in _available(kubectl, service),
            "the API server reaches the metric",
            timeout_s=30,
            every_s=0.5,
        )
        yield metric
    finally:
        kubectl.run("delete", "apiservice", f"{VERSION}.{GROUP}", "--ignore-not-found")
        kubectl.run("--namespace", namespace, "delete", "service", NAME, "--ignore-not-found")
        server.shutdown()
        server.server_close()
        thread.join(10)


def _available(kubectl: Kubectl, service: str) -> str:
    path = "--output=jsonpath={.status.conditions[?(@.type=='Available')].status}"
    return kubectl.run("get", "apiservice", service, path)


def _documents(namespace: str, port: int) -> list[dict[str, Any]]:
    metadata = {"name": NAME, "namespace": namespace}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata | {"labels": {"kubernetes.io/service-name": NAME}},
            "addressType": "IPv4",
            "ports": [{"name": "https", "port": port}],
            "endpoints": [{"addresses": [addresses.HOST_ADDRESS], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "service": {"namespace": namespace, "name": NAME, "port": 443},
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        },
    ]
