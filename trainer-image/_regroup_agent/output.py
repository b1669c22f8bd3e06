"""The container's log as the agent writes it: its own lines, and what the trainers write. Never blocks the agent.

A container runtime that does not read its pipe (a full disk on the node, a runtime that is stopped) must not freeze the
agent: pings would go unanswered, and the operator would give the worker up. So a thread writes, what waits for it is
bounded, and what does not fit is dropped and counted. Order is kept. A lone trainer's stdout does not come through here.
"""

from __future__ import annotations

import collections
import os
import select
import threading

MAX_BYTES = 4 << 20
"""So much may wait: more than a slow reader leaves unread, and little beside a training process."""
FLUSH_S = 1.0
"""So long a reader is waited for when the agent ends."""


class Output:
    """Writes to one file descriptor. Any thread may call it."""

    def __init__(self, fd: int, max_bytes: int = MAX_BYTES, *, name: str = "") -> None:
        """`name`: whose lines they are, where that is not clear from the log itself."""
        self._fd, self._max_bytes = fd, max_bytes
        self._prefix = f"regroup: {name}: " if name else "regroup: "
        self._waiting: collections.deque[bytes] = collections.deque()
        self._size = 0
        """Bytes that wait, those that are being written included."""
        self._dropped = 0
        """Lines that were dropped; until all that waits is written, and this is told, every further one is dropped, too."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Have one line of the agent's own written."""
        self.write(f"{self._prefix}{' '.join(text.split())}\n".encode("utf-8", "replace"))

    def write(self, data: bytes) -> None:
        """Have the bytes written, after those before them; drop them, and count their lines, if too much waits. Returns at
        once."""
        with self._changed:
            if self._thread is None:
                # Daemon: the agent's end waits for no reader.
                self._thread = threading.Thread(target=self._work, name="regroup-log", daemon=True)
                self._thread.start()
            if self._dropped or self._size + len(data) > self._max_bytes:
                self._dropped += data.count(b"\n") + (not data.endswith(b"\n"))
            else:
                self._add(data)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all is written; return False if it is not after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._size == 0, timeout_s)

    def _add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) > 0)
                data = self._waiting.popleft()
            self._write_all(data)
            with self._changed:
                self._size -= len(data)
                if self._dropped and not self._waiting:
                    self._add(
                        f"\n{self._prefix}{self._dropped} lines dropped, because the log was not read.\n".encode()
                    )
                    self._dropped = 0
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # somebody who shares the descriptor has made it so
                select.select([], [self._fd], [])
            except OSError:
                return  # nobody will ever read it: training goes on
