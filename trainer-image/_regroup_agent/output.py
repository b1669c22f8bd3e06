"""Writes the container's log: lines of the agent and of the trainers. Never blocks the agent.

A container runtime may stop reading its pipe, for example while the node's disk is full. If the agent blocked then, pings would
go unanswered and the operator would give the worker up. So a thread writes in order, from a queue of bounded size, and
lines that do not fit are dropped and counted. The stdout of a pod's only trainer comes through here only if its lines are searched
for its progress (spec.progress.log).
"""

from __future__ import annotations

import collections
import os
import select
import threading

MAX_BYTES = 4 << 20
"""Size of the queue: more than a slow reader leaves unread, and little beside the memory of a training process."""
FLUSH_S = 1.0
"""Longest wait for a reader when the agent ends."""


class Output:
    """A queue of lines for one file descriptor, and the thread that writes them. Any thread may call its methods."""

    def __init__(self, fd: int, max_bytes: int = MAX_BYTES, *, name: str = "") -> None:
        """Write to `fd`. A `name` appears in the agent's own lines, if several agents write to one log."""
        self._fd, self._max_bytes = fd, max_bytes
        self._prefix = f"regroup: {name}: " if name else "regroup: "
        self._waiting: collections.deque[bytes] = collections.deque()
        self._size = 0
        """Bytes in the queue, with those that the thread is writing."""
        self._dropped = 0
        """Lines dropped since the queue was last empty. While it is above 0 each further line is dropped as well."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Queue one line of the agent's own."""
        self.write(f"{self._prefix}{' '.join(text.split())}\n".encode("utf-8", "replace"))

    def write(self, data: bytes) -> None:
        """Queue bytes to be written, or drop them and count their lines if the queue is full. Returns at once."""
        with self._changed:
            if self._thread is None:
                # Daemon, so that the agent can end without a reader.
                self._thread = threading.Thread(target=self._work, name="regroup-log", daemon=True)
                self._thread.start()
            if self._dropped or self._size + len(data) > self._max_bytes:
                self._dropped += data.count(b"\n") + (not data.endswith(b"\n"))
            else:
                self._add(data)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until the queue is empty. Returns False if it is not after `timeout_s`."""
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
            except BlockingIOError:  # another process with the same descriptor has made it non-blocking
                select.select([], [self._fd], [])
            except OSError:
                return  # the reader has gone; training goes on
