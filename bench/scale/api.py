"""The benchmark's own client of the API server: plain requests and watches over connections that are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import urllib3

from bench.trials import BenchError

_TIMEOUT = urllib3.Timeout(connect=5, read=60)
_CONNECTIONS = 32


class Api:
    """Requests as the user of a kubeconfig that cluster/pki.py has written. Threads may share one."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._url = cluster["server"]
        self._pool = urllib3.PoolManager(
            ca_certs=cluster["certificate-authority"],
            cert_file=user["client-certificate"],
            key_file=user["client-key"],
            maxsize=_CONNECTIONS,
            retries=False,
        )
        self.is_closed = False
        self._watches: list[urllib3.BaseHTTPResponse] = []

    def get(self, path: str) -> Any:
        """Return the answer to GET. Raises BenchError, as all calls here, with the server's words."""
        return self._call("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Create an object and return it as the server has it."""
        return self._call("POST", path, body)

    def apply(self, path: str, body: Mapping[str, Any]) -> Any:
        """Create or change the object at `path` by server-side apply."""
        return self._call(
            "PATCH", f"{path}?fieldManager=bench&force=true", body, content_type="application/apply-patch+yaml"
        )

    def merge(self, path: str, body: Mapping[str, Any]) -> Any:
        """Change an object by a merge patch."""
        return self._call("PATCH", path, body, content_type="application/merge-patch+json")

    def delete(self, path: str, **options: Any) -> Any:
        """Delete an object; `options` are those of DeleteOptions, such as gracePeriodSeconds."""
        return self._call("DELETE", path, options)

    def watch(self, path: str, version: str) -> Iterator[Mapping[str, Any]]:
        """Yield the events of a collection after resource version `version`, until the server or `close` ends the watch."""
        answer = self._pool.request(
            "GET",
            f"{self._url}{path}?watch=true&resourceVersion={version}",
            preload_content=False,
            timeout=urllib3.Timeout(connect=5, read=None),
        )
        self._watches.append(answer)
        rest = b""
        try:
            for chunk in answer.stream(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield orjson.loads(line)
        except (urllib3.exceptions.HTTPError, OSError):
            pass  # closed, or the server has ended
        finally:
            self._watches.remove(answer)
            answer.close()

    def close(self) -> None:
        """End all watches, and close the connections that are kept; `is_closed` from then on."""
        self.is_closed = True
        for answer in list(self._watches):
            answer.shutdown()
        self._pool.clear()

    def _call(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None, *, content_type: str = "application/json"
    ) -> Any:
        try:
            answer = self._pool.request(
                verb,
                self._url + path,
                body=None if body is None else orjson.dumps(body),
                headers={"Content-Type": content_type, "Accept": "application/json"},
                timeout=_TIMEOUT,
            )
        except urllib3.exceptions.HTTPError as error:
            raise BenchError(f"{verb} {path}: {error}") from None
        if answer.status >= 300:
            raise BenchError(f"{verb} {path}: {answer.status} {answer.data[:600].decode(errors='replace')}")
        return orjson.loads(answer.data)
