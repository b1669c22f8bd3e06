"""The engine of one rank: it sends requests to the coordinator, and runs the collectives that the coordinator orders.

Two threads work for it. The reader sleeps on the connection and hears orders, or that the world is broken. The runner runs the
orders one after the other, so that all ranks run the same collectives in the same sequence. A broken world ends all waits at once,
even if the runner is inside a collective that never ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import socket
import threading
import weakref
from collections.abc import Collection
from typing import Any, cast

import torch

from regroup.horovod.channel import Frames, send
from regroup.horovod.collectives import Collectives
from regroup.horovod.errors import DUPLICATE_NAME, SHUT_DOWN, HorovodInternalError
from regroup.horovod.handles import Handle
from regroup.horovod.negotiation import JOIN, Order, order_of, to_wire

CLOSE_S = 5.0
"""Time for which a collective that still runs is waited for when the world ends."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Talks to the coordinator over `connection`. `collectives` runs what is ordered."""

    def __init__(self, connection: socket.socket, collectives: Collectives) -> None:
        self._connection, self._collectives = connection, collectives
        self._pending: dict[tuple[int, str], Handle] = {}
        self._lock = threading.Lock()
        """Guards `_pending`, `_ordered`, `broken`, the counters, and who sends."""
        self._counters: dict[tuple[int, str], itertools.count[int]] = {}
        self._joins = 0
        """Joins that have ended. Names of requests without a name count anew after each, since ranks join at different counts."""
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._ordered: set[tuple[int, str]] = set()
        """Keys of the orders that have not been run to their end."""
        self.broken = ""
        """Reason why no collective can run any more; "": they run."""
        self._reader = threading.Thread(target=self._read, name="regroup-horovod-reader", daemon=True)
        self._runner = threading.Thread(target=self._run, name="regroup-horovod-runner", daemon=True)
        self._reader.start()
        self._runner.start()
        _engines.add(self)

    def ask(self, handle: Handle) -> Handle:
        """Ask for a collective and return at once. Raises ValueError if this rank waits for one of the same name."""
        request = handle.request
        if handle.tensors and handle.tensors[0].is_cuda:
            handle.ready = cast(Any, torch.cuda).Event()
            handle.ready.record(torch.cuda.current_stream(handle.tensors[0].device))
        with self._lock:
            if self.broken:
                raise HorovodInternalError(self.broken)
            if request.key in self._pending:
                raise ValueError(f"{DUPLICATE_NAME} The name is {request.name}.")
            self._pending[request.key] = handle
            handle.say_wait = functools.partial(self._say_wait, request.key)
            self._send({"ask": to_wire(request)})
        return handle

    def name(self, kind: str, set_id: int, given: str | None) -> str:
        """Return the name that the ranks agree on. Without a given one it counts the requests of this kind in the set."""
        if given:
            return f"{kind}.{given}"
        with self._lock:
            number = next(self._counters.setdefault((set_id, kind), itertools.count()))
            return f"{kind}.noname.{self._joins}.{number}"

    def _say_wait(self, key: tuple[int, str]) -> None:
        with self._lock:
            if not self.broken:
                self._send({"wait": key})

    def close(self) -> None:
        """Say goodbye, and end the threads. What this rank still waits for becomes an error."""
        with self._lock:
            if not self.broken:
                self._send({"bye": True})
        self._fail(SHUT_DOWN)
        if threading.current_thread() is not self._runner:
            self._runner.join(CLOSE_S)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def end(self, why: str) -> None:
        """End all waits with HorovodInternalError, now and later. Any thread."""
        self._fail(why)

    @property
    def is_running(self) -> bool:
        """Return whether a collective still runs, although the world is broken or closed."""
        return self._runner.is_alive()

    def close_in_child(self) -> None:
        """Close the connection in a forked child: its end must tell of the death of this process alone."""
        self._connection.close()

    def _send(self, message: Any) -> None:
        try:
            send(self._connection, message)
        except OSError:
            pass  # the reader hears the same, and fails what is pending

    def _read(self) -> None:
        frames = Frames()
        try:
            while data := self._connection.recv(1 << 20):
                for message in frames.feed(data):
                    if "broken" in message:
                        self._fail(f"{message['broken']} {SHUT_DOWN}")
                        return
                    for order in map(order_of, message["orders"]):
                        with self._lock:
                            self._ordered.add(order.request.key)
                        self._orders.put(order)
            self._lose_rank_0()
        except ConnectionError:
            self._lose_rank_0()
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._fail(f"The connection to rank 0 has failed ({error}). {SHUT_DOWN}")

    def _lose_rank_0(self) -> None:
        """End the waits once rank 0 is gone. A collective that this rank still runs may have ended well there, so it goes on."""
        why = f"Rank 0 has ended. {SHUT_DOWN}"
        with self._lock:
            ordered = set(self._ordered)
        self._fail(why, but=ordered)
        self._runner.join(CLOSE_S)
        self._fail(why)

    def _fail(self, why: str, but: Collection[tuple[int, str]] = ()) -> None:
        """End all waits with an error, now and later. Those for `but` go on."""
        with self._lock:
            self.broken = self.broken or why
            ends = [handle for key, handle in self._pending.items() if key not in but]
            self._pending = {key: handle for key, handle in self._pending.items() if key in but}
        self._orders.put(None)
        for handle in ends:
            handle.end(error=self.broken)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._run_one(order)

    def _run_one(self, order: Order) -> None:
        with self._lock:
            handle = self._pending.get(order.request.key)
        result, error = None, order.error
        if not error:
            try:
                result = self._collectives.run(order, handle)
            except Exception as failure:
                # The other ranks may be inside this collective, and would wait for this one forever.
                error = f"{order.request.kind} has failed on this rank: {failure}"
                with self._lock:
                    self._send({"failed": str(failure)[:1000]})
        with self._lock:
            self._pending.pop(order.request.key, None)
            self._ordered.discard(order.request.key)
            if order.request.kind == JOIN and not error:
                self._joins += 1
                self._counters.clear()
        if handle is not None:
            handle.end(result, error)


def _close_in_child() -> None:
    for engine in list(_engines):
        engine.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
