"""Trainers without tensors: what `regroup.generation` does with a generation, step by step, on the real adoption rule.

A `Trainer` follows `generation/regrouper.py` (enter once, ask, form, adopt, leave for good), a `Group` is the store and the
collectives of one generation: it forms when all ranks are there and commits a step when all of them live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from regroup.generation.adoption import Arrival, Copy, Fallback, Refuse, decide
from regroup.progress.pace import Pace
from regroup.protocol.document import FORCED, Document
from regroup.protocol.local import (
    DRAINED,
    SUSPENDED,
    AdoptedLocally,
    Answer,
    Arrived,
    Assignment,
    Attach,
    Committed,
    DumpStacksLocally,
    Entering,
    FinishedLocally,
    FinishLocally,
    FormedLocally,
    Left,
    Snapshotted,
    Stack,
    StopLocally,
)
from regroup.protocol.snapshot import SnapshotState
from regroup.protocol.state import StatePair
from regroup.protocol.wire import ProcessStack
from tests.simulator.disk import Checkpoint, Missing
from tests.simulator.script import script_died

if TYPE_CHECKING:
    from tests.simulator.agents import Agent


Place = tuple[int, Any]
"""A generation, and which of its processes: a rank, or the slot and local rank of a script's."""


class Group:
    """The meeting of one generation."""

    def __init__(self, number: int, uid: str, world_size: int) -> None:
        self.number, self.uid, self.world_size = number, uid, world_size
        self.ranks: dict[int, Trainer] = {}
        self.document: Document | None = None
        self.adopted: set[int] = set()
        self.step = 0
        self.is_broken = False
        self.is_over = False
        self._waits_to_form = False
        self.imported: str | None = None
        """Digest of the earlier job's checkpoint with which it began."""

    @property
    def trains(self) -> bool:
        """Every rank has adopted, and nothing has happened since."""
        return (
            len(self.adopted) == self.world_size
            and not self.is_broken
            and not self.is_over
            and all(t.alive and not t.finished and not t.stopped and not t.frozen for t in self.ranks.values())
        )

    def commit_step(self) -> tuple[int, int] | None:
        """One step, or the cut if every rank knows of a newer generation. Returns (generation, step) of a commit."""
        if not self.trains:
            return None
        state = StatePair(self.number, self.step + 1)
        trainers = [self.ranks[rank] for rank in sorted(self.ranks)]
        world = trainers[0].agent.world
        leave = all(t.knows_newer(self.number) for t in trainers)
        if world.is_slow(trainers):
            return None
        self.step = state.step
        checkpoint, problem = world.disk.write(self, state), world.disk.problem(self)
        for rank, trainer in enumerate(trainers):
            trainer.committed(self, state, checkpoint, problem if rank == 0 else None)
        if leave and self.step < world.total_steps:
            self.is_over = True
            for trainer in trainers:
                if trainer.suspended:
                    world.disk.write_last(self, trainer, state)
                trainer.group = None
                world.later(trainer.go_on)
        world.print_a_line(trainers)
        return (self.number, self.step)

    def join(self, trainer: Trainer, rank: int, document: Document | None) -> None:
        self.ranks[rank] = trainer
        self.document = document or self.document
        if self.is_broken:
            self.break_up(None)
        elif len(self.ranks) == self.world_size and not self.meet_cut_links():
            world = trainer.agent.world
            world.after(world.pace.some(world.pace.form_s), self._form)

    def meet_cut_links(self) -> bool:
        """Return whether two ranks cannot reach each other: then the group breaks, and who notices says whom it lost."""
        world = next(iter(self.ranks.values())).agent.world
        uids = sorted({t.agent.uid for t in self.ranks.values()})
        for a, b in ((a, b) for i, a in enumerate(uids) for b in uids[i + 1 :]):
            blind = world.network.who_misses(a, b)
            if blind:
                for rank, trainer in self.ranks.items():
                    if trainer.agent.uid in blind:
                        other = b if trainer.agent.uid == a else a
                        trainer.lost_rank = next(r for r, t in self.ranks.items() if t.agent.uid == other and r != rank)
                self.break_up(None)
                return True
        return False

    def poke(self) -> None:
        """A rank that was stopped goes on."""
        if self._waits_to_form:
            self._form()

    def _form(self) -> None:
        if self.is_broken or self.is_over:
            return
        self._waits_to_form = any(t.stopped for t in self.ranks.values())
        if self._waits_to_form:
            return
        assert self.document is not None
        world = self.ranks[0].agent.world
        ranks = sorted(self.ranks)
        for rank in ranks:
            self.ranks[rank].say(FormedLocally(self.number, 1.0))
            world.happened("formed", self.ranks[rank].agent.uid)
        decision = decide(self.document, [self.ranks[rank].arrival() for rank in ranks])
        rolled_back = not isinstance(decision, Refuse) and decision.rolled_back
        found: Copy | Checkpoint | Refuse | Missing | None
        if isinstance(decision, Fallback):
            # Who reads, reads for its position: the volume must be there for all of the group.
            readers = [m.pod_uid for m in self.document.readers(world.per_group)]
            reader = next((uid for uid in readers if not world.disk.sees(uid)), readers[0])
            found = world.disk.fall_back(self.document, decision, reader)
        else:
            found = decision
        if isinstance(found, Refuse):
            cause = "checkpoint" if isinstance(decision, Fallback) else "witness"
            for rank in ranks:
                self.ranks[rank].leave(cause, found.reason)
            return
        if isinstance(found, Missing):
            for trainer in [self.ranks[rank] for rank in ranks]:
                world.later(lambda t=trainer: t.in_main(lambda: t.agent.exited(t, 1, found.reason)))  # type: ignore[misc]
            return
        assert not isinstance(decision, Refuse)
        state = found.state if found is not None else StatePair(self.number, 0)
        self.imported = world.disk.imported_digest if state.generation == 0 else None
        source = "copy" if isinstance(found, Copy) else "nothing" if found is None else "disk"
        world.ledger.continues_from(state, self)
        self.step = state.step
        for rank in ranks:
            self._adopt_later(self.ranks[rank], state, source, rolled_back)

    def _adopt_later(self, trainer: Trainer, state: StatePair, source: str, rolled_back: bool) -> None:
        world = trainer.agent.world
        holds = trainer.state == state
        wait_s = 0.0 if holds else world.pace.some(world.pace.adopt_s)

        def adopt() -> None:
            trainer.run(lambda: trainer.adopt(self, state, source, rolled_back))

        world.after(wait_s, adopt)

    def break_up(self, culprit: Trainer | None) -> None:
        """A rank is gone: everybody else's collective fails. Some may have committed the step in flight."""
        if self.trains_without(culprit):
            self._commit_in_part(culprit)
        self.is_broken = True
        rank = next((r for r, t in self.ranks.items() if t is culprit), None)
        for trainer in list(self.ranks.values()):
            if trainer is not culprit and trainer.group is self and trainer.alive:
                trainer.in_collective(lambda t=trainer: t.failed(self, rank))  # type: ignore[misc]

    def trains_without(self, culprit: Trainer | None) -> bool:
        """Return whether the group trained up to this moment."""
        others = [t for t in self.ranks.values() if t is not culprit]
        complete = len(self.adopted) == self.world_size and not self.is_broken and not self.is_over
        return complete and bool(others) and all(t.alive and not t.finished for t in others)

    def _commit_in_part(self, culprit: Trainer | None) -> None:
        world = self.ranks[0].agent.world
        alive = [t for _, t in sorted(self.ranks.items()) if t is not culprit and t.alive and not t.stopped]
        # Who stands before the step in flight has not sent its row: nobody can have committed it.
        may = world.pace.in_part and not any(t.frozen for t in self.ranks.values())
        ahead = [t for t in alive if world.pace.toss(0.4)] if may else []
        if not ahead or len(ahead) == len(self.ranks) or self.step + 1 >= world.total_steps:
            return
        state = StatePair(self.number, self.step + 1)
        world.ledger.in_part.add(state)
        for trainer in ahead:
            trainer.committed(self, state, None, reportable=self.step)


class Trainer:
    """One trainer process. `stopped`: by SIGSTOP. `frozen`: its main thread is busy in a step, it still hears."""

    def __init__(self, agent: Agent, local_rank: int, incarnation: int) -> None:
        self.agent, self.local_rank, self.incarnation = agent, local_rank, incarnation
        self.alive = True
        self.forked = False
        """Its agent has been given a process; before that it waits for the zygote."""
        self.signals: list[int] = []
        """What its agent has sent before that."""
        self.slow_s = 0.0
        """How long it takes for a step."""
        self.pace = Pace()
        self.attached = self.begun = False
        self.launched = 0
        """Generation whose environment it was started with; 0: none."""
        self.frozen = self.stopped = self.suspended = False
        self.newest: Assignment | None = None
        self.state: StatePair | None = None
        self.state_adopted = 0
        self.group: Group | None = None
        self.finished = False
        self.is_ending = False
        """A script's process is past its last step."""
        self.lost_rank: int | None = None
        self._floor = 0
        self._forced = 0
        self._answer: Answer | None = None
        self._backlog: deque[Callable[[], None]] = deque()
        self._after_line: deque[Callable[[], None]] = deque()

    @property
    def runs(self) -> bool:
        """There is a process."""
        return self.alive and self.forked

    # --- the process -----------------------------------------------------------------------------------------------

    def run(self, action: Callable[[], None]) -> None:
        """Do something in this process; a stopped one does it later, a dead one never."""
        if self.stopped:
            self._backlog.append(action)
        elif self.alive:
            action()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def proceed(self) -> None:
        """SIGCONT."""
        self.stopped = False
        while self._backlog and self.alive and not self.stopped:
            self._backlog.popleft()()
        if self.group is not None:
            self.group.poke()

    def in_main(self, action: Callable[[], None]) -> None:
        """Do something in its main thread, once that is not busy."""
        if self.frozen:
            self._after_line.append(action)
        else:
            self.run(action)

    def in_collective(self, action: Callable[[], None]) -> None:
        """Do something when its main thread comes to its next collective: at once, or after the rest of a slow step."""
        world = self.agent.world
        world.after(world.pace.some((0.0, self.slow_s)), lambda: self.in_main(action))

    def thaw(self) -> None:
        """Its main thread is not busy any more."""
        if not self.frozen:
            return
        self.frozen = False
        while self._after_line and not self.frozen:
            self.run(self._after_line.popleft())
        self.run(self.go_on)

    def begin(self, delay_s: float) -> None:
        """It has been started: its imports take `delay_s`."""
        self.agent.world.after(delay_s, lambda: self.run(self._begun))

    def _begun(self) -> None:
        self.begun = True
        if self.agent.world.script == "session":
            self.attach()

    def die(self, silent_s: float = 0.0) -> None:
        """The process is gone; its peers notice at once, or after `silent_s` where its machine says nothing."""
        self.alive = False
        script_died(self.agent.world, self)
        if silent_s:
            self.agent.world.after(silent_s, self.drop)
        else:
            self.drop()

    def attach(self) -> None:
        if self.alive and not self.attached:
            self.attached = True
            self.say(Attach(1, self.local_rank, self.incarnation))
            self.agent.world.happened("attached", self.agent.uid)

    def say(self, message: Any) -> None:
        self.agent.trainer_says(self, message)

    # --- what `Regrouper` does -------------------------------------------------------------------------------------

    def receive(self, message: Any) -> None:
        self.run(lambda: self._receive(message))

    def _receive(self, message: Any) -> None:
        if isinstance(message, DumpStacksLocally):
            place = ProcessStack.COLLECTIVE if self.group is not None else ProcessStack.WAITING
            place, where = (ProcessStack.OUTSIDE, "load (train.py:4)") if self.frozen else (place, "main (train.py:9)")
            self.say(Stack(place, None, where, f"{where} < main (train.py:9)", "thread MainThread:"))
        elif isinstance(message, StopLocally):
            if message.outcome == SUSPENDED and not self.finished:
                self.suspended = True
                self.go_on()
                return
            if message.outcome == DRAINED and self.group is not None and self.state is not None:
                self.agent.world.disk.write_last(self.group, self, self.state)
            self.agent.world.later(lambda: self.agent.exited(self, 0))
        elif isinstance(message, FinishLocally):
            self.in_main(lambda: self._leave_loop(message))
        elif isinstance(message, Answer):
            self._answered(message)
        elif isinstance(message, Assignment) and (self.newest is None or message.number > self.newest.number):
            self.newest = message
            if message.kind == FORCED:
                self._forced = message.number
            if self.slow_s and self.group is not None:
                self.in_collective(self.go_on)
            else:
                self.go_on()

    def go_on(self) -> None:
        """Leave what has to be left; enter what may be entered (`Regrouper.ensure`)."""
        if not self.alive or self.frozen:
            return
        if self.stopped:
            self._backlog.append(self.go_on)
            return
        if self.group is not None:
            formed = len(self.group.adopted) == self.group.world_size
            newer = self.knows_newer(self.group.number)
            if not (self._forced > self.group.number or (newer and not formed)):
                return
            self.drop()
        newest = self.newest
        if self.suspended:
            self.agent.world.later(lambda: self.agent.exited(self, 0))
            return
        if newest is None or newest.number <= self._floor:
            return
        self._floor = newest.number
        self.finished = False
        if newest.member:
            self.say(Entering(newest.number))
        else:
            self._send_left()

    def _answered(self, answer: Answer) -> None:
        if answer.to == "adopted":
            self._may_contribute(answer)
        elif answer.ok and self.newest is not None and answer.generation == self.newest.number:
            newest, world = self.newest, self.agent.world
            key = (newest.number, newest.uid)
            self.group = world.groups.setdefault(key, Group(newest.number, newest.uid, newest.world_size))
            assert (newest.document is not None) == newest.hosts_store
            world.happened("entered", self.agent.uid)
            self.say(Arrived(newest.number))
            self.group.join(self, newest.rank, newest.document)

    def arrival(self) -> Arrival:
        memory, adopted = self.agent.memory, self.agent.saved.adopted
        if self.state is None and self.local_rank == 0 and memory is not None:
            return Arrival(memory.state, memory.adopted, adopted, from_snapshot=True, is_backup=not memory.is_last)
        return Arrival(self.state, self.state_adopted, adopted)

    def _snapshot(self, *, is_last: bool) -> None:
        every = self.agent.world.snapshot_every
        if self.local_rank or not every or self.state is None:
            return
        self.agent.memory = SnapshotState(self.state, self.state_adopted, is_last)
        # Its agent hears of it at once, or reads it once the process has ended.
        if self.agent.world.pace.toss(0.8):
            self.say(Snapshotted(self.state, self.state_adopted, is_last))

    def take_last(self) -> None:
        """It ends by an exception."""
        if not self.stopped:
            self._snapshot(is_last=True)

    def adopt(self, group: Group, state: StatePair, source: str, rolled_back: bool) -> None:
        if self.group is not group or group.is_broken:
            return
        source = "self" if self.state == state else source
        self.state, self.state_adopted = state, group.number
        self.pace.begin_generation(self.agent.world.now_s)
        self.say(AdoptedLocally(group.number, state.step, source, state, 1.0, rolled_back, group.imported))

    def _may_contribute(self, answer: Answer) -> None:
        """The agent has written down that the state is adopted (rule MAD)."""
        group = self.group
        if group is None or group.number != answer.generation or group.is_broken:
            return
        if not answer.ok:
            self.drop()
            return
        group.adopted.add(next(rank for rank, trainer in group.ranks.items() if trainer is self))
        self.agent.world.happened("adopted", self.agent.uid)
        if len(group.adopted) == group.world_size and self.state is not None:
            self.agent.world.ledger.trains_from(self.state)
        if group.step >= self.agent.world.total_steps:
            self._finish(group)

    def committed(
        self, group: Group, state: StatePair, checkpoint: dict[str, Any] | None = None, problem: str | None = None,
        reportable: int | None = None,
    ) -> None:  # fmt: skip
        self.state = state
        step = state.step
        every = self.agent.world.snapshot_every
        if every and step % every == 0:
            self._snapshot(is_last=False)
        said = step if reportable is None else reportable
        self.pace.committed(self.agent.world.now_s)
        self.say(
            Committed(
                group.number, step, said, loss=1.0, samples=8 * said, digest=f"d{said}",
                total_steps=self.agent.world.total_steps, checkpoint=checkpoint, checkpoint_problem=problem,
                step_s=self.pace.step_s,
            )
        )  # fmt: skip
        if step >= self.agent.world.total_steps:
            self._finish(group)

    def failed(self, group: Group, peer_rank: int | None) -> None:
        """A collective raised."""
        if self.group is not group or not self.alive or self.frozen or self.finished:
            return
        if self.knows_newer(group.number):
            self.drop()
            self.go_on()
        else:
            lost, self.lost_rank = self.lost_rank, None
            self.leave("collective", "Connection closed by peer.", peer_rank if peer_rank is not None else lost)

    def leave(self, cause: str, message: str, peer_rank: int | None = None) -> None:
        self.group = None
        self._send_left(cause, message, peer_rank)

    def knows_newer(self, number: int) -> bool:
        """Whether this process has heard of a newer generation, or that the job is suspended, which comes as one does."""
        return self.suspended or (self.newest is not None and self.newest.number > number)

    def drop(self) -> None:
        """Out of the group, without a word."""
        group, self.group = self.group, None
        if group is not None and not group.is_over:
            group.break_up(self)

    def _finish(self, group: Group) -> None:
        self.finished = True
        if self.agent.world.per_group == 1:
            self._snapshot(is_last=True)
        self.say(FinishedLocally(group.number, group.step))
        if self.suspended:  # it was told so in its last step, and waits for no other word
            self.agent.world.later(lambda: self.agent.exited(self, 0))

    def _leave_loop(self, finish: FinishLocally) -> None:
        """All steps are committed: what follows the loop runs, with exactly the state of the last one (`_continue_after`)."""
        world = self.agent.world
        state = self._exact_state(finish)
        if state is None:
            self.agent.exited(self, 1, f"StateError: The state of step {finish.step}, the last one, is nowhere.")
            return
        world.ledger.end_begins(self, finish, state)
        if self.group is not None:
            self.group.is_over, self.group = True, None
        self.state = None  # the script may change the model from here on
        world.happened("leaving", self.agent.uid)
        place = (finish.generation, finish.rank)
        world.after(world.pace.some((0.0, world.end_s)), lambda: self.in_main(lambda: self.return_zero(place)))

    def return_zero(self, place: Place) -> None:
        """The script has come to its end."""
        if self.alive:
            self.agent.world.ledger.returned.add(place)
            self.agent.exited(self, 0)

    def _exact_state(self, finish: FinishLocally) -> StatePair | None:
        wanted, memory, disk = (finish.step, finish.generation), self.agent.memory, self.agent.world.disk
        if self.state is not None and (self.state.step, self.state_adopted) == wanted:
            return self.state
        if memory is not None and (memory.state.step, memory.adopted) == wanted:
            return memory.state
        found = None if finish.checkpoint is None else disk.find(finish.checkpoint.directory, self.agent.uid)
        return None if found is None else found.state

    def _send_left(self, cause: str | None = None, message: str = "", peer_rank: int | None = None) -> None:
        step = self.state.step if self.state else 0
        left = Left(self._floor, self.state, self.state_adopted, step, cause, message, peer_rank)
        self.say(left)
