"""Requests to the API server as dicts, over a Unix socket or TLS. Standard library only, synchronous, safe for threads.

Each request has a connection of its own, which costs little on a socket. Whoever follows many logs has a thread for each.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from regroup_client.errors import CLOSED, ApiError

Object = dict[str, Any]
TIMEOUT_S = 30.0
"""Longest wait for the answer to a request, and for its next bytes. A login in a browser may take it up."""
CHUNK = 65536
FIELD_MANAGER = "regroup"
_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


class Route(Protocol):
    """A way to the API server."""

    def open(self, timeout_s: float | None) -> tuple[http.client.HTTPConnection, Mapping[str, str]]:
        """Return a new connection, and the headers that each request on it needs."""

    def trouble(self, error: Exception) -> str:
        """Return what is known about a connection that failed with an error, or an empty text."""


class _Unix(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)  # kubectl proxy refuses other names
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class SocketRoute:
    """The way through a proxy that listens on a Unix socket and adds the login."""

    path: str

    errors: Callable[[], str] = lambda: ""
    """Returns the last error that the proxy has printed."""

    def open(self, timeout_s: float | None) -> tuple[http.client.HTTPConnection, Mapping[str, str]]:
        """Return a connection to the socket."""
        return _Unix(self.path, timeout_s), {}

    def trouble(self, error: Exception) -> str:
        """Say that the proxy has ended, or return its last error."""
        if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):  # a proxy that was killed leaves its socket
            return "its kubectl proxy has ended; start the command again"
        return self.errors()


@dataclass(frozen=True)
class TlsRoute:
    """The way of a pod: TLS, and the token of its service account."""

    host: str
    port: int
    trusted: ssl.SSLContext
    token: Callable[[], str]

    def open(self, timeout_s: float | None) -> tuple[http.client.HTTPConnection, Mapping[str, str]]:
        """Return a TLS connection and the header with the token. Raises AccessError."""
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=self.trusted)
        return connection, {"Authorization": f"Bearer {self.token()}"}

    def trouble(self, error: Exception) -> str:  # noqa: ARG002 (of the protocol)
        """Return an empty text, because nobody prints errors here."""
        return ""


@dataclass(frozen=True)
class Kind:
    """A kind of object by its place in the API. `group` is empty for the core."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the path of the collection, of one object, or of a part of it. Without `namespace`: of all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(quote(part, safe="") for part in parts)


JOBS = Kind("regroup.dev", "v1alpha1", "distributedtrainingjobs")
PODS = Kind("", "v1", "pods")
EVENTS = Kind("", "v1", "events")
CONFIG_MAPS = Kind("", "v1", "configmaps")
CLAIMS = Kind("", "v1", "persistentvolumeclaims")


class Stream:
    """The body of an answer that goes on: a log or a watch. `close` may be called by another thread, and ends the reader."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response, self._socket = connection, response, connection.sock
        self._closed = False

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes as they come, until the server ends the answer or `close` is called. Raises ApiError."""
        try:
            while chunk := self._response.read1(CHUNK):
                yield chunk
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
            AttributeError,
        ) as error:  # of a socket closed meanwhile
            if not self._closed:
                raise ApiError(0, "NoAnswer", f"The connection to the API server ended ({_why(error)}).") from None
        finally:
            self.close()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines without their ends. A line has no bound: the caller shortens it. Raises ApiError."""
        rest = b""
        for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
        if rest:
            yield rest

    def close(self) -> None:
        """End the answer. A second call does nothing."""
        self._closed = True
        with contextlib.suppress(OSError, AttributeError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._connection.close()


class Asked:
    """A request for a stream that was sent. The answer may be read later, so that many requests are on their way at once."""

    def __init__(self, connection: http.client.HTTPConnection, answer: Callable[[], http.client.HTTPResponse]) -> None:
        self._connection, self._answer, self._socket = connection, answer, connection.sock
        self._is_read = False

    def stream(self, limit_s: float | None = None) -> Stream:
        """Wait for the begin of the answer, and return it. Raises ApiError.

        `limit_s`: longest wait for its next bytes. Without it a reader of TLS is woken only if the other machine is gone.
        """
        self._is_read = True
        response = self._answer()
        if response.status != 200:
            said = b""
            with contextlib.closing(self._connection), contextlib.suppress(OSError, http.client.HTTPException):
                said = response.read()  # it fails where another thread closes the request meanwhile
            raise _refused(response.status, _body(said))
        if self._connection.sock is not None:
            self._connection.sock.settimeout(limit_s)
            _keep_alive(self._connection.sock)
        return Stream(self._connection, response)

    def close(self) -> None:
        """End the request. It wakes a thread that waits for the answer."""
        with contextlib.suppress(OSError, AttributeError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_read:  # else its reader closes the connection, which is in use until then
            self._connection.close()


class Api:
    """The API server of one cluster with the rights of one user. Every method raises ApiError."""

    def __init__(self, route: Route, namespace: str, closed: threading.Event | None = None) -> None:
        """Take a route, and the namespace that is meant if a call names none. `closed`: of the Api that shares the route."""
        self._route, self._closed = route, closed or threading.Event()
        self.namespace = namespace

    def close(self) -> None:
        """Refuse further requests. Whoever retries requests then knows that another attempt would fail, too."""
        self._closed.set()

    def in_namespace(self, namespace: str) -> Api:
        """Return the same API server, with another namespace for calls that name none."""
        return Api(self._route, namespace, self._closed)

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        """Return one object."""
        return self._json("GET", kind.path(namespace or self.namespace, name))

    def find(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """Return one object, or None if there is none."""
        try:
            return self.get(kind, name, namespace)
        except ApiError as error:
            if error.status == 404 and error.reason == "NotFound":
                return None
            raise

    def list(self, kind: Kind, namespace: str | None = None, *, everywhere: bool = False, **query: str) -> list[Object]:
        """Return the objects of a kind. `query` has labelSelector, fieldSelector and the like."""
        found = self._json("GET", kind.path(None if everywhere else namespace or self.namespace), query)
        items: list[Object] = found.get("items") or []
        return items

    def watch(
        self, kind: Kind, namespace: str | None = None, *, everywhere: bool = False, **query: str
    ) -> Iterator[Object]:
        """Yield {type, object} until the server ends the watch. Without resourceVersion it begins with all objects as they are.

        If `query` has timeoutSeconds, a connection whose other end is gone raises ApiError soon after that time.
        """
        path = kind.path(None if everywhere else namespace or self.namespace)
        limit_s = int(query["timeoutSeconds"]) + TIMEOUT_S if "timeoutSeconds" in query else None
        with contextlib.closing(self.ask(path, {**query, "watch": "true"}).stream(limit_s)) as stream:
            for line in stream.lines():
                event = _parsed(line)
                if event.get("type") == "ERROR":
                    raise _refused(int((event.get("object") or {}).get("code") or 0), event.get("object") or {})
                yield event

    def log(self, pod: str, namespace: str | None = None, **query: str) -> Stream:
        """Return the log of a pod as a stream. `query` has container, follow, previous, sinceSeconds, tailLines, timestamps."""
        return self.ask_log(pod, namespace, **query).stream()

    def ask_log(self, pod: str, namespace: str | None = None, **query: str) -> Asked:
        """Ask for the log of a pod, as `log` does, and do not wait for the answer."""
        return self.ask(PODS.path(namespace or self.namespace, pod, "log"), query)

    def apply(self, kind: Kind, item: Object, *, dry_run: bool = False, force: bool = False) -> Object:
        """Apply an object on the server, and return what is stored. A dry run checks everything and stores nothing."""
        return self.applied(kind, item, dry_run=dry_run, force=force)[0]

    def applied(self, kind: Kind, item: Object, *, dry_run: bool = False, force: bool = False) -> tuple[Object, bool]:
        """Apply an object, and return what is stored and whether this request has created it."""
        metadata = item["metadata"]
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "force": str(force).lower()}
        query |= {"dryRun": "All"} if dry_run else {}
        path = kind.path(metadata.get("namespace") or self.namespace, metadata["name"])
        status, found = self._done("PATCH", path, query, item, _APPLY)
        return found, status == 201

    def create(self, kind: Kind, item: Object, namespace: str | None = None) -> Object:
        """Create an object, and return it as stored."""
        path = kind.path(item["metadata"].get("namespace") or namespace or self.namespace)
        return self._json("POST", path, {"fieldManager": FIELD_MANAGER}, item)

    def patch(
        self, kind: Kind, name: str, change: Object, namespace: str | None = None, *, subresource: str = ""
    ) -> Object:
        """Change the fields in `change` by a merge patch, and return the object."""
        path = kind.path(namespace or self.namespace, name, subresource)
        return self._json("PATCH", path, {"fieldManager": FIELD_MANAGER}, change, _MERGE)

    def delete(
        self, kind: Kind, name: str, namespace: str | None = None, *, uid: str = "", grace_s: int | None = None
    ) -> None:
        """Delete an object if it is there. With `uid`, another object of the same name stays."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        options |= {"preconditions": {"uid": uid}} if uid else {}
        options |= {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            self._json("DELETE", kind.path(namespace or self.namespace, name), None, options)
        except ApiError as error:
            if error.status not in (404, 409):  # 409: another UID
                raise

    def ask(self, path: str, query: Mapping[str, str] | None = None) -> Asked:
        """Send GET `path`, and do not wait for the answer."""
        connection = self._send("GET", path, query, None, "")
        return Asked(connection, lambda: self._answer(connection))

    def stream(self, path: str, query: Mapping[str, str] | None = None) -> Stream:
        """Return the answer to GET `path` as a stream. After its begin there is no time limit."""
        return self.ask(path, query).stream()

    def _json(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "",
    ) -> Object:
        return self._done(verb, path, query, body, content)[1]

    def _done(
        self, verb: str, path: str, query: Mapping[str, str] | None, body: Object | None, content: str
    ) -> tuple[int, Object]:
        """Return the status, which is below 300, and the object."""
        connection = self._send(verb, path, query, body, content)
        response = self._answer(connection)
        with contextlib.closing(connection):
            try:
                answer = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._silent(error) from None
        if response.status >= 300:
            raise _refused(response.status, _body(answer))
        return response.status, _parsed(answer)

    def _send(
        self, verb: str, path: str, query: Mapping[str, str] | None, body: Object | None, content: str
    ) -> http.client.HTTPConnection:
        if self._closed.is_set():
            raise _ended()
        connection, headers = self._route.open(TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        sent = {"Accept": "application/json", **headers}
        sent |= {} if data is None else {"Content-Type": content or "application/json"}
        try:
            connection.request(verb, f"{path}?{urlencode(query)}" if query else path, data, sent)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._silent(error) from None
        return connection

    def _answer(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        try:
            return connection.getresponse()
        except (
            OSError,
            http.client.HTTPException,
            AttributeError,
        ) as error:  # AttributeError: closed by another thread
            connection.close()
            raise self._silent(error) from None

    def _silent(self, error: Exception) -> ApiError:
        if self._closed.is_set():
            return _ended()
        known = self._route.trouble(error)
        return ApiError(0, "NoAnswer", f"The API server gave no answer ({known or _why(error)}). Try again.")


def _ended() -> ApiError:
    return ApiError(0, CLOSED, "The connection to the cluster is closed. Make a new client.")


def _keep_alive(stream: socket.socket) -> None:
    """Have the kernel ask after the other machine while a log is silent, and end the connection if it is gone."""
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # Linux
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "nothing came in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _body(answer: bytes) -> Object:
    """Return the Status object of an answer. Proxies answer with text, which becomes the message."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    lines = answer.decode(errors="replace").strip().splitlines()
    return {"message": lines[0][:300] if lines else ""}


def _parsed(answer: bytes) -> Object:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(
            0, "NoJSON", f"The API server did not send JSON, but: {answer[:100]!r}. Check what answers there."
        )
    return found


def _refused(status: int, said: Mapping[str, Any]) -> ApiError:
    """Return the refusal as an exception. A login that kubectl could not make comes as text with status 500 or 502."""
    return ApiError(status, str(said.get("reason") or ""), str(said.get("message") or ""))
