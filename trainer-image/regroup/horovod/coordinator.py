"""The coordinator: a thread on rank 0 that hears the requests of all ranks and sends each of them the same orders.

It sleeps in `select` until a rank says something, so a job that computes costs it nothing. A connection that ends without a
goodbye is a rank that has died. Then all others hear it at once, whatever they wait for. The thread ends with the last connection.
"""

from __future__ import annotations

import hmac
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from regroup.horovod.channel import Frames, frame, notice_lost_machines
from regroup.horovod.negotiation import Order, Table, request_of, to_wire

_LONGEST_STALL_S = 30 * 86400.0
"""Longer times are endless, because `select` cannot wait for as long as they may say."""
JOIN_WITHIN_S = 300.0
"""Time in which all ranks must have connected. They have just formed a group, so this takes milliseconds."""
HELLO_BYTES = 32
STALL_S = "HOROVOD_STALL_CHECK_TIME_SECONDS"
STALL_OFF = "HOROVOD_STALL_CHECK_DISABLE"
"""Variables of Horovod's. A time of 0, and any value but 0 of the second one, turn the check off."""
DEFAULT_STALL_S = 10.0
"""Time for which all ranks must wait for different names before that is an error. Another thread of a rank may still ask."""


def stall_s(environ: Mapping[str, str]) -> float:
    """Return the time after which ranks that wait for different names get an error. It is infinite if they may wait for ever."""
    if environ.get(STALL_OFF, "").strip() not in ("", "0"):
        return math.inf
    try:
        given_s = float(environ.get(STALL_S, DEFAULT_STALL_S))
    except ValueError:
        return DEFAULT_STALL_S
    if math.isnan(given_s):
        return DEFAULT_STALL_S
    return max(given_s, 0.1) if 0 < given_s <= _LONGEST_STALL_S else math.inf


class Coordinator:
    """Serves the ranks of one world. Rank 0 talks to it over a socket, too."""

    def __init__(self, listener: socket.socket, size: int, token: bytes) -> None:
        self._listener, self._token = listener, token
        self._table = Table(size)
        self._size = size
        self._ranks: dict[int, socket.socket] = {}
        self._frames: dict[socket.socket, Frames] = {}
        self._heard_s = 0.0
        """Time of the last request."""
        self._stall_s = stall_s(os.environ)
        self._broken = ""
        self.thread = threading.Thread(target=self._serve, name="regroup-horovod-coordinator", daemon=True)
        _coordinators.add(self)

    def close_in_child(self) -> None:
        """Close the connections in a forked child. They must end with this process alone, since their end tells of its death."""
        for connection in (self._listener, *self._ranks.values()):
            connection.close()

    def _serve(self) -> None:
        try:
            self._accept()
            self._loop()
        except Exception as error:  # whatever it is, the ranks must not wait for a thread that has ended
            self._break(f"The coordinator on rank 0 has failed: {type(error).__name__}: {error}.")
        finally:
            for connection in (self._listener, *self._ranks.values()):
                connection.close()

    def _accept(self) -> None:
        """Let each rank in that knows the token. A stranger is let go."""
        deadline_s = time.monotonic() + JOIN_WITHIN_S
        while len(self._ranks) < self._size:
            self._listener.settimeout(max(deadline_s - time.monotonic(), 0.01))
            connection, _ = self._listener.accept()
            connection.settimeout(5)
            try:
                hello = _exactly(connection, HELLO_BYTES + 4)
            except OSError:
                hello = b""
            rank = int.from_bytes(hello[HELLO_BYTES:], "big") if len(hello) > HELLO_BYTES else -1
            if (
                not hmac.compare_digest(hello[:HELLO_BYTES], self._token)
                or rank in self._ranks
                or not 0 <= rank < self._size
            ):
                connection.close()
                continue
            connection.settimeout(None)
            notice_lost_machines(connection)
            self._ranks[rank] = connection
            self._frames[connection] = Frames()
        self._listener.close()

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._ranks.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while self._ranks and not self._broken:
                orders: list[Order] = []
                for key, _ in selector.select(self._timeout_s()):
                    connection = self._ranks[key.data]
                    try:
                        data = connection.recv(1 << 20)
                    except OSError:
                        data = b""
                    if not data:
                        selector.unregister(connection)
                        self._lost(key.data)
                        break
                    for message in self._frames[connection].feed(data):
                        orders += self._take(key.data, message)
                if self._table.is_stuck() and time.monotonic() - self._heard_s >= self._stall_s:
                    orders += self._table.give_up()
                if orders:
                    self._tell({"orders": [to_wire(order) for order in orders]})

    def _timeout_s(self) -> float | None:
        if math.isinf(self._stall_s) or not self._table.is_stuck():
            return None
        return max(self._stall_s - (time.monotonic() - self._heard_s), 0.0)

    def _take(self, rank: int, message: dict[str, Any]) -> list[Order]:
        if "failed" in message:
            self._break(f"Rank {rank} could not run a collective: {message['failed']}")
            return []
        if "wait" in message:
            set_id, name = message["wait"]
            self._table.wait(rank, (int(set_id), str(name)))
            return []
        self._heard_s = time.monotonic()
        if "bye" in message:
            return self._table.leave(rank)
        return self._table.take(rank, request_of(message["ask"]))

    def _lost(self, rank: int) -> None:
        """End the connection of a rank. Without a goodbye the world is broken for all."""
        self._ranks.pop(rank).close()
        if rank not in self._table.gone:
            self._break(f"Rank {rank} has ended without hvd.shutdown().")

    def _break(self, why: str) -> None:
        if not self._broken:
            self._broken = why
            self._tell({"broken": why})

    def _tell(self, message: dict[str, Any]) -> None:
        data = frame(message)
        for connection in list(self._ranks.values()):
            try:
                connection.sendall(data)
            except OSError:
                pass  # the next recv says that this rank has ended


_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()


def _close_in_child() -> None:
    for coordinator in list(_coordinators):
        coordinator.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            break
        data += more
    return data


def listen() -> socket.socket:
    """Return a socket that hears IPv4 and, where there is any, IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
