"""The messages to the agent, in order. Of progress only the newest is sent, at most every EVERY_S.

A commit may take two milliseconds, and agent and operator do not need each. A thread sends what was held back, so that the last
commit before a long step is known in time. While the agent does not read, progress is held back, too: training goes on.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

EVERY_S = 0.05


class Outbox:
    """Any thread may send. `write` sends one message; it is called under a lock, one call after the other. `has_room`: whether a
    message of progress can be written without waiting for the agent to read."""

    def __init__(self, write: Callable[[Any], None], has_room: Callable[[], bool]) -> None:
        self._write, self._has_room = write, has_room
        self._changed = threading.Condition()
        self._held: Any = None
        self._sent_s = -EVERY_S
        """Monotonic time of the last message of progress."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def send(self, message: Any) -> None:
        """Send one message, after what was held back."""
        with self._changed:
            self._flush()
            self._write(message)

    def send_soon(self, message: Any) -> None:
        """Send progress: now, or within EVERY_S, unless something newer takes its place. It never waits for the agent."""
        with self._changed:
            if time.monotonic() - self._sent_s >= EVERY_S and self._has_room():
                self._held = message
                self._flush()
                return
            idle, self._held = self._held is None, message
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="regroup-outbox", daemon=True)
                self._thread.start()
            elif idle:
                self._changed.notify()

    def close(self) -> None:
        """Send what was held back, and end the thread."""
        with self._changed:
            self._flush()
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=1)

    def _flush(self) -> None:
        message, self._held = self._held, None
        if message is not None:
            self._sent_s = time.monotonic()
            self._write(message)

    def _work(self) -> None:
        with self._changed:
            while not self._closed:
                if self._held is None:
                    self._changed.wait()
                    continue
                left_s = self._sent_s + EVERY_S - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                elif self._has_room():
                    self._flush()
                else:
                    self._changed.wait(EVERY_S)
