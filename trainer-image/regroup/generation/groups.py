"""Store and process groups of one generation: one object that forms once and ends with one `abort()`.

torch 2.13's gloo ignores `abort`, so what `sockets` found of it is shut down: every thread that is blocked on one raises.
NCCL has an abort of its own, which runs in a thread of its own (`backends`). Forming and connecting run in helper threads,
because the store's constructor and NCCL's cannot be interrupted, but a wait for a thread can. Nothing here decides when. Groups of
some of the ranks are in `team`, what is particular to NCCL is in `nccl`.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore, Work

from regroup.errors import Aborted, BackendError, GroupBroken, PeerLost, UsageError
from regroup.protocol import codec
from regroup.protocol.document import Document
from regroup.protocol.local import Assignment

from . import nccl
from .adoption import Arrival
from .backends import Backend, let_go, wait_ended
from .origins import collective, pass_others_on
from .pauses import pause_s
from .peers import Peers
from .sockets import Sockets, device_alone
from .tcp_store import CONNECT, Server, open_store

T = TypeVar("T")
_ALL = ""
"""Name of all ranks among those of parts."""
_FOREVER = timedelta(days=30)
"""No collective times out: membership ends a group, never a clock (design, rule 1 of three)."""
_SLICE = timedelta(milliseconds=20)
"""Longest time that an abort goes unnoticed in a wait that gloo itself never ends."""

FORGOTTEN_S = 1.0
"""Seconds after the end of a connection at which a wait that is not over fails: gloo has then forgotten its message."""


def _say_nothing() -> None:
    pass


class Pending(NamedTuple):
    """A collective that has been started."""

    work: Work
    backend: Backend


@dataclass(frozen=True)
class Gathering:
    """The knowledge of every rank when the groups stand: the document and the arrivals by rank."""

    document: Document
    arrivals: tuple[Arrival, ...]


def open_gloo(store: Any, rank: int, size: int, device: Any) -> Backend:
    """Return a gloo backend whose members connect now, within 10 s, and whose collectives never time out."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = [device], 2, CONNECT
    gloo = ProcessGroupGloo(store, rank, size, options)
    gloo.set_timeout(_FOREVER)
    return Backend(gloo)


class Groups:
    """The groups of one generation, `rank` of `world_size`. `abort` may be called from any thread, at any time."""

    def __init__(
        self, assignment: Assignment, host: str, device: torch.device, parts: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """`parts`: ranks, this one among them, by the name of a part that forms with the generation (`part`). All ranks of one
        give it the same name, and the names have one order in all ranks."""
        self.assignment = assignment
        self.generation = assignment.number
        self.rank = assignment.rank
        self.world_size = assignment.world_size
        self.device = device
        self._host = host
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Held while a work is asked whether it has ended."""
        self._done = threading.Event()
        """A helper thread has finished its work for the main thread, or these groups have ended."""
        self._aborted = False
        self.sockets = Sockets(assignment.store_port)
        self.peers = Peers(assignment)
        self._store: Any = None
        self._server: Server | None = None
        """The server of the store, if it is this process."""
        self._gloo: Backend | None = None
        self._nccl: dict[str, Backend] = {}
        """NCCL's communicator of each part by its name, and that of all ranks (_ALL). Empty if tensors are in host memory."""
        self._first: Any = None
        """The tensor of the communicators' first collectives. The GPU may write there until an abort has ended."""
        self._world: Any = None
        self._wanted = dict(parts or {})
        self._parts: dict[str, Part] = {}
        self._teams: list[tuple[Any, Backend]] = []
        """Torch's groups of some of the ranks, with the backend of each."""
        self._on_device: dict[int, Work] = {}
        """Collectives on the GPU that nobody has waited for yet, by id: with them their tensors live."""
        self._ordered: dict[int, Pending] = {}
        """The last collective of each backend on the GPU that only the GPU has waited for (`order`)."""
        self.waited_s = 0.0
        """Seconds that the main thread has waited for other ranks in all."""
        self.waits_since_s: float | None = None
        """Monotonic time since which the main thread waits for other ranks (`waiting`); None: it does not."""
        self._at_abort: Callable[[], None] = _say_nothing
        self.is_applying = False
        """A commit is being applied: that is local, so nothing may communicate."""

    # --- forming -----------------------------------------------------------------------------------------------------

    def form(self, arrival: Arrival, listen_fd: int | None, on_arrival: Callable[[], None] = _say_nothing) -> Gathering:
        """Build store and groups and return what all ranks brought. Blocks until every rank is there.

        Raises PeerLost when a peer or the store cannot be reached, Aborted at once when `abort` is called.
        `listen_fd`: the store's listening socket, for the rank that hosts it. `on_arrival` is called in another thread
        once this rank waits at the store for the others.
        """
        return self._apart("form", lambda: self._form(arrival, listen_fd, on_arrival))

    def connect(self) -> None:
        """Connect the GPUs, where the model is on one. Blocks until those of every rank are; all ranks call it after `form`.

        Each part of the generation gets a communicator of its own. A world or a part of one rank has nobody to connect to. If a
        collective is called there on the GPU, torch makes a communicator then.
        Raises as `form` does; PeerLost also after `nccl.CONNECT_S`, twice where the ends of older communicators are waited for.
        """
        if not nccl.serves(self.device):
            return
        nccl.prepare()
        members = {_ALL: tuple(range(self.world_size))} | {name: part.ranks for name, part in self._parts.items()}
        alone = {name: ranks for name, ranks in members.items() if len(ranks) == 1}
        for name, ranks in alone.items():
            self._open_nccl(name, ranks)
        together = {name: ranks for name, ranks in members.items() if len(ranks) > 1}
        if together:
            self._apart("connect", lambda: self._connect(together), timeout_s=2.0 * nccl.CONNECT_S)

    def _connect(self, members: Mapping[str, Sequence[int]]) -> None:
        # One after the other, in one order of names on all ranks: so no two ranks wait for each other in different ones.
        # Beside several of them no older one may end: what one frees on the GPU could wait for a collective of another (adr/0026).
        wait_ended(nccl.most_ending(os.environ) if len(members) == 1 else 0)
        self._check_aborted()
        tensor = self._first = nccl.first_tensor(self.device)
        for name, ranks in members.items():
            nccl.connect(self._open_nccl(name, ranks), tensor, self.is_completed)

    def _open_nccl(self, name: str, ranks: Sequence[int]) -> Backend:
        keys = self._keys(f"nccl/{name}/{ranks[0]}")
        backend = nccl.open_backend(keys, ranks.index(self.rank), len(ranks))
        with self._lock:
            if not self._aborted:
                self._nccl[name] = backend
                return backend
        let_go(backend.release(), [])  # `abort` came too early to reach it
        raise Aborted("interrupted")

    def _keys(self, name: str) -> PrefixStore:
        """Return the store's keys that are this generation's under a name. Raises Aborted once the groups have let the store go: a
        helper thread may come here after that."""
        with self._lock:
            if self._store is None:
                raise Aborted(f"The groups of generation {self.generation} were left.")
            return PrefixStore(f"{self.assignment.store_prefix}/{name}", self._store)

    def _apart(self, doing: str, what: Callable[[], T], timeout_s: float | None = None) -> T:
        """Return what a function returns that cannot be interrupted. It runs in a thread; `abort` ends the wait for it.

        The thread ends by itself: `abort` has shut the sockets down on which it waits, and NCCL has a bound of its own.
        """
        results: list[T | BaseException] = []
        self._done.clear()

        def run() -> None:
            try:
                results.append(what())
            except BaseException as error:
                results.append(error.with_traceback(None))  # its frames hold the store open
            self._done.set()

        # After an abort, too: the store's listening socket is its to close.
        threading.Thread(target=run, name=f"regroup-{doing}", daemon=True).start()
        if not self._aborted:
            self._done.wait(timeout_s)
        if self._aborted:
            raise Aborted(f"Forming generation {self.generation} was interrupted.")
        if not results:
            raise PeerLost(f"Forming generation {self.generation} did not end within {timeout_s:.0f} s.")
        result = results[0]
        if not isinstance(result, BaseException):
            return result
        if isinstance(result, GroupBroken) or not isinstance(result, (RuntimeError, OSError)):
            raise result
        raise PeerLost(f"Forming generation {self.generation} ended: {result}")

    def _form(self, arrival: Arrival, listen_fd: int | None, on_arrival: Callable[[], None]) -> Gathering:
        assignment = self.assignment
        server, store = self._open_store(listen_fd)
        with self._lock:
            # An abort before the store was there has shut nothing down: its host would wait for the others for ever. And `close`
            # has been here already: what it did not find would hold the store's port.
            self._check_aborted()
            self._server, self._store = server, store
        keys = PrefixStore(assignment.store_prefix, store)
        keys.set_timeout(_FOREVER)
        if assignment.hosts_store:
            if assignment.document is None:
                raise UsageError("The agent named this process as the store's host without the generation document.")
            keys.set("document", codec.canonical(codec.to_json(assignment.document)).decode())
        device, port = self.open_device(self.world_size)
        here = {"arrival": arrival.to_json(), "port": port}
        keys.set(f"here/{self.rank}", json.dumps(here))
        # The barrier waits without bound: a member may be in the middle of a long step. The operator decides who is slow.
        if keys.add("arrived", 1) == self.world_size:
            keys.set("all", "1")
        on_arrival()
        keys.wait(["all"], _FOREVER)
        gathering = self._gathered(keys)
        self._check_aborted()
        self._open_gloo(keys, device)
        for name, ranks in self._wanted.items():
            self._parts[name] = self._open_part(name, tuple(ranks))
        self.sockets.keep(self.world_size - 1)
        return gathering

    def _gathered(self, keys: PrefixStore) -> Gathering:
        """Return what all ranks brought, and note where each one listens. Raises PeerLost if members have different documents."""
        document_text, *others = keys.multi_get(["document", *(f"here/{rank}" for rank in range(self.world_size))])
        document = codec.from_json(Document, codec.parse(document_text))
        if document.digest() != self.assignment.document_digest:
            raise PeerLost(f"The members of generation {self.generation} do not agree on its document.")
        self.peers.document = document
        arrivals = []
        for rank, text in enumerate(others):
            value = codec.parse(text)
            arrivals.append(Arrival.from_json(value["arrival"]))
            self.peers.ranks_by_port.setdefault(value["port"], []).append(rank)
        self.sockets.add_ports(self.peers.ranks_by_port)
        return Gathering(document, tuple(arrivals))

    def _open_gloo(self, keys: PrefixStore, device: Any) -> None:
        """Connect gloo among all ranks. Raises PeerLost or Aborted."""
        gloo, said = None, ""
        try:
            gloo = open_gloo(PrefixStore("gloo", keys), self.rank, self.world_size, device)
        except RuntimeError as error:
            pass_others_on(error)
            said = f"Forming generation {self.generation} ended: {error}"
        if gloo is None:  # here, for gloo's error holds the store open
            raise PeerLost(said, self.who_is_lost())
        with self._lock:
            self._gloo = None if self._aborted else gloo
        if self._gloo is None:
            let_go(gloo.release(), [])
        self._check_aborted()

    def _open_part(self, name: str, ranks: tuple[int, ...]) -> "Part":
        return Part(self, name, ranks, self.open_among(ranks, f"part/{name}/{ranks[0]}")[0])

    def open_among(self, ranks: Sequence[int], name: str) -> tuple[Backend, Any]:
        """Return a gloo backend among some of the ranks, this one among them, and the keys of the store that are theirs.

        All of them call it, in one order where there are several. Blocks until all have come. Raises GroupBroken.
        """
        rank, ports = list(ranks).index(self.rank), dict[int, int]()
        keys = self._keys(name)
        keys.set_timeout(_FOREVER)
        try:
            device, port = self.open_device(len(ranks))
            keys.set(f"port/{rank}", str(port))
            ports = dict(zip(ranks, map(int, keys.multi_get([f"port/{other}" for other in range(len(ranks))]))))
            self.sockets.add_ports(ports.values())
            gloo = open_gloo(PrefixStore("gloo", keys), rank, len(ranks), device)
        except RuntimeError as error:
            pass_others_on(error)
            self.check()
            lost_rank = self.who_is_lost(ports)
            raise PeerLost(f"A part of generation {self.generation} did not form: {error}", lost_rank) from error
        self.check()
        return gloo, keys

    def _open_store(self, listen_fd: int | None) -> tuple[Server | None, TCPStore]:
        return open_store(self.assignment, listen_fd, self.peers, self._check_aborted)

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
        """The backend for tensors on the model's device; None where that is the CPU. In a world of one it is not connected."""
        return self.nccl_of(_ALL)

    def nccl_of(self, part: str) -> Backend | None:
        """Return what `nccl` is, of a part."""
        return self._nccl.get(part)

    def part(self, name: str) -> "Part":
        """Return the ranks that were named when the generation formed."""
        return self._parts[name]

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
            group = ProcessGroup(self._keys("world"), self.rank, self.world_size)
            self.control.serve(group, "cpu", ProcessGroup.BackendType.GLOO)
            if self.nccl is not None:
                self.nccl.serve(group, "cuda", ProcessGroup.BackendType.NCCL)
            self._world = group
        return self._world

    def wait(self, pending: Sequence["Pending"]) -> None:
        """Wait for collectives, and on a GPU for their end there: then they have succeeded, and a step may be committed.

        Raises what `failed` says, Aborted at `abort`, and what a signal's handler raises meanwhile."""
        with self.waiting(), collective(self.failed):
            for one in pending:
                self._wait(one)
            self.forget_ended()  # a step that was thrown away waits for none of its own
        self.check()

    def wait_all(self, pending: Sequence["Pending"]) -> None:
        """As `wait`, and for what `order` has left to the GPU: what has been computed from that may be relied on afterwards.

        A read of a value of the GPU would wait for it, too. It would never end if a connection is lost or NCCL has an error.
        """
        self.wait([*self._ordered.values(), *pending])
        self._ordered = {}

    def forget_ended(self) -> None:
        """Let go of the tensors of collectives on the GPU that have ended. Raises Aborted."""
        for work in list(self._on_device.values()):
            if self.is_completed(work):
                self._on_device.pop(id(work), None)

    def order(self, pending: Sequence["Pending"]) -> None:
        """Have what this thread launches next see the results of collectives: on a GPU without a wait of the host, else by `wait`.

        That they have succeeded is known after `wait_all` only. Raises as `wait` does.
        """
        for one in pending:
            if one.backend.on_gpu:
                self.check()
                with collective(self.failed):
                    nccl.order(one.work)
                # Memory that is let go from here on is used again after the collective: by its own stream.
                self._on_device.pop(id(one.work), None)
                self._ordered[id(one.backend)] = one
        in_host_memory = [one for one in pending if not one.backend.on_gpu]
        if in_host_memory:
            self.wait(in_host_memory)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a block in which the main thread waits for other ranks. Other threads read `waits_since_s`."""
        began_s = self.waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self.waits_since_s = None
            self.waited_s += time.monotonic() - began_s

    def _wait(self, pending: "Pending") -> None:
        # In slices. gloo 2.13 forgets a send whose write fails because the connection was just closed, and its waiter would wait
        # for ever. The end of a slice changes nothing about the collective, and raises, too. On a GPU, NCCL may notice a lost
        # rank late or never, and its abort may not end.
        work, backend = pending
        lost_since_s: float | None = None
        now_s = began_s = looked_s = time.monotonic()
        while not self.is_completed(work):
            if backend.on_gpu:
                time.sleep(pause_s(now_s - began_s))
            else:
                try:
                    work.wait(_SLICE)
                except RuntimeError as error:
                    pass_others_on(error)
            now_s = time.monotonic()
            if now_s - looked_s < _SLICE.total_seconds():
                continue
            looked_s = now_s
            # What an ended connection still holds is read first; then the backend raises by itself, unless it has forgotten.
            if self.sockets.lost() is None:
                lost_since_s = None
            elif lost_since_s is None:
                lost_since_s = now_s
            elif now_s - lost_since_s > FORGOTTEN_S and not self.is_completed(work):
                raise RuntimeError("A connection to another rank ended, and the collective does not.")
        if not backend.on_gpu:
            work.wait()
            return
        nccl.finish(backend, work)
        self._on_device.pop(id(work), None)

    def is_completed(self, work: Work) -> bool:
        """Return whether a collective has ended. Raises Aborted."""
        # NCCL's abort waits for this lock. From there on a work on a GPU is not asked: the question would wait for the abort's end,
        # and perhaps hold the interpreter.
        with self._asking:
            self.check()
            return work.is_completed()

    def launch(self, method: str, *arguments: Any, control: bool = False) -> "Pending":
        """Start a collective of the backend by its name, for `wait`. Raises what `failed` says when it cannot start."""
        self.check_use()
        return self.start(self.control if control or self.nccl is None else self.nccl, method, *arguments)

    def start(self, backend: Backend, method: str, *arguments: Any) -> "Pending":
        """Start a collective on one of this generation's backends, for `wait`. Raises what `failed` says when it cannot start."""
        self.check_use()
        if backend.on_gpu:
            nccl.with_work(arguments)
        with collective(self.failed):
            work = backend.launch(method, *arguments)
        return self.started(work, backend)

    def started(self, work: Work, backend: Backend) -> "Pending":
        """Return a collective that was started on one of this generation's backends, for `wait` or `order`.

        On a GPU its tensors are kept until then. The script may forget them if a step is cut off, while the GPU still writes there.
        """
        if backend.on_gpu:
            self._on_device[id(work)] = work
        return Pending(work, backend)

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

    def open_device(self, size: int) -> tuple[Any, int]:
        """Return a device for a gloo of so many ranks, on this worker's address, and the port that it listens on. A single rank has
        nobody to listen for: then the port is 0."""
        return self.sockets.open_device(self._host) if size > 1 else (device_alone(), 0)

    # --- the end -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End everything that waits on these groups, now. Any thread, any number of times. Waits for nothing itself."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            # Within the lock: `close`, in the thread that sees the flag, must find a backend handed over, or nothing aborts it. All
            # of them at once: an abort frees memory of the GPU, and waits there for collectives of the others.
            for backend in self._nccl.values():
                backend.abort(self._asking, keep=(self._on_device, self._first))
        self.sockets.shut_down()
        self._done.set()
        self._at_abort()

    def at_abort(self, call: Callable[[], None]) -> None:
        """Have a function called once these groups are aborted, in any thread, perhaps twice. It ends waits that are not on their
        connections. If they have been aborted it is called now."""
        self._at_abort = call
        if self._aborted:
            call()

    def end_in_order(self) -> None:
        """End the GPUs' communicators beside what follows, without an abort. All ranks call it after one step, and `close` later.

        Where a collective may still run, or a rank was lost, this does nothing, and `close` aborts them. Nor does it after an
        abort.
        """
        is_whole = self.sockets.lost() is None
        with self._lock:
            if is_whole and not self._on_device:
                for backend in self._nccl.values():
                    backend.end()

    def close(self) -> None:
        """Abort, and let go of the memory in a thread: a backend's destructor waits for its threads (`backends`)."""
        self.abort()
        held: list[Any] = [self._store, self._server]
        parts = [part.backend for part in self._parts.values()]
        for backend in (*self._nccl.values(), self._gloo, *parts, *(gloo for _, gloo in self._teams)):
            if backend is not None:
                held += backend.release()
        let_go(held, [group for group in (self._world, *(group for group, _ in self._teams)) if group is not None])
        self._world = self._gloo = self._store = self._server = None
        self._nccl, self._parts, self._teams, self._ordered = {}, {}, [], {}

    def keep(self, group: Any, backend: Backend) -> None:
        """Let go of a team's together with the groups."""
        self._teams.append((group, backend))

    def who_is_lost(self, ports: Mapping[int, int] | None = None) -> int | None:
        """Return the rank that was lost; None: it is not known. Where no connection tells, the others are asked (`knock`).

        `ports`: where they listen, by rank; absent: for the generation's own gloo.
        """
        lost = self.sockets.lost()
        if lost:
            return self.peers.one_of(lost)
        return self.peers.who_refuses(self.rank, ports)


@dataclass(frozen=True)
class Part:
    """Some or all ranks of a generation, with connections of their own: their collectives may come in any order among those of
    other parts. It ends with the generation's groups."""

    groups: Groups
    name: str
    ranks: tuple[int, ...]
    """Ranks of the generation, in the order of the part's own ranks."""
    backend: Backend
    """gloo."""

    @property
    def rank(self) -> int:
        """This process's place among `ranks`."""
        return self.ranks.index(self.groups.rank)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        return self.groups.device

    @property
    def nccl(self) -> Backend | None:
        return self.groups.nccl_of(self.name)

    def launch(self, method: str, *arguments: Any, control: bool = False) -> Pending:
        nccl_ = self.nccl
        return self.groups.start(self.backend if control or nccl_ is None else nccl_, method, *arguments)

    def wait(self, pending: Sequence[Pending]) -> None:
        self.groups.wait(pending)

    def order(self, pending: Sequence[Pending]) -> None:
        self.groups.order(pending)
