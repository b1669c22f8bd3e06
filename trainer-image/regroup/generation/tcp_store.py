"""The store of a generation: one process serves it, and all others connect to it.

The store's constructor cannot be interrupted. So `open_store` runs in a helper thread, and asks between two attempts whether the
groups were aborted.
"""

import socket
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from regroup.errors import PeerLost
from regroup.protocol.local import Assignment

from .origins import pass_others_on
from .peers import Peers

CONNECT = timedelta(seconds=10)
"""Bound for connecting to a store or a peer that is there; past it the link is reported as broken (rule CLIQUE)."""
PORT_S = 0.01
"""Seconds between two attempts to bind a port that the store of an earlier generation still holds."""


class Server:
    """A store that this process serves, until this object is freed."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store


_serving: weakref.WeakValueDictionary[int, Server] = weakref.WeakValueDictionary()
"""The stores that this process serves, by port."""


def open_store(
    assignment: Assignment, listen_fd: int | None, peers: Peers, check: Callable[[], None]
) -> tuple[Server | None, TCPStore]:
    """Return the generation's store, and its server if that is this process.

    `listen_fd` is the store's listening socket. `check` raises once the groups were aborted. Raises PeerLost if the store cannot be
    reached.
    """
    if assignment.hosts_store:
        return _serve(assignment, listen_fd, check)
    host, port = assignment.store_host, assignment.store_port
    try:
        # The listening socket exists before the generation is announced, so this tells "unreachable" from "busy".
        socket.create_connection((host, port), timeout=CONNECT.total_seconds()).close()
    except OSError as error:
        raise PeerLost(f"The store at {host}:{port} cannot be reached: {error}.", peers.store_rank()) from error
    while True:
        check()
        try:
            return None, _connect(assignment)
        except RuntimeError as error:
            pass_others_on(error)


def _serve(assignment: Assignment, listen_fd: int | None, check: Callable[[], None]) -> tuple[Server, TCPStore]:
    """Return this generation's store, served here.

    Without a descriptor this process has had the socket already, for an earlier generation that it has left. The port will be free
    in a moment, or the server still keeps that generation's groups. Then one server has the keys of both: each generation has its
    own prefix.
    """
    port = assignment.store_port
    deadline_s = time.monotonic() + CONNECT.total_seconds()
    while True:
        server = _serving.get(port) if listen_fd is None else None
        if server is not None:
            return server, _connect(assignment)
        try:
            store = _connect(assignment, is_master=True, listen_fd=listen_fd)
        except RuntimeError as error:
            is_taken = listen_fd is None and "EADDRINUSE" in str(error)
            if not is_taken or time.monotonic() > deadline_s:
                raise
        else:
            server = _serving[port] = Server(store)
            return server, store
        time.sleep(PORT_S)
        check()


def _connect(assignment: Assignment, *, is_master: bool = False, listen_fd: int | None = None) -> TCPStore:
    return TCPStore(
        assignment.store_host,
        assignment.store_port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=CONNECT,
        master_listen_fd=listen_fd,
        use_libuv=True,
    )
