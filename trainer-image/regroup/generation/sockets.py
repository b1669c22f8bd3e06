"""The sockets that one generation's store and groups opened: found, kept, shut down, and closed in a forked child.

torch 2.13's gloo ignores `abort` and says nothing of its descriptors. So they are found by comparing /proc/self/fd with its content
before, and told from others by their ports. They are kept as duplicates: a closed descriptor's number may be reused. A shutdown
makes every thread that is blocked on one raise. Their states tell a rank that was lost from an error of the backend.
Nothing here decides when.
"""

import contextlib
import functools
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch._C._distributed_c10d import ProcessGroupGloo

_ONE_DEVICE = threading.Lock()
_ESTABLISHED = 1
"""Value of TCP_INFO's first byte: include/net/tcp_states.h of Linux."""


@functools.cache
def device_alone() -> Any:
    """Return gloo's device for groups of one rank. The process has one: it listens, and nobody ever connects to it."""
    with _ONE_DEVICE:
        return ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)


class Connection(NamedTuple):
    """A duplicate of a connected socket, and the address of its other end, which a reset socket does not tell any more."""

    socket: socket.socket
    host: str
    port: int


class Sockets:
    """The connected sockets of one generation. `shut_down` may be called from any thread, at any time."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._ports = {store_port}
        self._inodes_before = set(_inodes().values())
        self._lock = threading.Lock()
        self._before: list[Connection] = []
        """Connections that were kept before more came up (`opening`)."""
        self._kept: list[Connection] | None = None
        self._shut = False
        self._is_whole = True
        _alive.add(self)

    def add_ports(self, ports: Iterable[int]) -> None:
        """Take sockets at these ports for this generation's from now on: a peer listens there."""
        self._ports |= set(ports)

    def open_device(self, host: str) -> tuple[Any, int]:
        """Return gloo's device and the port that it listens on. One thread at a time.

        The helper thread of an interrupted form may come here late. Otherwise its port would be taken for ours, and nothing would
        shut our connections down.
        """
        with _ONE_DEVICE:
            before = set(_inodes().values())
            device = ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
            port = self._new_listening_port(before)
        self._ports.add(port)
        return device, port

    def keep(self, num_peers: int = 0) -> None:
        """Duplicate what is connected now: from here on `shut_down` need not look for it. `num_peers`: at least so many go to
        peers, and one to the store."""
        with self._lock:
            if not self._shut:
                self._kept = self._connected(self._before)
                self._before = []
                # One that was reset before this cannot be kept, and nobody knows where it went.
                self._is_whole = self._is_whole and len(self._kept) > num_peers

    def lost(self) -> list[Connection] | None:
        """Return the connections that the other side, or the kernel, has ended; None: there is none. Empty: there is one, and
        nobody knows which."""
        with self._lock:
            ended = [kept for kept in self._kept or () if not _is_established(kept.socket)]
            return None if self._is_whole and not ended else ended

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Mark a block in which more connections come up. `shut_down` looks for them there; afterwards they are kept."""
        with self._lock:
            # They stay: of one that has ended meanwhile, gloo's own descriptor is closed already.
            self._before, self._kept = self._kept or [], None
        try:
            yield
        finally:
            self.keep()

    def shut_down(self) -> None:
        """End every wait on one of the connections. A second call does nothing."""
        with self._lock:
            if self._shut:
                return
            self._shut = True
            connections = self._kept if self._kept is not None else self._connected(self._before)
            self._kept, self._before = None, []
        for kept in connections:
            with contextlib.suppress(OSError):
                kept.socket.shutdown(socket.SHUT_RDWR)
            kept.socket.close()

    def forget_in_child(self) -> None:
        """Close the inherited connections in a forked child, such as a data loader's worker.

        Otherwise the peers of a killed trainer would see its connections open until the child ends.
        """
        for kept in (*(self._kept or ()), *self._before):
            kept.socket.detach()
        for fd, inode in _inodes().items():
            if inode not in self._inodes_before:
                with contextlib.suppress(OSError):
                    probe = socket.socket(fileno=fd)
                    ours = self._is_ours(probe)
                    probe.detach()
                    if ours:
                        os.close(fd)

    def _connected(self, known: Sequence[Connection]) -> list[Connection]:
        """Return `known`, and duplicates of the other connected sockets that forming opened: to the store, and to peers
        either way."""
        found = list(known)
        seen = self._inodes_before | {f"socket:[{os.fstat(kept.socket.fileno()).st_ino}]" for kept in known}
        for fd, inode in _inodes().items():
            if inode in seen:
                continue
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(fd))
                if self._is_ours(connection):
                    host, port = connection.getpeername()[:2]
                    found.append(Connection(connection, host, port))
                else:
                    connection.close()
        return found

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            here, there = connection.getsockname()[1], connection.getpeername()[1]
        except OSError:  # not connected: gloo's listening socket, which does not survive a shutdown
            return False
        return there in self._ports or (here in self._ports and here != self._store_port)

    def _new_listening_port(self, before: set[str]) -> int:
        for fd, inode in _inodes().items():
            if inode in before:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as candidate:
                if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    port = int(candidate.getsockname()[1])
                    if port != self._store_port:
                        return port
        return 0


_alive: weakref.WeakSet[Sockets] = weakref.WeakSet()


def _in_child() -> None:
    for sockets in list(_alive):
        sockets.forget_in_child()


os.register_at_fork(after_in_child=_in_child)


def _is_established(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _inodes() -> dict[int, str]:
    """Return, by descriptor, what /proc says of this process's sockets: a name that is never used twice."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - in the path of a recovery; half the cost of Path's
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found[int(name)] = target
    return found
