"""Agents and an operator in one small object: speaks `regroup.protocol.local` to real trainer processes, on command.

A test scripts generations with it. It keeps what an agent keeps (entered, adopted, incarnation, a listening socket for the
store) and records every message with its time. It decides nothing: the tests say who is a member.
"""

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.polling import until
from harness.processes import alive
from regroup.protocol import env, local
from regroup.protocol.codec import ProtocolError
from regroup.protocol.document import (
    FORCED,
    CheckpointRef,
    Document,
    LineageEntry,
    Member,
    MemberSeal,
    OlderGeneration,
    Store,
)
from regroup.protocol.state import StatePair
from tests.trainer.zygote import Zygote


@dataclass
class Heard:
    """One message from a trainer."""

    at_s: float
    message: Any


@dataclass
class Worker:
    """One pod: an agent with one trainer process."""

    slot: int
    pod_uid: str
    path: Path
    output: Path
    pid: int = 0
    incarnation: int = 0
    entered: int = 0
    adopted: int = 0
    connection: socket.socket | None = None
    heard: list[Heard] = field(default_factory=list)
    stores: dict[int, socket.socket] = field(default_factory=dict)
    answers_entering: bool = True

    def messages(self, kind: type, generation: int | None = None) -> list[Any]:
        found = [h.message for h in self.heard if isinstance(h.message, kind)]
        return [m for m in found if generation is None or getattr(m, "generation", None) == generation]

    @property
    def log(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


class AgentDouble:
    """Workers by slot, and the generations that the test announces."""

    def __init__(
        self, directory: Path, zygote: Zygote, script: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.directory = directory
        self.workers: dict[int, Worker] = {}
        self.documents: list[Document] = []
        self._first = 1
        """Number of the first generation of the job."""
        self.everyone: list[Worker] = []
        self.zygote, self.script, self._environment = zygote, script, environment or {}
        self._changed = threading.Condition()
        self._listeners: list[socket.socket] = []
        self._closed = False

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, slot: int, **environment: str) -> Worker:
        """Add a worker (a new pod in its slot) and start its trainer."""
        index = len(self.everyone)
        worker = Worker(slot, f"pod-{slot}-{index}", self.directory / f"{index}.sock", self.directory / f"{index}.log")
        self.workers[slot] = worker
        self.everyone.append(worker)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(worker.path))
        listener.listen(8)
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(worker, listener), daemon=True).start()
        self.run(slot, **environment)
        return worker

    def run(self, slot: int, **environment: str) -> None:
        """Start (again) the trainer process of a worker, in place."""
        worker = self.workers[slot]
        worker.incarnation += 1
        values = {
            env.SOCKET: str(worker.path),
            env.INCARNATION: str(worker.incarnation),
            env.LOCAL_RANK: "0",
            env.POD_IP: "127.0.0.1",
            env.JOB_UID: "job",
            "TEST_GO": str(self.directory / "go"),
            "OMP_NUM_THREADS": "1",
            **self._environment,
            **environment,
        }
        worker.pid = self.zygote.start(self.script, values, worker.output)

    def go(self) -> None:
        """Let the trainers run at full speed from here on."""
        (self.directory / "go").touch()

    def kill(self, slot: int) -> float:
        """SIGKILL a trainer process; return the monotonic time in seconds."""
        worker = self.workers[slot]
        at_s = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        return at_s

    # --- generations -------------------------------------------------------------------------------------------------

    def announce(
        self,
        slots: Iterable[int],
        kind: str = FORCED,
        *,
        older: Iterable[int] | None = None,
        lost: Iterable[str] = (),
        seals: Iterable[MemberSeal] = (),
        checkpoint: CheckpointRef | None = None,
        hosts: int | None = None,
        to: Iterable[int] | None = None,
        port: int = 0,
        imported: str | None = None,
        is_new: bool = False,
    ) -> Document:
        """Send the next generation to its members and to all other workers. `older`: numbers; default: the last one. `port`: of a
        store whose socket has been given away; 0: a fresh one. `is_new`: it is another job's first one."""
        members = [self.workers[slot] for slot in slots]
        number = self.documents[-1].number + 1 if self.documents else 1
        if is_new:
            self._first = number
        host = self.workers[hosts] if hosts is not None else members[number % len(members)]  # as the operator chooses
        if not port:
            store = socket.socket()
            store.bind(("127.0.0.1", 0))
            store.listen(64)
            host.stores[number], port = store, store.getsockname()[1]
        numbers = set(older) if older is not None else {number - 1} - set(range(self._first))
        document = Document(
            number=number,
            uid=uuid.uuid4().hex,
            job_uid="job",
            kind=kind,
            members=tuple(Member(w.slot, w.pod_uid, w.pod_uid, w.incarnation, "127.0.0.1", 1) for w in members),
            store=Store("127.0.0.1", port, host.pod_uid),
            older=tuple(
                OlderGeneration(d.number, d.uid, tuple(m.pod_uid for m in d.members))
                for d in self.documents
                if d.number in numbers
            ),
            seals=tuple(seals),
            lost=tuple(lost),
            lineage=tuple(self._lineage()),
            checkpoint=checkpoint,
            imported=imported,
        )
        self.documents.append(document)
        for worker in self.workers.values():
            if to is None or worker.slot in to:
                self.tell(worker, document)
        return document

    def tell(self, worker: Worker, document: Document) -> None:
        """Send a generation to one worker, as its agent would."""
        uids = [m.pod_uid for m in document.members]
        member = worker.pod_uid in uids
        host = document.store.pod_uid == worker.pod_uid
        self.send(
            worker,
            local.Assignment(
                number=document.number,
                uid=document.uid,
                kind=document.kind,
                member=member,
                rank=uids.index(worker.pod_uid) if member else 0,
                world_size=document.world_size,
                local_rank=0,
                local_world_size=1,
                group_rank=uids.index(worker.pod_uid) if member else 0,
                pod_uid=worker.pod_uid,
                store_host=document.store.host,
                store_port=document.store.port,
                store_prefix=document.store_prefix(),
                hosts_store=host,
                document_digest=document.digest(),
                document=document if host else None,
            ),
        )

    def send(self, worker: Worker, message: Any) -> None:
        if worker.connection is not None:
            with contextlib.suppress(OSError):
                worker.connection.sendall(local.encode(message))

    def stop(self, outcome: str, slots: Iterable[int] | None = None) -> None:
        for slot in list(self.workers) if slots is None else slots:
            self.send(self.workers[slot], local.StopLocally(outcome))

    def finish(self) -> None:
        """Let the loops end, as an operator does once every member has committed the last step. Who is no member is released."""
        for slot, worker in self.workers.items():
            finished = worker.messages(local.FinishedLocally)
            if not finished:
                self.stop("Released", [slot])
                continue
            number, step = finished[-1].generation, finished[-1].step
            document = next(d for d in self.documents if d.number == number)
            rank = document.rank_offset(worker.pod_uid)
            self.send(worker, local.FinishLocally(number, step, rank, document.world_size))

    def _lineage(self) -> list[LineageEntry]:
        found = []
        for document in self.documents:
            if document.number < self._first:
                continue
            starts = [m.start_step for w in self.everyone for m in w.messages(local.AdoptedLocally, document.number)]
            if starts:
                found.append(LineageEntry(document.number, starts[0]))
        return found

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
        """Return the condition's first true value; fail with the trainers' output when it does not come."""

        def locked() -> Any:
            with self._changed:
                return condition()

        def stories() -> str:
            return "\n".join(self._story(w) for w in self.everyone)

        return until(locked, what, timeout_s=timeout_s, details=stories)

    def _story(self, worker: Worker) -> str:
        heard = "\n".join(f"{h.at_s:.3f} {h.message}" for h in worker.heard[-8:])
        state = "runs" if alive(worker.pid) else "ended"
        return f"--- slot {worker.slot} ({worker.pod_uid}) {state}\n{heard}\n{worker.log[-3000:]}"

    def wait_attached(self, *slots: int) -> None:
        self.wait(lambda: all(self._attached(self.workers[s]) for s in slots), f"attach of {slots}")

    def wait_step(self, generation: int, step: int, slots: Iterable[int]) -> float:
        """Wait until all of these have committed `step` in `generation`; return the time of the first commit of it."""
        chosen = list(slots)

        def times() -> list[float]:
            found = []
            for slot in chosen:
                commits = [
                    h.at_s
                    for h in self.workers[slot].heard
                    if isinstance(h.message, local.Committed)
                    and h.message.generation == generation
                    and h.message.step >= step
                    and h.message.loss is not None
                ]
                if not commits:
                    return []
                found.append(commits[0])
            return found

        first: float = min(self.wait(times, f"step {step} of generation {generation} on slots {chosen}"))
        return first

    def first_commit(self, generation: int, slots: Iterable[int]) -> float:
        """Time at which the last of these slots made its first commit in a generation."""
        return self.wait_step(generation, 0, slots)

    def wait_left(self, slot: int, *, cause: bool = False, timeout_s: float = 60) -> list[Any]:
        """Wait until a worker's trainer has left its generation, `cause`: and said why; return all that it said."""

        def said() -> list[Any]:
            return [m for m in self.workers[slot].messages(local.Left) if m.cause or not cause]

        found: list[Any] = self.wait(said, f"slot {slot} leaves", timeout_s)
        return found

    def wait_finished(self, *slots: int) -> None:
        """Wait until these workers have said that they have finished: up to 300 steps, each 0.2 s where other work goes on."""
        number = self.documents[-1].number
        self.wait(
            lambda: all(self.workers[s].messages(local.FinishedLocally, number) for s in slots),
            f"finish of {slots}",
            timeout_s=180,
        )

    def wait_exit(self, *slots: int) -> None:
        self.wait(lambda: not any(alive(self.workers[s].pid) for s in slots), f"exit of {slots}")

    def run_and_replace_rank_0(self, step: int) -> None:
        """Run two ranks to their end. Rank 0 is killed once `step` is committed, and another process takes its place."""
        for slot in range(2):
            self.start(slot)
        self.wait_attached(0, 1)
        self.announce(range(2))
        self.wait_step(1, step, range(2))
        self.kill(0)
        self.run(0)
        self.wait_attached(0)
        self.announce(range(2))
        self.wait_finished(0, 1)
        self.finish()
        self.wait_exit(0, 1)

    def close(self) -> None:
        self._closed = True
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            listener.close()
        for worker in self.everyone:
            if worker.pid and alive(worker.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            for store in worker.stores.values():
                store.close()

    # --- the agent's side --------------------------------------------------------------------------------------------

    def _attached(self, worker: Worker) -> bool:
        attaches = worker.messages(local.Attach)
        return bool(attaches) and attaches[-1].incarnation == worker.incarnation and not attaches[-1].rehearses

    def _accept(self, worker: Worker, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(worker, connection), daemon=True).start()

    def _serve(self, worker: Worker, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                try:
                    message = local.FROM_TRAINER.decode_line(line)
                except ProtocolError as error:
                    raise AssertionError(str(error)) from error
                if isinstance(message, local.TakeStore):
                    store = worker.stores.pop(message.generation, None)
                    if store is None:
                        connection.sendall(b"0")
                    else:
                        socket.send_fds(connection, [b"1"], [store.fileno()])
                        store.close()
                    connection.close()
                    return
                self._hear(worker, connection, message)

    def _hear(self, worker: Worker, connection: socket.socket, message: Any) -> None:
        with self._changed:
            worker.heard.append(Heard(time.monotonic(), message))
            if isinstance(message, local.Attach):
                worker.connection = connection
            self._changed.notify_all()
        if isinstance(message, local.Attach) and message.rehearses:
            self.send(worker, local.Answer("rehearse", 0, True, worker.adopted))
        if isinstance(message, local.Attach) and not message.rehearses and self.documents:
            newest = self.documents[-1]
            if newest.number > worker.entered:
                self.tell(worker, newest)
        if isinstance(message, local.Entering):
            ok = message.generation > worker.entered
            before = worker.adopted
            worker.entered = max(worker.entered, message.generation)
            if worker.answers_entering:
                self.send(worker, local.Answer("entering", message.generation, ok, before))
        if isinstance(message, local.AdoptedLocally):
            worker.adopted = max(worker.adopted, message.generation)
            self.send(worker, local.Answer("adopted", message.generation, True, worker.adopted))


def seal_of(worker: Worker) -> MemberSeal:
    """The seal that an operator would build from a worker's last `Left`."""
    left = worker.messages(local.Left)[-1]
    state = None if left.state is None else StatePair(*left.state)
    return MemberSeal(worker.pod_uid, left.left_up_to, state, worker.adopted, left.state_adopted)
