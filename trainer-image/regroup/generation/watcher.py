"""The thread that listens to the agent, so that a generation is heard while the main thread trains.

Owns the long connection to the agent's Unix socket (messages of `regroup.protocol.local`) and what was heard there. Owns the one
target, the groups in use, to abort when a newer generation must be entered. Decides nothing else. The agent's end is this process's
end: a trainer without an agent could neither be told to stop nor be believed, so it kills itself.
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from regroup.protocol import local
from regroup.protocol.codec import ProtocolError
from regroup.protocol.document import FORCED
from regroup.protocol.local import (
    SUSPENDED,
    Answer,
    Assignment,
    DumpStacksLocally,
    FinishLocally,
    PruneLocally,
    StopLocally,
)
from regroup.protocol.wire import ProcessStack

from . import stacks
from .outbox import Outbox

_TAKE_STORE_S = 5.0
"""Bound for the agent's answer; without a descriptor the trainer binds the port itself, or fails to form and says so."""


class Target(Protocol):
    """Something of one generation that can be ended from another thread."""

    def abort(self) -> None: ...

    @property
    def waits_since_s(self) -> float | None:
        """Monotonic time since which the main thread is inside a collective; None: it is in none."""
        ...


class Watcher:
    """Listens until the process ends. All methods are called from the main thread, except `_listen` and what it calls."""

    def __init__(self, path: str, attach: local.Attach) -> None:
        self._path, self._attach = path, attach
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        os.register_at_fork(after_in_child=self._socket.close)  # or the agent would not see this process's end in it
        self._changed = threading.Condition()
        self._outbox = Outbox(self._write, self._has_room)
        self._newest: Assignment | None = None
        self._forced_number = 0
        self._stop: StopLocally | None = None
        self._finish: FinishLocally | None = None
        self._answers: dict[tuple[str, int], Answer] = {}
        self._target: tuple[int, Target, bool] | None = None
        self._closed = False
        self._prune: PruneLocally | None = None
        self._waits_since_s: float | None = None
        """Monotonic time since which the main thread waits for the agent's word."""
        faulthandler.register(local.STACK_SIGNAL, file=2, all_threads=True)  # the agent may send it from `attach` on
        self._thread = threading.Thread(target=self._listen, name="regroup-watcher", daemon=True)
        self.send(attach)
        self._thread.start()

    # --- what was heard ----------------------------------------------------------------------------------------------

    @property
    def stop(self) -> StopLocally | None:
        return self._stop

    @property
    def finish(self) -> FinishLocally | None:
        """The end of the job's steps, once it was heard: no generation follows it."""
        return self._finish

    @property
    def _ends_after_a_step(self) -> bool:
        """True if the end came as a planned change does: the group leaves together, after a step."""
        return self._stop is not None and self._stop.outcome == SUSPENDED

    def knows_newer(self, generation: int) -> bool:
        """Return whether any generation above this one was heard, planned or forced."""
        newest = self._newest
        return self._ends_after_a_step or (newest is not None and newest.number > generation)

    def must_leave(self, generation: int) -> bool:
        """Return whether the group of `generation` must be left at once.

        The reasons are a newer forced generation and a stop. A suspension is no reason: its group finishes a step first.
        """
        ended = self._stop is not None and not self._ends_after_a_step
        return ended or self._forced_number > generation

    def wait_above(self, number: int) -> Assignment | FinishLocally | StopLocally:
        """Block until an assignment above `number` was heard, or the end."""
        with self._changed, self._waiting():
            self._changed.wait_for(lambda: bool(self._stop or self._finish) or self.knows_newer(number))
            if self._stop is not None:
                return self._stop
            if self._finish is not None:
                return self._finish
            assert self._newest is not None
            return self._newest

    def wait_forced_above(self, generation: int) -> None:
        """Block until `must_leave(generation)`, or any end. A finished rank calls it: it ignores planned changes."""
        with self._changed, self._waiting():
            self._changed.wait_for(lambda: bool(self._stop or self._finish) or self.must_leave(generation))

    def wait_newer(self, generation: int, timeout_s: float) -> bool:
        """Block until a generation above this one was heard, at most `timeout_s`; return whether it was."""
        with self._changed, self._waiting():
            return self._changed.wait_for(lambda: self._stop is not None or self.knows_newer(generation), timeout_s)

    def take_prune(self) -> PruneLocally | None:
        """Return the newest word on which checkpoints to keep, once."""
        prune, self._prune = self._prune, None
        return prune

    # --- what is to be interrupted -----------------------------------------------------------------------------------

    def watch(self, generation: int, target: Target, *, settled: bool) -> None:
        """Abort `target` from now on when it must be left; at once, if that was heard already.

        While it forms and adopts (`settled` False) any newer generation ends it; a settled group ends for forced ones.
        """
        with self._changed:
            self._target = (generation, target, settled)
            due = self._due()
        if due:
            target.abort()

    def unwatch(self) -> None:
        with self._changed:
            self._target = None

    def _due(self) -> bool:
        if self._target is None:
            return False
        generation, _, settled = self._target
        superseded = self._finish is not None or self.knows_newer(generation)
        return self.must_leave(generation) or (not settled and superseded)

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send one message to the agent."""
        self._outbox.send(message)

    def may_rehearse(self) -> bool:
        """Block until the agent has answered the first `Attach`. Return False where no step follows: all are committed, or the
        job is stopped."""
        with self._changed, self._waiting():
            self._changed.wait_for(lambda: ("rehearse", 0) in self._answers or bool(self._stop or self._finish))
            return not (self._stop or self._finish)

    def ready(self) -> None:
        """Tell the agent that the rehearsal is over, or is left out: from now on this process waits for a generation."""
        if self._attach.rehearses:
            self._attach = replace(self._attach, rehearses=False)
            self.send(self._attach)

    def send_soon(self, message: local.Committed) -> None:
        """Send progress, at most every `outbox.EVERY_S` seconds."""
        self._outbox.send_soon(message)

    def _write(self, message: Any) -> None:
        try:
            self._socket.sendall(local.encode(message))
        except OSError:
            self._agent_gone()

    def _has_room(self) -> bool:
        """Return whether progress can be written at once: Linux calls a Unix socket writable while most of its buffer is free."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(0))

    def ask(self, message: local.Entering | local.AdoptedLocally) -> Answer:
        """Send a message that the agent answers when it has persisted it, and return the answer; a stop is a no."""
        key = ("entering" if isinstance(message, local.Entering) else "adopted", message.generation)
        with self._changed:
            self._answers.pop(key, None)
        self.send(message)
        with self._changed, self._waiting():
            self._changed.wait_for(lambda: key in self._answers or self._stop is not None)
            return self._answers.pop(key, None) or Answer(key[0], message.generation, ok=False, adopted=0)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self._waits_since_s = None

    def take_store(self, generation: int) -> int | None:
        """Return the descriptor of the listening socket that the agent keeps for this generation's store, or None."""
        descriptors: list[int] = []
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TAKE_STORE_S)
            connection.connect(self._path)
            connection.sendall(local.encode(local.TakeStore(generation)))
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        return descriptors[0] if descriptors else None

    def close(self) -> None:
        """Stop listening: from now on the agent may go."""
        self._closed = True
        self._outbox.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1)
        self._socket.close()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
                for line in lines:
                    try:
                        message = local.TO_TRAINER.decode_line(line)
                    except ProtocolError:
                        continue  # a newer agent may say more than this library knows
                    self._hear(message)
        except Exception:
            if not threading.main_thread().is_alive():
                return  # this process is at its end, with an exit code of its own
            traceback.print_exc()  # for example, no thread could be started that aborts a communicator
        # However it came: a process that does not listen must not go on.
        self._agent_gone()

    def _hear(self, message: Any) -> None:
        if isinstance(message, PruneLocally):
            self._prune = message
            return
        if isinstance(message, DumpStacksLocally):
            self.send(self._stack())
            return
        target: Target | None = None
        with self._changed:
            if isinstance(message, Answer):
                self._answers[message.to, message.generation] = message
            elif isinstance(message, StopLocally):
                self._stop = message
            elif isinstance(message, FinishLocally):
                self._finish = message
            elif isinstance(message, Assignment):
                if self._newest is not None and message.number <= self._newest.number:
                    return
                self._newest = message
                if message.kind == FORCED:
                    self._forced_number = message.number
            if self._due() and self._target is not None:
                target = self._target[1]
            self._changed.notify_all()
        if target is not None:
            target.abort()

    def _stack(self) -> local.Stack:
        """Say where the main thread is. Takes no lock that it may hold."""
        found, target = stacks.describe(), self._target
        inside_s = target[1].waits_since_s if target is not None else None
        place, since_s = ProcessStack.OUTSIDE, None
        if self._waits_since_s is not None:
            place, since_s = ProcessStack.WAITING, self._waits_since_s
        elif inside_s is not None or found.in_torch:
            place, since_s = ProcessStack.COLLECTIVE, inside_s
        place_s = None if since_s is None else round(time.monotonic() - since_s, 3)
        return local.Stack(place, place_s, found.where, found.chain, found.text)

    def _agent_gone(self) -> None:
        if not self._closed:
            os.kill(os.getpid(), signal.SIGKILL)
