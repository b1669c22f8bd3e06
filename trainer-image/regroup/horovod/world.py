"""The world of this process: how it starts and ends, and the numbers of ranks.

`start` forms torch's default group unless the script has done so, and connects to the coordinator on rank 0. `shutdown` leaves that
group in place, so that a script may call `hvd.init` again. An elastic process gets its ranks later, and others in each generation
(`follow`). Its world ends with the generation or with the process (`end`), so `shutdown` and `init` in between leave it as it is.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from regroup.horovod.channel import notice_lost_machines
from regroup.horovod.collectives import Collectives
from regroup.horovod.coordinator import HELLO_BYTES, Coordinator, listen
from regroup.horovod.engine import Engine
from regroup.horovod.errors import NOT_INITIALIZED
from regroup.protocol import env

_ADDRESS_BYTES = 512
_CONNECT_S = 120.0
_RECONNECT_S = 10.0
"""The same in a generation, whose ranks have just formed a group. Meanwhile the next generation has to wait."""


@dataclass
class World:
    """The world after `init`."""

    rank: int
    size: int
    engine: Engine
    collectives: Collectives
    coordinator: Coordinator | None
    """None on all ranks but 0."""


_world: World | None = None
_is_open = False
"""`start` was called, and `shutdown` not since. An elastic process may have no world yet: it gets its ranks once it needs them."""
attach: Callable[[], None] | None = None
"""Gives an elastic process its first ranks, by `follow`. Set by `elastic`."""


def is_elastic() -> bool:
    """Return whether the agent has given this process no rank, because each generation gives it one."""
    return bool(os.environ.get(env.SOCKET)) and env.RANK not in os.environ


def start(comm: Iterable[int] | None = None) -> None:
    """Join the world. A second call does nothing until `shutdown`. `comm` is as in `init` of `process_sets`."""
    global _world, _is_open
    if is_elastic():
        os.environ["HOROVOD_ELASTIC"] = "1"  # an optimizer of one rank reduces, too: there may be more of them later
    elif _world is None:
        if comm is not None and not (isinstance(comm, (list, tuple)) and len(comm) in (0, _number("WORLD_SIZE", 1))):
            raise ValueError(
                "hvd.init takes no communicator here. Call hvd.init(), and name a part of the ranks by a process set."
            )
        _form_default_group()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        group = dist.new_group(backend=backend)
        _world = _connect(group, backend)
    _is_open = True


def shutdown() -> None:
    """Leave the world. A rank that still waits for a collective with this one gets HorovodInternalError.

    An elastic process stays in the world of its generation, since ranks that come later would not leave and join it once
    more. After another `hvd.init` its collectives go on there.
    """
    global _is_open
    _is_open = False
    if not is_elastic():
        end()


def end() -> None:
    """Close the connections of the world, if there is one."""
    global _world
    if _world is None:
        return
    world, _world = _world, None
    world.engine.close()
    if not world.engine.is_running:
        world.collectives.close()


def follow(form: Callable[[], Any], backend: str) -> World:
    """Exchange the world for that of a new generation, and return it. `form` makes torch's world of its ranks and returns it.

    Raises what `form` does, RuntimeError and OSError.
    """
    global _world, _is_open
    if _world is not None:
        _world.engine.close()
    _world = _connect(form(), backend, os.environ.get(env.POD_IP) or "127.0.0.1", _RECONNECT_S)
    _is_open = True
    return _world


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` not since."""
    return _is_open


def current() -> World:
    """Return the world. Raises ValueError before `init` and after `shutdown`."""
    if _world is None and _is_open and attach is not None:
        attach()
    if _world is None or not _is_open:
        raise ValueError(NOT_INITIALIZED)
    return _world


def engine() -> Engine:
    """Return this rank's engine. Raises ValueError before `init`."""
    return current().engine


def rank() -> int:
    """Return the rank of this process."""
    return current().rank


def size() -> int:
    """Return the number of processes."""
    return current().size


def local_rank() -> int:
    """Return the rank of this process in its worker."""
    current()
    return _number("LOCAL_RANK", 0)


def local_size() -> int:
    """Return the number of processes of this worker."""
    current()
    return _number("LOCAL_WORLD_SIZE", 1)


def cross_rank() -> int:
    """Return the index of this process's worker among the workers that have this local rank."""
    current()
    return _number("HOROVOD_CROSS_RANK", _number("GROUP_RANK", 0))


def cross_size() -> int:
    """Return the number of workers that have this local rank."""
    return _number("HOROVOD_CROSS_SIZE", size() // local_size())


def is_homogeneous() -> bool:
    """Return True: all workers of a job have the same number of processes."""
    current()
    return True


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def _form_default_group() -> None:
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def _connect(group: Any, backend: str, own_host: str = "", timeout_s: float = _CONNECT_S) -> World:
    """Start the coordinator on rank 0, tell all ranks its address through the group, and connect to it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    coordinator = None
    address = b""
    if rank == 0:
        listener, token = listen(), secrets.token_bytes(HELLO_BYTES)
        own_host = own_host or os.environ.get("MASTER_ADDR") or socket.gethostname()
        address = (
            token + listener.getsockname()[1].to_bytes(2, "big") + own_host.encode()[: _ADDRESS_BYTES - HELLO_BYTES - 2]
        )
        coordinator = Coordinator(listener, size, token)
        coordinator.thread.start()
    told = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    told[: len(address)] = torch.tensor(list(address), dtype=torch.uint8)
    if size > 1:
        dist.broadcast(told, 0, group=group)
    address = bytes(told.tolist()).rstrip(b"\0") if rank else address
    token, port, host = address[:HELLO_BYTES], address[HELLO_BYTES : HELLO_BYTES + 2], address[HELLO_BYTES + 2 :]
    where = (host.decode() if rank else "localhost", int.from_bytes(port, "big"))
    connection = socket.create_connection(where, timeout=timeout_s)
    connection.settimeout(None)
    notice_lost_machines(connection)
    connection.sendall(token + rank.to_bytes(4, "big"))
    if size > 1:  # a script may end right after this, and rank 0's coordinator with it
        dist.all_reduce(torch.zeros(1), group=group)
    collectives = Collectives(rank, group, backend)
    return World(rank, size, Engine(connection, collectives), collectives, coordinator)


atexit.register(end)
