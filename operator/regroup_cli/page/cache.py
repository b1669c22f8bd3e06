"""Keep what was read for the page, so that the load on the API server does not depend on the number of open browsers.

One value is read once for all who ask, and again only if somebody asks. A reading that takes long is repeated less often. The last
value stays while nothing newer can be read. Nobody waits longer than a few seconds, whatever hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from regroup_client.errors import ApiError, ClientError, JobError
from regroup_client.log_streams import LogsError

FRESH_S = 2.0
"""Shortest time between two readings of the same value."""
RETRY_S = 5.0
"""Time until the next reading after one that failed."""
REST = 4
"""A reading that took S seconds is not repeated for REST * S seconds: at most a fifth of the time is spent on it."""
MAX_REST_S = 15.0
FIRST_WAIT_S = 8.0
"""Longest wait of a request for the first value."""
NEXT_WAIT_S = 1.0
"""Longest wait of a request for a newer value than the one that is kept."""
MAX_KEPT = 32
"""Values that are kept. The one that nobody has asked for longest is forgotten, unless it is being read."""
MAX_READERS = 4
"""Readings at the same time."""
MAX_LONG = 2
"""Readings of logs at the same time. They may take long, and other readings must not wait for them."""
OLD_S = 5.0
"""Age from which on a value is called old while a newer one is being read."""


@dataclass(frozen=True)
class Kept:
    """The newest known value, and the trouble of the newest reading."""

    value: Any = None
    """The last one that was read; None before the first."""
    at: str = ""
    """Time of day of that reading, in UTC."""
    trouble: str = ""
    """The error of the newest reading, or an empty text."""
    is_refused: bool = False
    """There is no such thing, or the user may not see it. The last value is forgotten then."""


@dataclass
class _Entry:
    kept: Kept = field(default_factory=Kept)
    read_s: float = 0.0
    """Time when the value was read."""
    next_s: float = float("-inf")
    """Time from which on the value is read again."""
    reading: asyncio.Task[None] | None = None


def rest_s(took_s: float, *, failed: bool) -> float:
    """Return the time until the next reading, after one that took `took_s`."""
    return max(RETRY_S if failed else FRESH_S, min(MAX_REST_S, REST * took_s))


def after(kept: Kept, value: Any, now: str) -> Kept:
    """Return what is known after a reading that returned `value`, or raised it if it is an error."""
    if not isinstance(value, ClientError):
        return Kept(value, now)
    if is_final(value):
        return Kept(trouble=str(value), is_refused=True)
    return replace(kept, trouble=str(value), is_refused=False)


def is_final(error: ClientError) -> bool:
    """Return whether an error says that there is nothing to show, rather than that nobody answered."""
    if isinstance(error, (ApiError, LogsError)):
        return error.is_final
    return isinstance(error, JobError)


class Cache:
    """Values by their keys. All methods are called in one event loop; readings run in threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, today: Callable[[], str] | None = None) -> None:
        self._clock = clock
        self._today = today or (lambda: datetime.now(UTC).strftime("%H:%M:%S"))
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._free = asyncio.Semaphore(MAX_READERS)
        self._free_for_long = asyncio.Semaphore(MAX_LONG)

    async def get(self, key: Hashable, read: Callable[[], Any], *, is_long: bool = False) -> Kept:
        """Return what is known of a value, after a reading if it is due. `read` runs in a thread and may raise ClientError.

        `is_long`: the reading may take long.
        """
        entry = self._entries.get(key)
        if entry is None:
            if not self._make_room():
                return Kept(trouble="Too many things are read at once.")
            entry = self._entries[key] = _Entry()
        self._entries.move_to_end(key)
        if entry.reading is None and self._clock() >= entry.next_s:
            entry.reading = asyncio.create_task(self._read(entry, read, is_long))
        if entry.reading is not None:
            is_first = entry.kept.value is None and not entry.kept.trouble
            await asyncio.wait({entry.reading}, timeout=FIRST_WAIT_S if is_first else NEXT_WAIT_S)
        if entry.kept == Kept():
            return Kept(trouble="There is no answer yet.")
        if entry.reading is not None and not entry.kept.trouble and self._clock() - entry.read_s > OLD_S:
            return replace(entry.kept, trouble="There is no newer answer yet.")
        return entry.kept

    def _make_room(self) -> bool:
        """Forget the oldest value if there are too many. Return whether there is room.

        A value that is being read stays: otherwise the next request would begin another reading of it.
        """
        while len(self._entries) >= MAX_KEPT:
            idle = next((key for key, one in self._entries.items() if one.reading is None), None)
            if idle is None:
                return False
            del self._entries[idle]
        return True

    async def _read(self, entry: _Entry, read: Callable[[], Any], is_long: bool) -> None:
        try:
            async with self._free_for_long if is_long else contextlib.nullcontext(), self._free:
                began_s = self._clock()
                value = await _in_thread(read)
                entry.kept = after(entry.kept, value, self._today())
                is_failure, now_s = isinstance(value, ClientError), self._clock()
                entry.read_s = entry.read_s if is_failure else now_s
                entry.next_s = now_s + rest_s(now_s - began_s, failed=is_failure)
        finally:
            entry.reading = None

    def close(self) -> None:
        """Begin no more readings, and wait for none."""
        for entry in self._entries.values():
            if entry.reading is not None:
                entry.reading.cancel()


async def _in_thread(read: Callable[[], Any]) -> Any:
    """Return what `read` returns, or its error.

    The thread does not keep the process alive: it may wait for the API server for 30 s.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any) -> None:
        if not done.done():
            done.set_result(value)

    def work() -> None:
        value: Any
        try:
            value = read()
        except ClientError as error:
            value = error
        except Exception as error:  # a bug must not stop the page: it is shown, and the value is read again
            value = ClientError(f"The page failed to read this ({type(error).__name__}: {error}).")
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value)

    threading.Thread(target=work, name="page", daemon=True).start()
    return await done
