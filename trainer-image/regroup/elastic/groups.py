"""Store and process groups of one generation: one object that forms once and ends with one `abort()`.

Owns the sockets. torch 2.13's gloo ignores `abort`, so the connected sockets that forming opened are found by comparing
/proc/self/fd, kept as duplicates (a closed descriptor's number may be reused), and shut down: every thread that is
blocked on one raises. NCCL has an abort of its own. Forming runs in a helper thread, because the store's constructor cannot
be interrupted; who waits for it can. Nothing here decides when.
"""

import contextlib
import json
import os
import re
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore, Work

from regroup.protocol import codec
from regroup.protocol.document import Document
from regroup.protocol.local import Assignment

from .adoption import Arrival
from .errors import GroupBroken, UsageError

_FOREVER = timedelta(days=30)
"""No collective times out: membership ends a group, never a clock (design, rule 1 of three)."""
_CONNECT = timedelta(seconds=10)
"""Bound for connecting to a store or a peer that is there; past it the link is reported as broken (rule CLIQUE)."""

_SLICE = timedelta(milliseconds=20)
"""Longest time that an abort goes unnoticed in a wait that gloo itself never ends."""

_ONE_DEVICE = threading.Lock()


class Pending(NamedTuple):
    """A collective that has been started."""

    work: Work
    on_gloo: bool


@dataclass(frozen=True)
class Gathering:
    """What every rank knows when the groups stand: the document and, by rank, what each brought."""

    document: Document
    arrivals: tuple[Arrival, ...]


class Groups:
    """The groups of one generation, `rank` of `world_size`. `abort` may be called from any thread, at any time."""

    def __init__(self, assignment: Assignment, host: str, device: torch.device) -> None:
        self.assignment = assignment
        self.generation = assignment.number
        self.rank = assignment.rank
        self.world_size = assignment.world_size
        self.device = device
        self._host = host
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._aborted = False
        self._inodes_before = set(_socket_inodes().values())
        self._ports: set[int] = {assignment.store_port}
        self._kept: list[socket.socket] | None = None
        self._ranks_by_port: dict[int, int] = {}
        self._document: Document | None = assignment.document
        self._store: Any = None
        self._gloo: Any = None
        self._nccl: Any = None
        self._world: Any = None
        self._result: Gathering | BaseException | None = None
        _alive.add(self)

    # --- forming -----------------------------------------------------------------------------------------------------

    def form(self, arrival: Arrival, listen_fd: int | None) -> Gathering:
        """Build store and groups and return what all ranks brought. Blocks until every rank is there.

        Raises GroupBroken when a peer or the store cannot be reached, or at once when `abort` is called.
        `listen_fd`: the store's listening socket, for the rank that hosts it.
        """
        thread = threading.Thread(target=self._run, args=(arrival, listen_fd), name="regroup-form", daemon=True)
        thread.start()
        self._done.wait()
        result = self._result
        if isinstance(result, Gathering) and not self._aborted:
            return result
        if isinstance(result, UsageError):
            raise result
        if isinstance(result, GroupBroken):
            raise result
        raise GroupBroken(
            f"forming generation {self.generation} ended: {result or 'interrupted'}", self._peer(str(result))
        )

    def _run(self, arrival: Arrival, listen_fd: int | None) -> None:
        try:
            result: Gathering | BaseException = self._form(arrival, listen_fd)
        except BaseException as error:
            result = error
        with self._lock:
            self._result = result
            if isinstance(result, Gathering) and not self._aborted:
                self._kept = self._connected()
        self._done.set()

    def _form(self, arrival: Arrival, listen_fd: int | None) -> Gathering:
        assignment = self.assignment
        self._store = store = self._open_store(listen_fd)
        keys = PrefixStore(assignment.store_prefix, store)
        keys.set_timeout(_FOREVER)
        if assignment.hosts_store:
            if assignment.document is None:
                raise UsageError("The agent named this process as the store's host without the generation document.")
            keys.set("document", codec.canonical(codec.to_json(assignment.document)).decode())
        device, port = self._open_device()
        here = {"arrival": arrival.to_json(), "port": port}
        keys.set(f"here/{self.rank}", json.dumps(here))
        # The barrier waits without bound: a member may be in the middle of a long step. The operator decides who is slow.
        if keys.add("arrived", 1) == self.world_size:
            keys.set("all", "1")
        keys.wait(["all"], _FOREVER)
        document_text, *others = keys.multi_get(["document", *(f"here/{rank}" for rank in range(self.world_size))])
        document = codec.from_json(Document, codec.parse(document_text))
        if document.digest() != assignment.document_digest:
            raise GroupBroken(f"The members of generation {self.generation} do not agree on its document.")
        self._document = document
        arrivals = []
        for rank, text in enumerate(others):
            value = codec.parse(text)
            arrivals.append(Arrival.from_json(value["arrival"]))
            self._ranks_by_port[value["port"]] = rank
        self._ports |= set(self._ranks_by_port)
        self._check_aborted()
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._threads = 2
        options._timeout = _CONNECT
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", keys), self.rank, self.world_size, options)
        self._gloo.set_timeout(_FOREVER)
        if self.device.type == "cuda":
            self._nccl = self._open_nccl(PrefixStore("nccl", keys))
        self._check_aborted()
        return Gathering(document, tuple(arrivals))

    def _open_store(self, listen_fd: int | None) -> TCPStore:
        host, port = self.assignment.store_host, self.assignment.store_port
        if self.assignment.hosts_store:
            return TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_CONNECT,
                master_listen_fd=listen_fd,
                use_libuv=True,
            )
        try:
            # The listening socket exists before the generation is announced, so this tells "unreachable" from "busy".
            socket.create_connection((host, port), timeout=_CONNECT.total_seconds()).close()
        except OSError as error:
            raise GroupBroken(f"The store at {host}:{port} cannot be reached: {error}.", self._store_rank()) from error
        while True:
            self._check_aborted()
            with contextlib.suppress(RuntimeError):
                return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT, use_libuv=True)

    def _open_nccl(self, store: Any) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        torch.cuda.set_device(self.device)
        nccl = ProcessGroupNCCL(store, self.rank, self.world_size, options)
        nccl.eager_connect_single_device(self.device)
        return nccl

    def _check_aborted(self) -> None:
        if self._aborted:
            raise GroupBroken("interrupted")

    # --- use ---------------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """The backend for tensors on the model's device."""
        return self._nccl or self._gloo

    @property
    def control(self) -> Any:
        """The backend for small tensors in host memory: gloo, always."""
        return self._gloo

    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def world(self) -> Any:
        """All ranks as a torch ProcessGroup, for `torch.distributed` calls with `group=`. Made when first asked for."""
        if self._world is None:
            group = ProcessGroup(PrefixStore("world", self._store), self.rank, self.world_size)
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
            if self._nccl is not None:
                group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, self._nccl)
                group._set_default_backend(ProcessGroup.BackendType.NCCL)
            self._world = group
        return self._world

    def wait(self, pending: Sequence["Pending"]) -> None:
        """Wait for collectives; on CUDA for their end on the device too. Raises GroupBroken when one fails, or at `abort`."""
        try:
            for work, on_gloo in pending:
                if on_gloo:
                    self._wait_gloo(work)
                else:
                    work.wait()
            if self._nccl is not None and pending:
                torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError as error:
            raise GroupBroken(str(error), self._peer(str(error))) from error
        self.check()

    def _wait_gloo(self, work: Work) -> None:
        # In slices: gloo 2.13 forgets a send whose write fails because the connection was just closed, and its waiter
        # would wait for ever. The end of a slice changes nothing about the collective.
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if "Operation timed out!" not in str(error):
                    raise
            self.check()

    def launch(self, method: str, *arguments: Any, control: bool = False) -> "Pending":
        """Start a collective of the backend by its name, for `wait`. Raises GroupBroken when it cannot start."""
        self.check()
        backend = self.control if control else self.data
        try:
            return Pending(getattr(backend, method)(*arguments), backend is self._gloo)
        except RuntimeError as error:
            raise GroupBroken(str(error), self._peer(str(error))) from error

    def check(self) -> None:
        """Raise GroupBroken once the groups have been aborted."""
        if self._aborted:
            raise GroupBroken(f"the groups of generation {self.generation} were left")

    def team(self, ranks: Sequence[int], name: str) -> "Team":
        """Return these ranks (this one among them) as a group of their own; all of them must ask for it together.

        `name` tells apart what one generation asks for. Raises GroupBroken.
        """
        if len(ranks) == self.world_size:
            return Team(self, self.rank, self.world_size, self._gloo, self._nccl, self.world)
        rank, size = list(ranks).index(self.rank), len(ranks)
        with self._lock:
            # While its sockets come up, `abort` looks for them as it does while the groups form.
            kept, self._kept = self._kept or [], None
        try:
            self.check()
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            device, port = self._open_device()
            options._devices, options._threads, options._timeout = [device], 2, _CONNECT
            keys = PrefixStore(f"{self.assignment.store_prefix}/team/{name}", self._store)
            keys.set(f"port/{rank}", str(port))
            self._ports |= {int(text) for text in keys.multi_get([f"port/{other}" for other in range(size)])}
            gloo = ProcessGroupGloo(PrefixStore("gloo", keys), rank, size, options)
            gloo.set_timeout(_FOREVER)
        except RuntimeError as error:
            raise GroupBroken(str(error), self._peer(str(error))) from error
        finally:
            for connection in kept:
                connection.close()
            with self._lock:
                if not self._aborted:
                    self._kept = self._connected()
        self.check()
        group = ProcessGroup(PrefixStore("world", keys), rank, size)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        return Team(self, rank, size, gloo, None, group)

    # --- the end -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End everything that waits on these groups, now. Any thread, any number of times."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            connections = self._kept if self._kept is not None else self._connected()
            self._kept = None
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._nccl is not None:
            with contextlib.suppress(RuntimeError):
                self._nccl.abort()
        self._done.set()

    def close(self) -> None:
        """Abort, and let go of the memory in a thread: a backend's destructor waits for its threads."""
        self.abort()
        holders = [self._world, self._nccl, self._gloo, self._store]
        self._world = self._nccl = self._gloo = self._store = None
        threading.Thread(target=holders.clear, name="regroup-close", daemon=True).start()

    def forget_in_child(self) -> None:
        """In a forked child (a data loader's worker): close what it inherited, or the peers of a killed trainer would see its
        connections open until the child ends."""
        for connection in self._kept or ():
            connection.detach()
        for fd, inode in _socket_inodes().items():
            if inode not in self._inodes_before:
                with contextlib.suppress(OSError):
                    probe = socket.socket(fileno=fd)
                    ours = self._is_ours(probe)
                    probe.detach()
                    if ours:
                        os.close(fd)

    # --- sockets -----------------------------------------------------------------------------------------------------

    def _connected(self) -> list[socket.socket]:
        """Duplicates of the connected sockets that forming opened: to the store, and to peers either way."""
        found = []
        for fd, inode in _socket_inodes().items():
            if inode in self._inodes_before:
                continue
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(fd))
                if self._is_ours(connection):
                    found.append(connection)
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
        return there in self._ports or (here in self._ports and here != self.assignment.store_port)

    def _open_device(self) -> tuple[Any, int]:
        """Return gloo's device and the port that it listens on, one thread at a time: the helper thread of a form that was
        interrupted may come here late, and its port would be taken for ours (then nothing shuts our connections down)."""
        with _ONE_DEVICE:
            before = set(_socket_inodes().values())
            device = ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)
            port = self._new_listening_port(before)
        self._ports.add(port)
        return device, port

    def _new_listening_port(self, before: set[str]) -> int:
        for fd, inode in _socket_inodes().items():
            if inode in before:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as candidate:
                if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    port = int(candidate.getsockname()[1])
                    if port != self.assignment.store_port:
                        return port
        return 0

    def _store_rank(self) -> int | None:
        document = self._document
        return document.rank_offset(document.store.pod_uid) if document is not None else None

    def _peer(self, message: str) -> int | None:
        """Return the rank that a gloo error names by its address, else None. Of several on one host, the first."""
        found = re.search(r"\[([^\]]*)\]:(\d+)", message)
        if found is None:
            return None
        port = int(found[2])
        swapped = (port & 0xFF) << 8 | port >> 8  # gloo 2.13 prints some ports in network byte order
        for candidate in (port, swapped):
            if candidate in self._ranks_by_port:
                return self._ranks_by_port[candidate]
        # The other side's own port, where it connected to us: then its host, if only one member lives there.
        members = self._document.members if self._document is not None else ()
        there = [member.pod_uid for member in members if member.host == found[1]]
        return self._document.rank_offset(there[0]) if self._document is not None and len(there) == 1 else None


@dataclass(frozen=True)
class Team:
    """Some or all ranks of a generation, as the user's collectives see them."""

    groups: Groups
    rank: int
    world_size: int
    gloo: Any
    nccl: Any
    group: Any
    """A torch ProcessGroup."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the team, in place. Blocks. Raises GroupBroken."""
        backend = self.nccl if tensor.device.type == "cuda" and self.nccl is not None else self.gloo
        self.groups.check()
        try:
            work = backend.allreduce([tensor])
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error
        self.groups.wait([Pending(work, backend is self.gloo)])


_alive: weakref.WeakSet[Groups] = weakref.WeakSet()


def _in_child() -> None:
    for groups in list(_alive):
        groups.forget_in_child()


os.register_at_fork(after_in_child=_in_child)


def _socket_inodes() -> dict[int, str]:
    """Return, by descriptor, what /proc says of this process's sockets: a name that is never used twice."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - in the path of a recovery; half the cost of Path's
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found[int(name)] = target
    return found
