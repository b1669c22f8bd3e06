"""The fresh socket that becomes the store of the next generation. Another one is opened as soon as it is given away.

`Ports` holds a port for each process in the same way, for frameworks whose processes listen themselves.

For a session the socket listens from the start: a member that connects before the store serves waits instead of failing. A script
binds the port itself. Until then the agent holds the port without listening, so that connections are refused at once
instead of being reset later.
"""

from __future__ import annotations

import ipaddress
import socket


class StoreSocket:
    """Holds one bound socket that nobody has used. Every report carries its `port`."""

    def __init__(self, pod_ip: str) -> None:
        self._pod_ip = pod_ip
        self._listens = False
        self._socket = self._open()

    @property
    def port(self) -> int:
        """TCP port of the fresh socket."""
        return int(self._socket.getsockname()[1])

    def listen(self) -> None:
        """Listen on this socket and on all later ones. A second call does nothing."""
        if not self._listens:
            self._listens = True
            self._socket.listen(4096)

    def take(self) -> socket.socket:
        """Return the fresh socket, which the caller must close, and open another one."""
        taken = self._socket
        self._socket = self._open()  # while the old one is open, so that the ports differ
        return taken

    def _open(self) -> socket.socket:
        sock = _bound(self._pod_ip)
        if self._listens:
            sock.listen(4096)
        return sock


class Ports:
    """Holds one bound socket for each process. The processes bind their ports themselves, so none of the sockets listens."""

    def __init__(self, pod_ip: str, count: int) -> None:
        self._pod_ip = pod_ip
        self._sockets = [_bound(pod_ip) for _ in range(count)]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ports, by local rank."""
        return tuple(int(sock.getsockname()[1]) for sock in self._sockets)

    def renew(self) -> None:
        """Release the ports, right before the processes start that bind them, and hold others."""
        used = self._sockets
        self._sockets = [_bound(self._pod_ip) for _ in used]  # while the used ones are open, so that the ports differ
        for sock in used:
            sock.close()


def _bound(pod_ip: str) -> socket.socket:
    """Return a socket that is bound to a free port and does not listen."""
    address = ipaddress.ip_address(pod_ip)
    sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((pod_ip if address.is_loopback else "", 0))
    return sock
