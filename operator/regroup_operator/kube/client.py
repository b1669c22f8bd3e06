"""A thin client of the kube-apiserver: dicts in, dicts out, a deadline on every request, typed errors.

It owns transport, authentication and the translation of failures. `kubernetes.aio` carries the bytes. Its generated
models are not used, since decoding a pod with them costs ten times the JSON. The client knows no resource of Regroup.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import orjson
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from regroup_operator.api import ConflictError, NotFoundError, RegroupError, UnavailableError

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
WATCH_SILENCE_S = 90.0
"""Silence after which a watch counts as dead. Bookmarks come about once a minute."""

MAX_RETRY_AFTER_S = 30.0
"""Longest wait that an answer may ask for. The API server itself asks for 1 s, but a proxy may ask for anything."""

METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
MERGE_PATCH = "application/merge-patch+json"


class ApiError(RegroupError):
    """The API server refused. `status` is the HTTP code (0: no answer), `reason` is Kubernetes' word (Invalid, Expired, ..)."""

    def __init__(self, status: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message or f"The API server answered {status} {reason}.")
        self.status = status
        self.reason = reason
        self.details = dict(details or {})


class ApiNotFound(ApiError, NotFoundError):
    """404."""


class ApiConflict(ApiError, ConflictError):
    """409: `reason` is Conflict (the resourceVersion or UID is not the newest) or AlreadyExists."""


class ApiGone(ApiError):
    """410: the resourceVersion or continue token is too old; list again."""


class ApiUnavailable(ApiError, UnavailableError):
    """No verdict: no connection, deadline passed, 429 or 5xx. The request may have taken effect."""


Observe = Callable[[str, str, int, float], None]
"""Called as observe(verb, resource, HTTP status, seconds) after each request. Status 0 means that there was no answer."""


@dataclass(frozen=True)
class Resource:
    """A kind of object by its place in the API; `group` is empty for the core."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of the collection, or of one object, or of its subresource."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part is not None]
        return "/" + "/".join(quote(part, safe="") for part in parts)


PODS = Resource("", "v1", "pods")
NODES = Resource("", "v1", "nodes")
SERVICES = Resource("", "v1", "services")
CONFIG_MAPS = Resource("", "v1", "configmaps")
SECRETS = Resource("", "v1", "secrets")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
EVENTS = Resource("events.k8s.io", "v1", "events")
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews")


class Client:
    """Verbs on resources. Every method raises ApiError or one of its subclasses; `timeout_s` bounds the whole call."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self._api = ApiClient(configuration)
        self._refresher: asyncio.Task[None] | None = None
        self.observe: Observe = lambda _verb, _resource, _code, _seconds: None

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> Client:
        """Return a client for `kubeconfig`. Without one it is for the cluster that this process runs in, else for ~/.kube/config.

        Raises RegroupError with a sentence if neither is usable.
        """
        configuration = Configuration()
        path = kubeconfig or os.environ.get("KUBECONFIG") or None
        if path is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            try:
                kube_config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
            except kube_config.ConfigException as error:
                raise RegroupError(f"The pod's service account cannot be used: {error}") from None
            return cls(configuration)
        try:
            loader = await kube_config.load_kube_config(  # type: ignore[no-untyped-call]
                path, context, configuration, persist_config=False
            )
        except (kube_config.ConfigException, OSError, TypeError) as error:
            raise RegroupError(
                f"The kubeconfig {path or '~/.kube/config'} cannot be used: {error}. Set KUBECONFIG to a usable one."
            ) from None
        client = cls(configuration)
        refresh = kube_config.refresh_token(loader, configuration)  # type: ignore[no-untyped-call]
        client._refresher = asyncio.create_task(refresh)
        return client

    async def close(self) -> None:
        """Close all connections."""
        if self._refresher is not None:
            self._refresher.cancel()
        await self._api.close()  # type: ignore[no-untyped-call]

    async def bearer_token(self) -> str | None:
        """Return the token of requests now, without its scheme, or None if there is a client certificate instead."""
        return (await self._authorization()).split(" ", 1)[-1] or None

    async def _authorization(self) -> str:
        """Return the header's value. It is read anew if the token is a file or comes from a helper program."""
        settings: Mapping[str, Any] = await self.configuration.auth_settings()
        value = settings.get("BearerToken", {}).get("value") or ""
        if value and " " not in value:
            value = f"Bearer {value}"
        return str(value)

    async def get(
        self, resource: Resource, namespace: str | None, name: str, *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> dict[str, Any]:
        """Return the object as it is now."""
        return await self._call(("get", resource), "GET", resource.path(namespace, name), timeout_s=timeout_s)

    async def document(self, path: str, *, accept: str = "", timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any]:
        """Return the JSON object at a path that is no resource."""
        return await self._call(("get", Resource("", "", path)), "GET", path, accept=accept, timeout_s=timeout_s)

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        limit: int = 500,
        continue_token: str = "",
        metadata_only: bool = False,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Return one page. Its metadata.continue is the next call's `continue_token`."""
        query = {"limit": str(limit), "labelSelector": label_selector, "continue": continue_token}
        accept = METADATA_ONLY if metadata_only else ""
        return await self._call(
            ("list", resource), "GET", resource.path(namespace), query=query, accept=accept, timeout_s=timeout_s
        )

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str = "",
        server_timeout_s: int = 290,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield {type, object} events, bookmarks included, until the server ends the watch. Raises ApiGone on 410."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "labelSelector": label_selector,
            "timeoutSeconds": str(server_timeout_s),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=WATCH_SILENCE_S)
        response = await self._send(
            ("watch", resource), "GET", resource.path(namespace), query, None, "application/json", timeout
        )
        try:
            if response.status != 200:
                raise _refused(response, await response.read())
            async for line in response.content:
                event = orjson.loads(line)
                if event["type"] == "ERROR":
                    raise error_of(event["object"].get("code") or 500, line, event["object"])
                yield event
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise ApiUnavailable(0, "Transport", f"The watch of {resource.plural} broke: {_text(error)}.") from error
        finally:
            response.close()

    async def create(
        self,
        resource: Resource,
        namespace: str | None,
        body: Mapping[str, Any],
        *,
        dry_run: bool = False,
        strict: bool = False,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Create the object and return it. `strict` refuses unknown and duplicate fields instead of dropping them."""
        query = {"dryRun": "All" if dry_run else "", "fieldValidation": "Strict" if strict else ""}
        return await self._call(
            ("create", resource), "POST", resource.path(namespace), query=query, body=body, timeout_s=timeout_s
        )

    async def replace(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Mapping[str, Any],
        *,
        subresource: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> dict[str, Any]:
        """PUT the object. With metadata.resourceVersion in `body` it is a compare-and-swap (ApiConflict)."""
        return await self._call(
            ("update", resource), "PUT", resource.path(namespace, name, subresource), body=body, timeout_s=timeout_s
        )

    async def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Mapping[str, Any],
        *,
        subresource: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Merge-patch the object: keys with None are removed."""
        path = resource.path(namespace, name, subresource)
        return await self._call(
            ("patch", resource), "PATCH", path, body=body, content_type=MERGE_PATCH, timeout_s=timeout_s
        )

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Delete the object.

        With `uid` only the object with that UID is deleted, and with `resource_version` only an unchanged one. Any
        other raises ApiConflict.
        """
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        only = {"uid": uid, "resourceVersion": resource_version}
        if uid is not None or resource_version is not None:
            body["preconditions"] = {key: value for key, value in only.items() if value is not None}
        await self._call(("delete", resource), "DELETE", resource.path(namespace, name), body=body, timeout_s=timeout_s)

    async def _call(
        self,
        what: tuple[str, Resource],
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        accept: str = "",
        timeout_s: float,
    ) -> dict[str, Any]:
        if timeout_s <= 0:  # aiohttp would take it for no deadline at all
            raise ApiUnavailable(0, "Timeout", f"No time is left for {method} {path}.")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
        response = await self._send(what, method, path, query or {}, body, content_type, timeout, accept)
        try:
            data = await response.read()
            if response.status >= 300:
                raise _refused(response, data)
            found: dict[str, Any] = orjson.loads(data)
            return found
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise ApiUnavailable(0, "Transport", f"No answer to {method} {path}: {_text(error)}.") from error
        finally:
            response.release()

    async def _send(
        self,
        what: tuple[str, Resource],
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
        accept: str = "",
    ) -> aiohttp.ClientResponse:
        text = urlencode({key: value for key, value in query.items() if value})
        headers = {
            "Accept": accept or "application/json",
            "Content-Type": content_type,
            "User-Agent": "regroup-operator",
        }
        authorization = await self._authorization()
        if authorization:
            headers["Authorization"] = authorization
        url = f"{self.configuration.host}{path}{'?' + text if text else ''}"
        started_s, code = time.monotonic(), 0
        try:
            wrapped = await self._api.call_api(method, url, headers, body, _request_timeout=timeout)
            code = wrapped.response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnavailable(0, "Transport", f"No answer to {method} {path}: {_text(error)}.") from error
        finally:
            verb, resource = what
            self.observe(verb, resource.plural, code, time.monotonic() - started_s)
        response: aiohttp.ClientResponse = wrapped.response
        return response


def error_of(status: int, data: bytes, body: Mapping[str, Any] | None = None, *, retry_after: str = "") -> ApiError:
    """Return the typed error for an answer that is no success.

    `body` is the Status object if it is already decoded. `retry_after` is the header of that name.
    """
    if body is None:
        body = {}
        with contextlib.suppress(ValueError):
            decoded = orjson.loads(data)
            body = decoded if isinstance(decoded, dict) else {}
    reason = str(body.get("reason") or "")
    message = str(body.get("message") or data[:200].decode(errors="replace").strip())
    kind: type[ApiError] = ApiError
    if status == 404:
        kind = ApiNotFound
    elif status == 409:
        kind = ApiConflict
    elif status == 410 or reason in ("Expired", "Gone"):
        kind = ApiGone
    elif status == 429 or status >= 500 or status == 0:
        kind = ApiUnavailable
    error = kind(status, reason, message, body.get("details"))
    if isinstance(error, ApiUnavailable) and retry_after.isdecimal():
        # A date instead of seconds is allowed, too; the API server sends none.
        error.retry_after_s = min(float(retry_after), MAX_RETRY_AFTER_S)
    return error


def _refused(response: aiohttp.ClientResponse, data: bytes) -> ApiError:
    return error_of(response.status, data, retry_after=response.headers.get("Retry-After", ""))


def _text(error: BaseException) -> str:
    """Return a short text for a transport error. A time-out has no text of its own."""
    return str(error) or type(error).__name__
