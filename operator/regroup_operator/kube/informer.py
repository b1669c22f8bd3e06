"""Keeps a slim copy of one collection in memory: LIST in pages, then WATCH, for ever.

It owns the copy and its truth. After any loss (410, restart of the API server, a broken connection) it lists again.
It then reports the objects that vanished meanwhile, which kopf never does (rule REPLACE). It knows no meaning. `slim` turns an
object into the caller's record, or None to leave it out. `on_change(old, new)` is called for each difference between
records.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from regroup_operator.kube.client import ApiError, ApiGone, ApiUnavailable, Client, Resource

log = logging.getLogger(__name__)

T = TypeVar("T")
Name = tuple[str, str]
"""(namespace, name). The namespace of a cluster-wide object is empty."""

BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 10.0
SHORT_WATCH_S = 1.0
"""A watch that ends in order sooner than this, without an event, counts as failed: the next one will likely end so, too."""


class Copy(Generic[T]):
    """The records by name, and the rules that change them. Pure but for the callback."""

    def __init__(
        self,
        slim: Callable[[Mapping[str, Any], T | None], T | None],
        on_change: Callable[[T | None, T | None], None],
    ) -> None:
        self.items: dict[Name, T] = {}
        self.resource_version = ""
        self._slim = slim
        self._on_change = on_change

    def replace(self, objects: Iterable[Mapping[str, Any]], resource_version: str) -> None:
        """Make `objects` the whole content. Records that are not among them have vanished."""
        seen = set()
        for item in objects:
            try:
                name = name_of(item)
            except (KeyError, TypeError, AttributeError):
                log.warning("An object without a name is passed over: %.200s", item)
                continue
            seen.add(name)
            self._put(name, item)
        for name in [name for name in self.items if name not in seen]:
            self._drop(name)
        self.resource_version = resource_version

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply one watch event: ADDED, MODIFIED, DELETED or BOOKMARK."""
        item = event["object"]
        if event["type"] == "DELETED":
            self._drop(name_of(item))
        elif event["type"] in ("ADDED", "MODIFIED"):
            self._put(name_of(item), item)
        self.resource_version = item["metadata"]["resourceVersion"]

    def made(self, item: Mapping[str, Any]) -> None:
        """Add the object in the answer to a create, whose event may come much later.

        An answer older than the watch is dropped: the watch shows the newer object, or that it is gone. Versions are
        compared as in job_cache.py.
        """
        if _number(item["metadata"]["resourceVersion"]) > _number(self.resource_version):
            self._put(name_of(item), item)

    def _put(self, name: Name, item: Mapping[str, Any]) -> None:
        old = self.items.get(name)
        try:
            new = self._slim(item, old)
        except Exception:  # an unreadable object must not end the copy of all others, and is no deletion
            log.exception("%s/%s cannot be read, and stays as it was.", *name)
            return
        if new is None:
            self._drop(name)
        elif new != old:
            self.items[name] = new
            self._on_change(old, new)

    def _drop(self, name: Name) -> None:
        old = self.items.pop(name, None)
        if old is not None:
            self._on_change(old, None)


class Informer(Generic[T]):
    """Runs a Copy against the API server. `run()` is a task; read `items` once `synced` is set."""

    def __init__(  # noqa: PLR0913 - two callers, which name what they change
        self,
        client: Client,
        resource: Resource,
        slim: Callable[[Mapping[str, Any], T | None], T | None],
        on_change: Callable[[T | None, T | None], None],
        *,
        namespace: str | None = None,
        label_selector: str = "",
        page_size: int = 500,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Copy one namespace, or all with None. `slim(object, previous record)` must be pure but for a clock."""
        self.copy: Copy[T] = Copy(slim, on_change)
        self.synced = asyncio.Event()
        self.num_lists = 0
        """Number of times that the whole collection was listed. More than once means that a watch was lost for good."""
        self._client = client
        self._resource = resource
        self.namespace = namespace
        self._selector = label_selector
        self._page_size = page_size
        self._clock, self._sleep = clock, sleep
        self._backoff_s = BACKOFF_MIN_S

    @property
    def items(self) -> dict[Name, T]:
        """The records as last seen. The caller must not change them."""
        return self.copy.items

    async def run(self) -> None:
        """List and watch until cancelled. Failures of the API server lead to a back-off, and are logged once each."""
        while True:
            least_s = 0.0
            try:
                if not self.copy.resource_version:
                    await self._list()
                if not await self._watch():
                    log.warning("The watch of %s ended at once; it goes on in a moment.", self._resource.plural)
                    await self._pause()
                continue
            except ApiGone:
                log.info("The watch of %s is too old; listing again.", self._resource.plural)
            except ApiError as error:
                log.warning("Informer of %s: %s Listing again.", self._resource.plural, error)
                least_s = error.retry_after_s if isinstance(error, ApiUnavailable) else 0.0
            except Exception:  # an unreadable event: its content is lost, so the copy must be listed again
                log.exception("Informer of %s: the watch cannot be read. Listing again.", self._resource.plural)
            # Watching on from our version would be cheaper. But a server whose store was restored from a backup takes a version
            # that it never had for a future one, and sends nothing until it gets there (measured, 1.36).
            self.copy.resource_version = ""
            await self._pause(least_s)

    async def _pause(self, least_s: float = 0.0) -> None:
        await self._sleep(max(self._backoff_s * random.uniform(0.5, 1.5), least_s))
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)

    async def _list(self) -> None:
        objects: list[Mapping[str, Any]] = []
        token = ""
        while True:
            page = await self._client.list(
                self._resource,
                self.namespace,
                label_selector=self._selector,
                limit=self._page_size,
                continue_token=token,
            )
            objects += page.get("items") or []
            token = page["metadata"].get("continue") or ""
            if not token:
                break
        self.num_lists += 1
        self.copy.replace(objects, page["metadata"]["resourceVersion"])
        self.synced.set()

    async def _watch(self) -> bool:
        """Follow the collection until the server ends the watch in order. Return False if it ended at once without an event."""
        started_s, has_event = self._clock(), False
        stream = self._client.watch(
            self._resource,
            self.namespace,
            resource_version=self.copy.resource_version,
            label_selector=self._selector,
            server_timeout_s=random.randint(240, 300),
        )
        async with aclosing(stream) as events:  # type: ignore[type-var]
            async for event in events:
                self.copy.apply(event)
                self._backoff_s, has_event = BACKOFF_MIN_S, True
        if not has_event and self._clock() < started_s + SHORT_WATCH_S:
            return False
        self._backoff_s = BACKOFF_MIN_S
        return True


def _number(resource_version: str) -> int:
    """Return a resourceVersion as an integer; 0 if it is not a number."""
    return int(resource_version) if resource_version.isdecimal() else 0


def name_of(item: Mapping[str, Any]) -> Name:
    """Return (namespace, name) of an object."""
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
