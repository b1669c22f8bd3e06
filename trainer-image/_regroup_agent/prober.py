"""The I/O of `observing`: a port on which nobody listens, and attempts to connect to such ports of other workers.

No data is sent or read. Before an attempt counts as failed, the kernel is asked once more whether an answer has come. This agent
may have been stopped or without CPU meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from regroup.protocol.wire import Observed

from .observing import WITHIN_S, Watch

_ALIVE = (0, errno.ECONNREFUSED, errno.ECONNRESET)
"""Results of an attempt that the other kernel has answered. Others come from a router or from this machine."""
_RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER by which a connection that was accepted after all ends without a TIME_WAIT."""


class QuietPort:
    """A port that is bound and not listened on: the kernel refuses each connection, and no other program can bind it."""

    def __init__(self, pod_ip: str) -> None:
        address = ipaddress.ip_address(pod_ip)
        self._socket = _open(pod_ip)
        self._socket.bind((pod_ip if address.is_loopback else "", 0))

    @property
    def port(self) -> int:
        """TCP port, which reports carry."""
        return int(self._socket.getsockname()[1])


class Prober:
    """Tries to reach the observed members, on the running event loop. `on_change` is called when a member's level changes."""

    def __init__(self, on_change: Callable[[tuple[Watch, ...]], None]) -> None:
        self._on_change = on_change
        self._attempts: list[_Attempts] = []

    def observe(self, observed: Sequence[Observed]) -> None:
        """Observe these members from now on, and no others. A member that was observed before keeps its Watch."""
        before = {attempts.watch.observed: attempts for attempts in self._attempts}
        self._attempts = [before.pop(one) if one in before else _Attempts(one, self._changed) for one in observed]
        for attempts in before.values():
            attempts.end()

    @property
    def watches(self) -> tuple[Watch, ...]:
        """The Watch of each observed member, in the order of `observe`."""
        return tuple(attempts.watch for attempts in self._attempts)

    def _changed(self) -> None:
        self._on_change(self.watches)


class _Attempts:
    """The attempts to reach one member, one after the other, until `end`."""

    def __init__(self, observed: Observed, on_change: Callable[[], None]) -> None:
        self.watch = Watch(observed)
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._is_open = False
        """The present attempt may still get an answer."""
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(0.0, self._begin)

    def end(self) -> None:
        self._close()

    def _begin(self) -> None:
        watch = self.watch
        watch.begin(time.monotonic())
        self._timer = None
        try:
            self._socket = sock = _open(watch.observed.host)
        except (OSError, ValueError):  # no descriptor is free
            self._next(watch.skipped())
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        error = sock.connect_ex((watch.observed.host, watch.observed.port))
        if error in (errno.EADDRNOTAVAIL, errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):  # no port is free, no memory
            self._next(watch.skipped())
        elif error in _ALIVE:
            self._answered()
        else:
            self._is_open = error == errno.EINPROGRESS
            if self._is_open:
                self._loop.add_writer(sock, self._ended)
            self._timer = self._loop.call_later(WITHIN_S, self._overdue)

    def _ended(self) -> None:
        """Take in the end of an attempt: an answer of the other kernel, or an error from elsewhere."""
        assert self._socket is not None
        self._loop.remove_writer(self._socket)
        self._is_open = False  # the kernel returns SO_ERROR only once
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ALIVE:
            self._answered()

    def _overdue(self) -> None:
        assert self._socket is not None
        if self._is_open and _has_ended(self._socket):
            self._ended()
            if self._socket is None:  # it was answered
                return
        self._said(self.watch.failed)

    def _answered(self) -> None:
        self._said(self.watch.answered)

    def _said(self, take: Callable[[], float]) -> None:
        before = self.watch.level
        next_s = take()
        self._next(next_s)
        if self.watch.level != before:
            self._on_change()

    def _next(self, at_s: float) -> None:
        self._close()
        self._timer = self._loop.call_later(max(0.0, at_s - time.monotonic()), self._begin)

    def _close(self) -> None:
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.remove_writer(sock)
            sock.close()


def _has_ended(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(0))


def _open(host: str) -> socket.socket:
    family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
    return socket.socket(family, socket.SOCK_STREAM)
