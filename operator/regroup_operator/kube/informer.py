"""Keep a slim copy of one collection in memory: LIST in pages, then WATCH, for ever.

Owns the copy and its truth: after any loss (410, restart of the API server, a broken connection) it lists again, and what
vanished meanwhile is reported as vanished (REPLACE), which kopf never does. Owns no meaning: `slim` turns an object into
the caller's record or None (not interesting), `on_change(old, new)` hears of each difference between records, never of
equal ones.
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
"""(namespace, name); the namespace of a cluster-wide object is empty."""

BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 10.0
SHORT_WATCH_S = 1.0
"""A watch that ends in order sooner than this, without an event, has failed: who ends one will likely end the next one, too."""


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
        """Make `objects` the whole content: what is not among them has vanished."""
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
        """Take one watch event: ADDED, MODIFIED, DELETED or BOOKMARK."""
        item = event["object"]
        if event["type"] == "DELETED":
            self._drop(name_of(item))
        elif event["type"] in ("ADDED", "MODIFIED"):
            self._put(name_of(item), item)
        self.resource_version = item["metadata"]["resourceVersion"]

    def made(self, item: Mapping[str, Any]) -> None:
        """Take the answer to a create, which may come long before its event does. One that the watch has passed is dropped: what
        it shows of the object is newer, even that it is gone. Versions are compared as in job_cache.py."""
        if _number(item["metadata"]["resourceVersion"]) > _number(self.resource_version):
            self._put(name_of(item), item)

    def _put(self, name: Name, item: Mapping[str, Any]) -> None:
        old = self.items.get(name)
        try:
            new = self._slim(item, old)
        except Exception:  # it must not end the copy of all others, nor stand for the object's end
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
    """Runs a Copy against the API server. `run()` in a task; read `items` once `synced` is set."""

    def __init__(
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
        """`namespace` None: all. `slim(object, previous record)` must be pure but for the clock that it may carry."""
        self.copy: Copy[T] = Copy(slim, on_change)
        self.synced = asyncio.Event()
        self.num_lists = 0
        """How often the whole collection was listed; more than once means that a watch was lost for good."""
        self._client = client
        self._resource = resource
        self.namespace = namespace
        self._selector = label_selector
        self._page_size = page_size
        self._clock, self._sleep = clock, sleep
        self._backoff_s = BACKOFF_MIN_S

    @property
    def items(self) -> dict[Name, T]:
        """The records as last heard; do not change it."""
        return self.copy.items

    async def run(self) -> None:
        """List and watch until cancelled. Failures of the API server are waited out with back-off and logged once each."""
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
            except Exception:  # an event that is none: what it would have said is not known
                log.exception("Informer of %s: the watch cannot be read. Listing again.", self._resource.plural)
            # Watching on from our version would be cheaper, but a server whose store was restored from a backup takes a
            # version that it never had for one of the future, and says nothing until it gets there (measured, 1.36).
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
        """Follow the collection until the server ends the watch in order. Returns whether that was of use: an event, or a while."""
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
    """Return a resourceVersion as an integer; 0 for one that is none."""
    return int(resource_version) if resource_version.isdecimal() else 0


def name_of(item: Mapping[str, Any]) -> Name:
    """Return (namespace, name) of an object."""
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
