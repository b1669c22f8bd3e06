"""Frames of JSON on a socket between a rank and the coordinator. Nothing that a peer sends is unpickled."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MOST_BYTES = 1 << 28
"""Longest frame. A group of 100,000 tensors needs 10 MB."""
LOST_AFTER_S = 30
"""Time after which a machine that answers nothing counts as lost."""


def frame(message: Any) -> bytes:
    """Return the bytes of one message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">I", len(body)) + body


def send(connection: socket.socket, message: Any) -> None:
    """Send one message. The caller sees to it that no two threads send at once."""
    connection.sendall(frame(message))


class Frames:
    """Puts the messages of one peer together from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that are complete with these bytes. Raises ValueError for what is no message."""
        self._bytes += data
        messages = []
        while len(self._bytes) >= 4:
            (length,) = struct.unpack_from(">I", self._bytes)
            if length > MOST_BYTES:
                raise ValueError(f"a message of {length} bytes")
            if len(self._bytes) < 4 + length:
                break
            messages.append(json.loads(bytes(self._bytes[4 : 4 + length])))
            del self._bytes[: 4 + length]
        return messages


def notice_lost_machines(connection: socket.socket) -> None:
    """Have the kernel end the connection to a machine that has lost its power or its network. No process says goodbye then."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", LOST_AFTER_S * 1000),
    )
    for name, value in options:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
