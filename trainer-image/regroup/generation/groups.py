"""Store and process groups of one generation: one object that forms once and ends with one `abort()`.

torch 2.13's gloo ignores `abort`, so what `sockets` found of it is shut down: every thread that is blocked on one raises.
NCCL has an abort of its own. Forming runs in a helper thread, because the store's constructor cannot be interrupted; who
waits for it can. Nothing here decides when. Groups of some of the ranks are in `team`.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore, Work

from regroup.errors import Aborted, BackendError, GroupBroken, PeerLost, UsageError
from regroup.protocol import codec
from regroup.protocol.document import Document
from regroup.protocol.local import Assignment

from .adoption import Arrival
from .backends import Backend, let_go
from .reach import knock, lost_rank
from .sockets import Connection, Sockets

_FOREVER = timedelta(days=30)
"""No collective times out: membership ends a group, never a clock (design, rule 1 of three)."""
_CONNECT = timedelta(seconds=10)
"""Bound for connecting to a store or a peer that is there; past it the link is reported as broken (rule CLIQUE)."""

_SLICE = timedelta(milliseconds=20)
"""Longest time that an abort goes unnoticed in a wait that gloo itself never ends."""

FORGOTTEN_S = 1.0
"""So long after a connection has ended gloo is taken to have forgotten a message."""


def _say_nothing() -> None:
    pass


class Pending(NamedTuple):
    """A collective that has been started."""

    work: Work
    on_gloo: bool


@dataclass(frozen=True)
class Gathering:
    """What every rank knows when the groups stand: the document and, by rank, what each brought."""

    document: Document
    arrivals: tuple[Arrival, ...]


def open_gloo(store: Any, rank: int, size: int, device: Any) -> Backend:
    """Return a gloo backend whose members connect now, within 10 s, and whose collectives never time out."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = [device], 2, _CONNECT
    gloo = ProcessGroupGloo(store, rank, size, options)
    gloo.set_timeout(_FOREVER)
    return Backend(gloo)


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
        self.sockets = Sockets(assignment.store_port)
        self._ranks_by_port: dict[int, list[int]] = {}
        self._document: Document | None = assignment.document
        self._store: Any = None
        self._gloo: Backend | None = None
        self._nccl: Backend | None = None
        self._world: Any = None
        self._teams: list[tuple[Any, Backend]] = []
        """Groups of some of the ranks, with the backend of each."""
        self._result: Gathering | BaseException | None = None
        self.waited_s = 0.0
        """Seconds that the main thread has waited for other ranks in all."""
        self.waits_since_s: float | None = None
        """Monotonic time since which the main thread waits for other ranks (`waiting`); None: it does not."""
        self.is_applying = False
        """A commit is being applied: that is local, so nothing may communicate."""

    # --- forming -----------------------------------------------------------------------------------------------------

    def form(self, arrival: Arrival, listen_fd: int | None, on_arrival: Callable[[], None] = _say_nothing) -> Gathering:
        """Build store and groups and return what all ranks brought. Blocks until every rank is there.

        Raises PeerLost when a peer or the store cannot be reached, Aborted at once when `abort` is called.
        `listen_fd`: the store's listening socket, for the rank that hosts it. `on_arrival` is called in another thread
        once this rank waits at the store for the others.
        """
        thread = threading.Thread(
            target=self._run, args=(arrival, listen_fd, on_arrival), name="regroup-form", daemon=True
        )
        thread.start()
        self._done.wait()
        result = self._result
        if self._aborted:
            raise Aborted(f"Forming generation {self.generation} was interrupted.")
        if isinstance(result, Gathering):
            return result
        assert result is not None
        if isinstance(result, GroupBroken) or not isinstance(result, (RuntimeError, OSError)):
            raise result
        raise PeerLost(f"Forming generation {self.generation} ended: {result}")

    def _run(self, arrival: Arrival, listen_fd: int | None, on_arrival: Callable[[], None]) -> None:
        try:
            result: Gathering | BaseException = self._form(arrival, listen_fd, on_arrival)
        except BaseException as error:
            result = error.with_traceback(None)  # its frames hold the store open
        self._result = result
        if isinstance(result, Gathering):
            self.sockets.keep(self.world_size - 1)
        self._done.set()

    def _form(self, arrival: Arrival, listen_fd: int | None, on_arrival: Callable[[], None]) -> Gathering:
        assignment = self.assignment
        self._store = store = self._open_store(listen_fd)
        # An abort before the store was there has shut nothing down: its host would wait for the others for ever.
        self._check_aborted()
        keys = PrefixStore(assignment.store_prefix, store)
        keys.set_timeout(_FOREVER)
        if assignment.hosts_store:
            if assignment.document is None:
                raise UsageError("The agent named this process as the store's host without the generation document.")
            keys.set("document", codec.canonical(codec.to_json(assignment.document)).decode())
        device, port = self.open_device()
        here = {"arrival": arrival.to_json(), "port": port}
        keys.set(f"here/{self.rank}", json.dumps(here))
        # The barrier waits without bound: a member may be in the middle of a long step. The operator decides who is slow.
        if keys.add("arrived", 1) == self.world_size:
            keys.set("all", "1")
        on_arrival()
        keys.wait(["all"], _FOREVER)
        document_text, *others = keys.multi_get(["document", *(f"here/{rank}" for rank in range(self.world_size))])
        document = codec.from_json(Document, codec.parse(document_text))
        if document.digest() != assignment.document_digest:
            raise PeerLost(f"The members of generation {self.generation} do not agree on its document.")
        self._document = document
        arrivals = []
        for rank, text in enumerate(others):
            value = codec.parse(text)
            arrivals.append(Arrival.from_json(value["arrival"]))
            self._ranks_by_port.setdefault(value["port"], []).append(rank)
        self.sockets.add_ports(self._ranks_by_port)
        self._check_aborted()
        said = ""
        try:
            self._gloo = open_gloo(PrefixStore("gloo", keys), self.rank, self.world_size, device)
        except RuntimeError as error:
            said = f"Forming generation {self.generation} ended: {error}"
        if self._gloo is None:  # here, for gloo's error holds the store open
            raise PeerLost(said, self.who_is_lost())
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
            raise PeerLost(f"The store at {host}:{port} cannot be reached: {error}.", self._store_rank()) from error
        while True:
            self._check_aborted()
            with contextlib.suppress(RuntimeError):
                return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT, use_libuv=True)

    def _open_nccl(self, store: Any) -> Backend:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        torch.cuda.set_device(self.device)
        nccl = ProcessGroupNCCL(store, self.rank, self.world_size, options)
        nccl.eager_connect_single_device(self.device)
        return Backend(nccl)

    def _check_aborted(self) -> None:
        if self._aborted:
            raise Aborted("interrupted")

    # --- use ---------------------------------------------------------------------------------------------------------

    @property
    def control(self) -> Backend:
        """The backend for small tensors in host memory: gloo, always."""
        assert self._gloo is not None
        return self._gloo

    @property
    def nccl(self) -> Backend | None:
        """The backend for tensors on the model's device; None where that is the CPU."""
        return self._nccl

    @property
    def store(self) -> Any:
        """The generation's store."""
        return self._store

    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def world(self) -> Any:
        """All ranks as a torch ProcessGroup, for `torch.distributed` calls with `group=`. Made when first asked for."""
        if self._world is None:
            group = ProcessGroup(PrefixStore("world", self._store), self.rank, self.world_size)
            self.control.serve(group, "cpu", ProcessGroup.BackendType.GLOO)
            if self._nccl is not None:
                self._nccl.serve(group, "cuda", ProcessGroup.BackendType.NCCL)
            self._world = group
        return self._world

    def wait(self, pending: Sequence["Pending"]) -> None:
        """Wait for collectives; on CUDA for their end on the device too. Raises what `failed` says, Aborted at `abort`."""
        with self.waiting():
            try:
                for work, on_gloo in pending:
                    if on_gloo:
                        self._wait_gloo(work)
                    else:
                        work.wait()
                if self._nccl is not None and pending:
                    torch.cuda.current_stream(self.device).synchronize()
            except RuntimeError as error:
                raise self.failed(error) from error
        self.check()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The main thread waits for other ranks in this block: `waits_since_s` says so to other threads."""
        began_s = self.waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self.waits_since_s = None
            self.waited_s += time.monotonic() - began_s

    def _wait_gloo(self, work: Work) -> None:
        # In slices: gloo 2.13 forgets a send whose write fails because the connection was just closed, and its waiter
        # would wait for ever. The end of a slice changes nothing about the collective, and raises, too.
        lost_since_s: float | None = None
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):
                work.wait(_SLICE)
            if work.is_completed():
                break
            self.check()
            # What an ended connection still holds is read first; then gloo raises by itself, unless it has forgotten.
            now_s = time.monotonic()
            if self.sockets.lost() is None:
                lost_since_s = None
            elif lost_since_s is None:
                lost_since_s = now_s
            elif now_s - lost_since_s > FORGOTTEN_S:
                raise RuntimeError("A connection to another rank ended, and the collective does not.")
        work.wait()

    def launch(self, method: str, *arguments: Any, control: bool = False) -> "Pending":
        """Start a collective of the backend by its name, for `wait`. Raises what `failed` says when it cannot start."""
        self.check_use()
        return self.start(self.control if control or self._nccl is None else self._nccl, method, *arguments)

    def start(self, backend: Backend, method: str, *arguments: Any) -> "Pending":
        """Start a collective on one of this generation's backends, for `wait`. Raises what `failed` says when it cannot start."""
        self.check_use()
        try:
            return Pending(backend.launch(method, *arguments), backend is not self._nccl)
        except RuntimeError as error:
            raise self.failed(error) from error

    def check(self) -> None:
        """Raise Aborted once the groups have been aborted."""
        if self._aborted:
            raise Aborted(f"The groups of generation {self.generation} were left.")

    def check_use(self) -> None:
        """Raise as `check` does, and UsageError in a moment in which nothing may communicate."""
        if self.is_applying:
            raise UsageError(
                "A hook of step.commit() calls a collective. If a rank died in it, some ranks would have the step and some would "
                "not. Call it between steps, in job.collective()."
            )
        self.check()

    def failed(self, error: BaseException) -> GroupBroken | BackendError:
        """Return what a collective's error means: these groups were ended, a rank was lost, or the backend itself failed.

        The connections tell, not the error's text: they ended before gloo could notice it. NCCL may notice it earlier; it has
        errors of its own for that, which the user's mistakes do not raise.
        """
        if self._aborted:
            return Aborted(f"The groups of generation {self.generation} were left.")
        lost = self.sockets.lost()
        if lost is None and isinstance(error, torch.distributed.DistError):
            return PeerLost(str(error))
        if lost is not None:
            return PeerLost(str(error), self.who_is_lost())
        said = str(error)
        return BackendError(
            said if isinstance(error, BackendError) else f"A collective failed, and no rank was lost: {said}"
        )

    def open_device(self) -> tuple[Any, int]:
        """Return a device for gloo on this worker's address, and the port that it listens on."""
        return self.sockets.open_device(self._host)

    # --- the end -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End everything that waits on these groups, now. Any thread, any number of times."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self.sockets.shut_down()
        if self._nccl is not None:
            with contextlib.suppress(RuntimeError):
                self._nccl.launch("abort")
        self._done.set()

    def close(self) -> None:
        """Abort, and let go of the memory in a thread: a backend's destructor waits for its threads (`backends`)."""
        self.abort()
        held: list[Any] = [self._store]
        for backend in (self._nccl, self._gloo, *(gloo for _, gloo in self._teams)):
            if backend is not None:
                held += backend.release()
        let_go(held, [group for group in (self._world, *(group for group, _ in self._teams)) if group is not None])
        self._world = self._nccl = self._gloo = self._store = None
        self._teams = []

    def keep(self, group: Any, backend: Backend) -> None:
        """Let go of a team's together with the groups."""
        self._teams.append((group, backend))

    def _store_rank(self) -> int | None:
        document = self._document
        return document.rank_offset(document.store.pod_uid) if document is not None else None

    def _one_of(self, lost: Sequence[Connection]) -> int | None:
        """Return a rank of the member that was lost. None where it is not known, or where there are several: who is slow also
        sees those that have left because of it."""
        ranks = {self._rank_at(kept.host, kept.port) for kept in lost}
        document = self._document
        if document is None or None in ranks:
            return None
        known = [rank for rank in ranks if rank is not None]
        return min(known) if len({document.member_of_rank(rank).pod_uid for rank in known}) == 1 else None

    def _rank_at(self, host: str, port: int) -> int | None:
        """Return the rank at the other end of a connection, None where that is not known. Where the other side connected to
        us, the port is any: then it is the host's, if only one member is there."""
        document = self._document
        if document is None:
            return None
        if (host, port) == (self.assignment.store_host, self.assignment.store_port):
            return self._store_rank()
        listening = [rank for rank in self._ranks_by_port.get(port, ()) if document.member_of_rank(rank).host == host]
        if listening:
            return listening[0]
        there = [member.pod_uid for member in document.members if member.host == host]
        return document.rank_offset(there[0]) if len(there) == 1 else None

    def who_is_lost(self, ports: Mapping[int, int] | None = None) -> int | None:
        """Return the rank that was lost; None: it is not known. Where no connection tells, the others are asked (`knock`).

        `ports`: where they listen, by rank; absent: for the generation's own gloo.
        """
        lost, document = self.sockets.lost(), self._document
        if lost:
            return self._one_of(lost)
        if document is None:
            return None
        if ports is None:
            ports = {rank: port for port, ranks in self._ranks_by_port.items() for rank in ranks}
        others = {r: (document.member_of_rank(r).host, port) for r, port in ports.items() if r != self.rank}
        return lost_rank(knock(others), lambda rank: document.member_of_rank(rank).pod_uid)
