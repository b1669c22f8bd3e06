"""What the agent is sent: in order, and not each commit."""

from __future__ import annotations

import threading
import time

from harness.polling import until
from regroup.generation.outbox import EVERY_S, Outbox


class Wire:
    """Keeps what is written, and when."""

    def __init__(self) -> None:
        self.written: list[object] = []
        self.at_s: list[float] = []

    def write(self, message: object) -> None:
        self.written.append(message)
        self.at_s.append(time.monotonic())


def test_newest_progress_arrives_without_a_further_commit() -> None:
    wire = Wire()
    outbox = Outbox(wire.write)
    for step in range(100):
        outbox.send_soon(step)
    until(lambda: wire.written[-1] == 99, "the last step")
    assert len(wire.written) <= 4  # the first, the last, and one on a machine that hesitates
    assert wire.at_s[-1] - wire.at_s[0] >= 0.9 * EVERY_S
    outbox.close()


def test_thread_that_has_nothing_to_send_is_woken() -> None:
    wire = Wire()
    outbox = Outbox(wire.write)
    for burst in range(3):
        for step in range(3):
            outbox.send_soon((burst, step))
        until(lambda burst=burst: wire.written[-1:] == [(burst, 2)], "the last of a burst", timeout_s=5)  # type: ignore[misc]
    outbox.close()


def test_progress_is_not_more_often_than_that() -> None:
    wire = Wire()
    outbox = Outbox(wire.write)
    began_s, step = time.monotonic(), 0
    while time.monotonic() - began_s < 10 * EVERY_S:
        outbox.send_soon(step)
        step += 1
        threading.Event().wait(0.001)
    outbox.close()
    assert wire.written[-1] == step - 1
    assert len(wire.written) <= (wire.at_s[-1] - wire.at_s[0]) / EVERY_S + 3
    assert sorted(wire.written) == wire.written  # type: ignore[type-var]


def test_other_messages_come_after_what_was_held_back() -> None:
    wire = Wire()
    outbox = Outbox(wire.write)
    for message in (1, 2, 3):
        outbox.send_soon(message)
    outbox.send("left")
    outbox.send_soon(4)
    outbox.close()
    assert wire.written == [1, 3, "left", 4]
