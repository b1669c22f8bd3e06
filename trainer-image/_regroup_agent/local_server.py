"""The agent's Unix socket, to which the trainer processes connect. Reads and writes protocol.local, one JSON line each.

Owns the connections. A session's connection begins with `Attach` and lasts; it is known by its local rank. A short one carries
one message: `TakeStore`, `Observed` or `CannotRun`. One that carries `Stepped` stays open until the process closes it.
The core decides what a message means.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regroup.protocol import codec, local

MAX_LINE_BYTES = 1 << 20


class Connection:
    """One trainer's connection. It is a raw, non-blocking socket, since some of them carry a file descriptor."""

    def __init__(self, server: LocalServer, sock: socket.socket) -> None:
        self._server, self.sock = server, sock
        self.local_rank = self.incarnation = -1
        self.hook_of: tuple[int, int] | None = None
        """Local rank and incarnation of the unmodified script whose hook has this connection."""
        self._received = b""
        self._unsent = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def attached(self) -> bool:
        return self.local_rank >= 0

    def send(self, data: bytes) -> None:
        """Write data, at once as far as the socket takes it. The rest follows when the socket is writable."""
        if self.sock.fileno() < 0:
            return
        self._unsent += data
        self._writable()

    def close(self) -> None:
        """Close the connection and tell the server. A second call does nothing."""
        if self.sock.fileno() < 0:
            return
        self._loop.remove_reader(self.sock.fileno())
        self._loop.remove_writer(self.sock.fileno())
        self.sock.close()
        self._server.closed(self)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > MAX_LINE_BYTES:
            self._server.log(f"A trainer sent a line of more than {MAX_LINE_BYTES} bytes; its connection is closed.")
            self.close()
            return
        for line in lines:
            if line and self.sock.fileno() >= 0:
                self._server.line(self, line)

    def _writable(self) -> None:
        try:
            sent = self.sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self.sock.fileno(), self._writable)
        else:
            self._loop.remove_writer(self.sock.fileno())


class LocalServer:
    """Accepts the trainers' connections on the running event loop.

    - `expects(local_rank, incarnation)` returns whether this process runs; others are turned away.
    - `on_message(local_rank, incarnation, message)` is called for each message.
    - `on_closed(local_rank, incarnation)` is called when an attached connection has closed.
    - `on_unhooked(local_rank, incarnation)` is called when the connection of the hook in a script has closed.
    - `take_store(generation)` returns the socket to hand over, or None.
    """

    def __init__(
        self,
        path: str,
        *,
        expects: Callable[[int, int], bool],
        on_message: Callable[[int, int, Any], None],
        on_closed: Callable[[int, int], None],
        on_unhooked: Callable[[int, int], None],
        take_store: Callable[[int], socket.socket | None],
        log: Callable[[str], None],
    ) -> None:
        self.path = path
        self._expects, self._on_message = expects, on_message
        self._on_closed, self._on_unhooked = on_closed, on_unhooked
        self._take_store, self.log = take_store, log
        self._by_rank: dict[int, Connection] = {}
        self._hooks: dict[int, Connection] = {}
        """Connection of the hook in an unmodified script, by local rank."""
        Path(path).unlink(missing_ok=True)  # left by the agent before a container restart
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        Path(path).chmod(0o600)
        self._listener.listen(64)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def send(self, local_rank: int, message: Any) -> None:
        """Write a message to the process of a local rank, or to the hook in it. Does nothing if it has no connection."""
        connections = self._hooks if isinstance(message, (local.Hold, local.Go)) else self._by_rank
        connection = connections.get(local_rank)
        if connection is not None:
            connection.send(local.encode(message))

    def close(self) -> None:
        """Close the socket and remove its path."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)

    def line(self, connection: Connection, line: bytes) -> None:
        """Take in one line of a connection."""
        try:
            message = local.FROM_TRAINER.decode_line(line)
        except codec.ProtocolError as error:
            self.log(f"A trainer process sent an invalid message: {error}")
            connection.close()
            return
        if isinstance(message, local.TakeStore):
            self._give_store(connection, message)
        elif isinstance(message, local.Attach):
            self._attach(connection, message)
        elif isinstance(message, (local.Observed, local.CannotRun, local.Stepped, local.Held)):
            is_expected = self._expects(message.local_rank, message.incarnation)
            if is_expected and isinstance(message, (local.Stepped, local.Held)):
                connection.hook_of = (message.local_rank, message.incarnation)
                self._hooks[message.local_rank] = connection
            if is_expected:
                self._on_message(message.local_rank, message.incarnation, message)
            if not is_expected or not isinstance(message, (local.Stepped, local.Held)):
                connection.close()
        elif connection.attached:
            self._on_message(connection.local_rank, connection.incarnation, message)
        else:
            self.log(f"A process that has not attached sent {message.TYPE!r}; its connection is closed.")
            connection.close()

    def closed(self, connection: Connection) -> None:
        """Forget a connection that has closed."""
        if connection.attached and self._by_rank.get(connection.local_rank) is connection:
            del self._by_rank[connection.local_rank]
            self._on_closed(connection.local_rank, connection.incarnation)
        if connection.hook_of is not None and self._hooks.get(connection.hook_of[0]) is connection:
            del self._hooks[connection.hook_of[0]]
            self._on_unhooked(*connection.hook_of)

    def _attach(self, connection: Connection, message: local.Attach) -> None:
        if not self._expects(message.local_rank, message.incarnation):
            self.log(
                f"Process {message.local_rank}, incarnation {message.incarnation}, attached but is not the one that runs."
            )
            connection.close()
            return
        old = self._by_rank.pop(message.local_rank, None)
        connection.local_rank, connection.incarnation = message.local_rank, message.incarnation
        self._by_rank[message.local_rank] = connection
        if old is not None and old is not connection:
            old.close()
        self._on_message(message.local_rank, message.incarnation, message)

    def _give_store(self, connection: Connection, message: local.TakeStore) -> None:
        given = self._take_store(message.generation)
        try:
            if given is None:
                connection.sock.send(b"0")
            else:
                socket.send_fds(connection.sock, [b"1"], [given.fileno()])
        except OSError as error:
            self.log(f"The store's socket could not be handed over: {error}.")
        finally:
            if given is not None:
                given.close()
            connection.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        sock.setblocking(False)
        Connection(self, sock)  # the event loop keeps it
