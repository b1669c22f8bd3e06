"""Tier Session: what the processes say through the library, and what follows. Rules INC, MAD, SEAL, FINISH.

A generation is handed to living processes; a process that ends is started again in place, its siblings stay.
"""

from __future__ import annotations

import signal
from typing import Any

from regroup.protocol import RELEASE, local, wire
from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import Busy, StatePair

from . import events as ev
from .aggregate import SESSION, Process
from .worker import Worker


def library_conflict(protocol: int, release: str, path: str) -> str:
    """Return the sentence with which the agent refuses a library that speaks another protocol; "" if they understand each other."""
    if protocol == local.VERSION:
        return ""
    return (
        f"The library `regroup` in {path or 'the image'} has release {release} and speaks version {protocol} of the protocol; the "
        f"agent of this pod has release {RELEASE} and speaks version {local.VERSION}: install regroup-training {RELEASE} in the "
        "image, or remove the package from it, since the pod brings the library."
    )


class Session:
    """The session tier of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._adoptions: dict[int, local.AdoptedLocally] = {}
        self._form_ms = 0.0

    def take(self, process: Process, message: Any, now_s: float) -> None:
        """Take a message of a process that runs."""
        if isinstance(message, local.Committed):
            self._committed(process, message, now_s)
        elif isinstance(message, local.BusyLocally):
            busy = None if message.kind is None else Busy(message.kind, message.name, message.max_s)
            process.busy, process.busy_since_s = busy, now_s
        elif isinstance(message, local.Attach):
            self._attached(process, message, now_s)
        elif isinstance(message, local.Entering):
            self._entering(process, message)
        elif isinstance(message, local.Arrived):
            if message.generation == process.inside:
                process.arrived = message.generation
        elif isinstance(message, local.FormedLocally):
            self._formed(process, message)
        elif isinstance(message, local.AdoptedLocally):
            self._adopted(process, message, now_s)
        elif isinstance(message, local.Left):
            self._left(process, message)
        elif isinstance(message, local.Snapshotted):
            self._snapshotted(process, message)
        elif isinstance(message, local.CannotRun):
            self._cannot_run(process, message)
        elif isinstance(message, local.FinishedLocally):
            self._finished(process, message, now_s)

    def exited(self, process: Process, event: ev.Exited, now_s: float) -> None:
        """Take in the end of a process, which is a fault unless it has returned 0 after its last step.

        After a fault the process is started again after the delay, if that can help. A process that was started again for its end
        may return 0 without a session, if its script sees that its work is done.
        """
        worker, finish = self._worker, self._worker.finish
        if process.runs_again and worker.ending is None:
            worker.start([process.local_rank], None, now_s)
            return
        ends_alone = finish is not None and finish.repeats
        if event.code == 0 and (process.finished or process.let_go or ends_alone):
            worker.returned(process, finish.generation if finish is not None else process.finished)
            return
        process.finished = 0
        worker.send_exit(process, event)
        if finish is not None and not finish.repeats:
            worker.take_back()
        if worker.ending is None and not process.cannot_run:
            process.start_at_s = now_s + worker.next_delay_s()

    def _attached(self, process: Process, message: local.Attach, now_s: float) -> None:
        worker = self._worker
        refusal = library_conflict(message.protocol, message.release, message.path)
        if refusal:
            self._cannot_run(process, local.CannotRun(process.local_rank, process.incarnation, refusal))
            worker.effects.append(ev.Signal(process.local_rank, signal.SIGKILL))
            return
        if message.release != RELEASE and process.local_rank == 0:
            worker.effects.append(
                ev.Log(f"The script uses regroup {message.release} in {message.path}; the agent is {RELEASE}.")
            )
        if not worker.session:
            worker.said_adopted = 0  # what was said for a script says nothing of a session
        worker.session, worker.tier = True, SESSION
        if message.rehearses and worker.finish is None:  # a part of its start, which may take as long as a first step
            process.first_step_since_s = now_s
            worker.tell(process, local.Answer("rehearse", 0, True, worker.saved.adopted))
            return
        process.attached, process.handed, process.first_step_since_s = True, 0, None
        process.cannot_run = ""  # the script has caught that, and goes on
        if worker.ending is not None and not worker.ending.draining:
            worker.tell(process, local.StopLocally(worker.ending.outcome))
        elif worker.finish is not None:
            worker.let_go(process)
        else:
            worker.hand(process)

    def _entering(self, process: Process, message: local.Entering) -> None:
        worker, number, why = self._worker, message.generation, ""
        allowed = process.may_enter(number) and number == worker.heard and number > worker.refused
        if allowed:
            process.inside = process.entered = number
            process.broken, process.finished = None, 0
            if number > worker.saved.entered:
                self._adoptions, self._form_ms = {}, 0.0
                worker.persist(entered=number)
        else:
            closed = max(process.floor, process.left, process.entered, worker.refused)
            why = (
                f"Generation {number} may not be entered: {worker.heard} is the newest, up to {closed} all are closed."
            )
        worker.tell(process, local.Answer("entering", number, allowed, worker.saved.adopted, why))

    def _formed(self, process: Process, message: local.FormedLocally) -> None:
        if message.generation == process.inside:
            process.arrived = process.formed = message.generation
            self._form_ms = max(self._form_ms, message.form_ms)

    def _adopted(self, process: Process, message: local.AdoptedLocally, now_s: float) -> None:
        worker, number = self._worker, message.generation
        if number != process.inside:
            why = f"Generation {number} is not the one that this process is in ({process.inside})."
            worker.tell(process, local.Answer("adopted", number, False, worker.saved.adopted, why))
            return
        worker.persist(adopted=max(worker.saved.adopted, number))
        process.arrived = process.formed = process.adopted = number
        process.state, process.state_adopted, process.step = message.state, number, message.start_step
        if not process.computed:
            process.first_step_since_s = now_s
        self._adoptions[process.local_rank] = message
        worker.tell(process, local.Answer("adopted", number, True, worker.saved.adopted))
        if worker.said_adopted < number and all(p.adopted == number for p in worker.processes):
            worker.said_adopted = number
            worker.adopted_body = (number, merged(list(self._adoptions.values()), self._form_ms))
            worker.send(worker.adopted_body[1])

    def _committed(self, process: Process, message: local.Committed, now_s: float) -> None:
        worker = self._worker
        if message.generation != process.inside:
            return
        worker.crashes = 0
        process.computed, process.first_step_since_s = process.computed or not message.empty, None
        process.step, process.state = message.step, StatePair(message.generation, message.step)
        worker.progress.committed(message, worker.progress_interval_s, now_s)

    def _left(self, process: Process, message: local.Left) -> None:
        worker, was_inside = self._worker, process.inside
        process.left = max(process.left, message.left_up_to)
        process.state, process.state_adopted = message.state, message.state_adopted
        process.broken = None
        if process.inside <= process.left:
            process.inside = 0
        if message.cause is not None and message.left_up_to >= worker.heard:  # else a newer one is on its way: no news
            process.broken = message.message or message.cause
            worker.send(
                wire.Fault(
                    cause=message.cause,
                    message=message.message,
                    step=message.step,
                    local_rank=process.local_rank,
                    peer=self._pod_of(message.peer_rank, was_inside),
                    peer_rank=message.peer_rank,
                )
            )
        worker.hand(process)

    def _cannot_run(self, process: Process, message: local.CannotRun) -> None:
        worker = self._worker
        if not any(p.cannot_run for p in worker.processes):
            worker.effects.append(ev.Log(message.message))
        if worker.saved.adopted <= 0:
            process.cannot_run = message.message
        # Else this worker has trained: something has changed, such as a GPU that is gone, and the exit counts as any other.

    def _snapshotted(self, process: Process, message: local.Snapshotted) -> None:
        state = message.state
        held = None if state is None else SnapshotState(state, message.adopted, message.is_last)
        self._worker.snapshotted(process.local_rank, held)

    def _pod_of(self, rank: int | None, generation: int) -> str | None:
        document = self._worker.document
        if rank is None or document is None or document.number != generation or not 0 <= rank < document.world_size:
            return None
        return document.member_of_rank(rank).pod_uid

    def _finished(self, process: Process, message: local.FinishedLocally, now_s: float) -> None:
        worker, number = self._worker, message.generation
        if number != process.inside:
            return
        process.finished, process.step = number, message.step
        if all(p.finished == number for p in worker.processes):
            if worker.connected and worker.progress.due_s is not None:
                worker.send(worker.progress.take(now_s))
            worker.finished_body = (number, wire.Finished(message.step))
            worker.send(worker.finished_body[1])


def merged(adoptions: list[local.AdoptedLocally], form_ms: float) -> wire.Adopted:
    """Return what the worker says when all its processes have adopted: the slowest copy, the source that is not itself."""
    first = adoptions[0]
    return wire.Adopted(
        start_step=first.start_step,
        source=next((a.source for a in adoptions if a.source != "self"), first.source),
        state=max(a.state for a in adoptions),
        form_ms=form_ms,
        transfer_ms=max(a.transfer_ms for a in adoptions),
        rolled_back=any(a.rolled_back for a in adoptions),
        imported=first.imported,
        own_steps=first.own_steps,
    )
