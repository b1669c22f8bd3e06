"""Finds out where every process is when no step is committed any more, and kills the processes that the operator names.

An attached process answers in the thread that listens to the agent, even while its main thread is stuck. If it does not answer
within ANSWER_S, the edge looks at it through the kernel (`Probe`): a stopped process answers nothing. Pure. The operator
decides which process hangs (regroup_operator.plan.failures.hangs).
"""

from __future__ import annotations

import signal
from dataclasses import replace

from regroup.protocol import local, wire
from regroup.protocol.state import Busy
from regroup.protocol.wire import ProcessStack

from . import events as ev
from .aggregate import Process
from .worker import Worker

ANSWER_S = 2.0
"""Time after which a silent process is probed. A thread answers in milliseconds unless native code keeps the interpreter's lock."""
PROBE_S = 5.0
"""Time after which the report goes without a probe's answer, which takes half a second."""
MAX_CHAINS = 30_000
"""Characters of one report for the calls of all processes. A report has at most 64 KiB."""


class Hangs:
    """The open question for stacks, if there is one. At most one is open at a time."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._answers: dict[int, ProcessStack] | None = None
        """Answers by local rank; None: no question is open."""
        self._asked: dict[int, int] = {}
        """Incarnation of each process that was asked, by local rank."""
        self._probe_at_s: float | None = None
        self._give_up_at_s: float | None = None

    @property
    def due_s(self) -> float | None:
        if self._answers is None:
            return None
        return self._probe_at_s if self._probe_at_s is not None else self._give_up_at_s

    def ask(self, now_s: float) -> None:
        """Ask every running process for its stack. Does nothing while a question is open, whose answer will come."""
        if self._answers is not None:
            return
        running = [p for p in self._worker.processes if p.running]
        self._answers, self._asked = {}, {p.local_rank: p.incarnation for p in running}
        self._probe_at_s, self._give_up_at_s = now_s + ANSWER_S, now_s + ANSWER_S + PROBE_S
        for process in running:
            if process.attached:
                self._worker.tell(process, local.DumpStacksLocally())
        self._send_if_complete()

    def answered(self, process: Process, stack: local.Stack) -> None:
        pause = process.busy.name if process.busy is not None and process.busy.kind == Busy.PAUSE else ""
        found = ProcessStack(
            process.local_rank, process.incarnation, stack.place, stack.place_s, stack.where, stack.chain, pause
        )
        self._take(found, stack.text)

    def probed(self, process: Process, event: ev.Probed) -> None:
        self._take(
            ProcessStack(process.local_rank, process.incarnation, event.place, where=event.where, chain=event.where),
            event.text,
        )

    def tick(self, now_s: float) -> None:
        if self._answers is None:
            return
        if self._probe_at_s is not None and now_s >= self._probe_at_s:
            self._probe_at_s = None
            for rank in self._open():
                process = self._worker.processes[rank]
                self._worker.effects.append(ev.Probe(rank, process.incarnation, process.attached))
        self._send_if_complete(given_up=self._give_up_at_s is not None and now_s >= self._give_up_at_s)

    def kill(self, command: wire.Kill) -> None:
        """Kill the named processes that still run. `Session.exited` starts them again."""
        for process in self._worker.processes:
            if process.running and process.incarnation in command.incarnations and process.hung is None:
                process.hung = command.message
                self._worker.effects.append(ev.Log(f"Process {process.local_rank} is killed: {command.message}"))
            if process.running and process.hung is not None:
                self._worker.effects.append(ev.Signal(process.local_rank, signal.SIGKILL))

    def _open(self) -> list[int]:
        """Return the local ranks that were asked and have not answered, and whose same process still runs."""
        processes, answers = self._worker.processes, self._answers or {}
        return [
            rank
            for rank, incarnation in self._asked.items()
            if rank not in answers and processes[rank].running and processes[rank].incarnation == incarnation
        ]

    def _take(self, found: ProcessStack, text: str) -> None:
        if self._answers is None or found.local_rank in self._answers:
            return
        self._answers[found.local_rank] = found
        since = "" if found.place_s is None else f" for {found.place_s:.1f} s"
        what = "No step is committed" if self._worker.by_session else "The script's progress has not changed"
        head = f"{what}. Process {found.local_rank} is {PLACES.get(found.place, found.place)}{since}: {found.where}"
        self._worker.effects += [ev.Log(line) for line in (head, *text.splitlines())]
        self._send_if_complete()

    def _send_if_complete(self, *, given_up: bool = False) -> None:
        if self._answers is None or (self._open() and not given_up):
            return
        for rank in self._open():
            silent = ProcessStack.SILENT
            self._answers[rank] = ProcessStack(rank, self._asked[rank], silent, where="no answer", chain="no answer")
        answers, self._answers = self._answers, None
        length = MAX_CHAINS // max(1, 2 * len(answers))
        bounded = (replace(a, where=a.where[:length], chain=a.chain[:length]) for _, a in sorted(answers.items()))
        self._worker.send(wire.Stacks(tuple(bounded)))


PLACES = {
    ProcessStack.COLLECTIVE: "in a collective",
    ProcessStack.WAITING: "waiting for the operator",
    ProcessStack.OUTSIDE: "in no collective",
    ProcessStack.STOPPED: "stopped",
    ProcessStack.SILENT: "silent",
}
