"""The fresh listening socket that becomes the next generation's store. One socket per generation, never used twice."""

from __future__ import annotations

import ipaddress
import socket


class StoreSocket:
    """Always holds one listening socket nobody has used. `port` goes out with every report."""

    def __init__(self, pod_ip: str) -> None:
        self._pod_ip = pod_ip
        self._socket = self._open()

    @property
    def port(self) -> int:
        """TCP port of the fresh socket."""
        return int(self._socket.getsockname()[1])

    def take(self) -> socket.socket:
        """Return the fresh socket, the caller's now, and open another."""
        taken = self._socket
        self._socket = self._open()  # before the old one closes: the ports differ
        return taken

    def _open(self) -> socket.socket:
        address = ipaddress.ip_address(self._pod_ip)
        sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self._pod_ip if address.is_loopback else "", 0))
        sock.listen(4096)
        return sock
