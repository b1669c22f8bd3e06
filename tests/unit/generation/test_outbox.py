"""What the agent is sent: in order, and not each commit; and what happens while it does not read."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from harness.polling import until
from regroup.generation import outbox as outbox_module
from regroup.generation.outbox import EVERY_S, Outbox
from regroup.generation.watcher import Watcher
from regroup.protocol import local


class Wire:
    """Keeps what is written, and when."""

    def __init__(self) -> None:
        self.written: list[object] = []
        self.at_s: list[float] = []
        self.is_full = False

    def has_room(self) -> bool:
        return not self.is_full

    def write(self, message: object) -> None:
        self.written.append(message)
        self.at_s.append(time.monotonic())


def test_newest_progress_arrives_without_a_further_commit() -> None:
    wire = Wire()
    outbox = Outbox(wire.write, wire.has_room)
    for step in range(100):
        outbox.send_soon(step)
    until(lambda: wire.written[-1] == 99, "the last step")
    assert len(wire.written) <= 4  # the first, the last, and one on a machine that hesitates
    assert wire.at_s[-1] - wire.at_s[0] >= 0.9 * EVERY_S
    outbox.close()


def test_thread_that_has_nothing_to_send_is_woken() -> None:
    wire = Wire()
    outbox = Outbox(wire.write, wire.has_room)
    for burst in range(3):
        for step in range(3):
            outbox.send_soon((burst, step))
        until(lambda burst=burst: wire.written[-1:] == [(burst, 2)], "the last of a burst", timeout_s=5)  # type: ignore[misc]
    outbox.close()


def test_progress_is_not_more_often_than_that() -> None:
    wire = Wire()
    outbox = Outbox(wire.write, wire.has_room)
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
    outbox = Outbox(wire.write, wire.has_room)
    for message in (1, 2, 3):
        outbox.send_soon(message)
    outbox.send("left")
    outbox.send_soon(4)
    outbox.close()
    assert wire.written == [1, 3, "left", 4]


def test_newest_progress_arrives_once_there_is_room() -> None:
    wire = Wire()
    outbox = Outbox(wire.write, wire.has_room)
    wire.is_full = True
    for step in range(3):
        outbox.send_soon(step)
    outbox.send("left")  # whatever is no progress waits for the agent
    for step in range(3, 6):
        outbox.send_soon(step)
    assert wire.written == [2, "left"]
    wire.is_full = False
    until(lambda: wire.written[2:] == [5], "the newest step")
    outbox.close()


def test_agent_that_does_not_read_holds_up_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, or gets no CPU: the buffer of the real socket fills."""
    monkeypatch.setattr(outbox_module, "EVERY_S", 0.0)
    last = 20_000
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        watcher = Watcher(str(tmp_path / "agent"), local.Attach(1, 0, 1))
        agent, _ = listener.accept()

        def train() -> None:
            for step in range(1, last + 1):
                watcher.send_soon(local.Committed(1, step, step))

        trainer = threading.Thread(target=train, daemon=True)
        trainer.start()
        trainer.join(timeout=60)
        held_up = trainer.is_alive()
        read: list[int] = []

        def listen() -> None:
            with agent.makefile("rb") as lines:
                for line in lines:
                    message = local.FROM_TRAINER.decode_line(line)
                    read.extend([message.step] if isinstance(message, local.Committed) else [])

        reader = threading.Thread(target=listen, daemon=True)
        reader.start()
        until(lambda: read[-1:] == [last], "the newest step")
        watcher.close()
        reader.join(timeout=10)
        agent.close()
    assert not held_up
    assert len(read) < last, "the buffer was never full"
