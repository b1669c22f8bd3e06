"""Interrupt -> form -> adopt: the way of this process from one generation's groups into the next one's.

Owns the retries and the order of messages to the agent: it has answered `Entering` before the groups form, and `AdoptedLocally`
before the first contribution. `Left` has the state that is kept. Runs in the main thread; `watcher` interrupts it. `adopter` makes
the state that the generation continues from.
"""

import os
import time
from collections.abc import Callable, Mapping

import torch

from regroup.checkpoint.checkpointer import Origin
from regroup.data import SamplePlan
from regroup.errors import BackendError, GenerationChanged, GroupBroken, Refused
from regroup.protocol import env
from regroup.protocol.local import (
    COMPLETE,
    Arrived,
    Assignment,
    Entering,
    FinishLocally,
    FormedLocally,
    Left,
    PruneLocally,
    StopLocally,
)
from regroup.protocol.text import shorten
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import TrainingState

from . import edges, living, nccl
from .adopter import Adopter, refuse_shared_gpu
from .adoption import Block
from .backends import wait_closed, wait_ended
from .groups import Gathering, Groups
from .membership import Keeper, Stopped
from .origins import is_collectives
from .watcher import Watcher

END_S = 10.0
"""Longest time that the end of a session waits for the ends of NCCL's communicators."""
CLOSED_S = 1.0
"""Longest time that it waits for gloo's threads. They end in milliseconds, or never if gloo has forgotten a message."""
SUPERSEDED_S = 2.0
"""Longest time to wait for a newer generation after gloo has failed although every connection stands."""


class Regrouper:
    """`Membership` under an agent: keeps this process in the newest generation."""

    is_alone = False

    def __init__(
        self,
        watcher: Watcher,
        state: TrainingState,
        plan: SamplePlan,
        device: torch.device,
        durable: Durable,
        memory: Memory,
        links: Callable[[Assignment], Mapping[str, tuple[int, ...]]] = lambda _: {},
    ) -> None:
        """`links`: further parts of each generation that this process is in, by name (`Groups`)."""
        self._links = links
        self._adopter = Adopter(state, plan, device, durable, memory)
        self.groups: Groups | None = None
        self.gathering: Gathering | None = None
        self.origin = Origin(0, "", 0, 0)
        self.rolled_back = False
        self.kept_own_state = False
        self.adopted_at_s = 0.0
        self.block: Block | None = None
        self.ended = self.over = False
        self.keeper: Keeper | None = None
        # Until the first generation: what the environment says; a joiner is told nothing, and is nobody yet.
        self._last_rank = int(os.environ.get(env.RANK) or -1)
        self._last_world_size = 1
        self._known = 0
        """The generation that `ensure` returned last."""
        self._watcher = watcher
        self._state = state
        self._plan = plan
        self._device = device
        self._host = os.environ.get(env.POD_IP) or "127.0.0.1"
        self._floor = 0
        """Highest generation that this process will never enter (again): entered, or heard without being a member."""
        self._retired: Groups | None = None

    @property
    def generation(self) -> int:
        return self.origin.generation

    @property
    def rank(self) -> int:
        return self.groups.rank if self.groups is not None else self._last_rank

    @property
    def world_size(self) -> int:
        return self.groups.world_size if self.groups is not None else self._last_world_size

    def ensure(self) -> bool:
        while not self.over:
            groups = self.groups
            if groups is not None:
                if not groups.aborted and not self._watcher.must_leave(groups.generation):
                    is_new, self._known = groups.generation != self._known, groups.generation
                    self._last_rank, self._last_world_size = groups.rank, groups.world_size
                    return is_new
                self.leave()
            heard = self._watcher.wait_above(self._floor)
            if isinstance(heard, StopLocally):
                raise Stopped(heard.outcome)
            if isinstance(heard, FinishLocally):
                self._continue_after(heard)
                return True
            self._floor = heard.number
            if heard.member:
                self._enter(heard)
            else:
                self._send_left()
        return False

    def leave(self, error: GroupBroken | None = None) -> None:
        groups, self.groups = self.groups, None
        if groups is None:
            return
        groups.close()
        if error is not None and not self._watcher.knows_newer(groups.generation) and self._watcher.stop is None:
            self._send_left("collective", str(error), error.peer_rank)

    def check(self) -> None:
        if self.groups is None or self.groups.aborted:
            self.leave()
            raise GenerationChanged(f"generation {self.origin.generation} has ended")

    def explains(self, error: BaseException) -> bool:
        """Return whether `error` comes of a membership change; then the groups are left.

        The library's own errors say so themselves, and for a collective of the user's own the connections do. A BackendError that
        they do not explain counts if a newer generation is heard soon; this waits for it.
        """
        if isinstance(error, GenerationChanged):
            return True
        if isinstance(error, GroupBroken):
            self.leave(error)
            return True
        if isinstance(error, Exception) and self._may_come_of_an_abort():
            self.leave()
            return True
        if isinstance(error, BackendError):
            # Other ranks have it, too, and end: from here on the connections say nothing.
            if not self._watcher.wait_newer(self.origin.generation, SUPERSEDED_S):
                return False
            self.leave(GroupBroken(str(error)))
            return True
        # Of subclasses only torch.distributed's own: CUDA's errors (no memory, a device that failed) are no membership change.
        if type(error) is not RuntimeError and not isinstance(error, torch.distributed.DistError):
            return False
        if not is_collectives(error):
            return False
        if self.groups is None:
            return True  # the script went on after they were left
        outcome = self.groups.failed(error)
        if isinstance(outcome, BackendError):
            return False
        print(f"A collective of generation {self.origin.generation} failed with the group: {error}", flush=True)
        self.leave(outcome)
        return True

    def _may_come_of_an_abort(self) -> bool:
        """Return whether a script's error may come from what an abort has left in a tensor.

        Inside a model group on GPUs the script goes on with what a collective returns before that has ended. Its own check of a
        loss may then see anything. The step runs again, and an error of the script's own comes again. An error while a step is
        applied is not of this kind: from then on the state has no name.
        """
        is_ahead = self._plan.layout.size > 1 and nccl.serves(self._device)
        is_cut = self.groups is not None and self.groups.aborted
        return is_ahead and is_cut and self._state.pair is not None

    def leave_at_cut(self) -> None:
        """Leave healthy groups at a step boundary. The groups are closed once the next ones stand; on GPUs they begin to end
        now."""
        if self.groups is not None:
            self.groups.end_in_order()
        self._retired, self.groups = self.groups, None
        self._watcher.unwatch()

    def knows_newer(self) -> bool:
        return self._watcher.knows_newer(self.generation)

    def must_leave(self) -> bool:
        return self._watcher.must_leave(self.generation)

    def take_prune(self) -> PruneLocally | None:
        return self._watcher.take_prune()

    def wait_end(self) -> str | None:
        self._watcher.wait_forced_above(self.generation)
        stop = self._watcher.stop
        if stop is not None:
            return stop.outcome
        return COMPLETE if self._watcher.finish is not None else None

    def close(self) -> None:
        self._watcher.unwatch()
        for groups in (self.groups, self._retired):
            if groups is not None:
                groups.close()
        self.groups = self._retired = None
        # The process is about to end, and NCCL's threads must not be in the middle of something.
        wait_ended(timeout_s=END_S)
        wait_closed(CLOSED_S)

    def _continue_after(self, finish: FinishLocally) -> None:
        """Take a place and exactly the state of the last step, which is committed (rule END). Raises as `Adopter.adopt_exactly`."""
        pair = self._adopter.adopt_exactly(finish)
        self.origin = Origin(finish.generation, "", pair.generation, finish.step)
        self._last_rank, self._last_world_size = finish.rank, finish.world_size
        self.over = True

    # --- one generation ----------------------------------------------------------------------------------------------

    def _enter(self, assignment: Assignment) -> None:
        """Try to become a part of a generation. Without success `groups` stays None, and `ensure` waits for the next one."""
        number = assignment.number
        began_s = time.monotonic()
        answer = self._watcher.ask(Entering(number))
        if not answer.ok:
            return
        layout = self._plan.layout
        among = layout.parts(assignment.rank, assignment.world_size) | living.parts(assignment.rank, layout.size)
        among |= edges.parts(layout, assignment.rank) | dict(self._links(assignment))
        groups = Groups(assignment, self._host, self._device, among)
        self._watcher.watch(number, groups, settled=False)
        try:
            listen_fd = self._watcher.take_store(number) if assignment.hosts_store else None
            arrival = self._adopter.arrival(answer.adopted, self.block, self.ended, self.keeper)
            gathering = groups.form(arrival, listen_fd, lambda: self._watcher.send(Arrived(number)))
            self._retire()
            refuse_shared_gpu(gathering, assignment.rank)
            formed_s = time.monotonic()
            self._watcher.send(FormedLocally(number, (formed_s - began_s) * 1e3))
            groups.connect()  # from here on the operator allows the time of an adoption, which is longer (adr/0026)
            living.bind(groups)
            adopted = self._adopter.adopt(groups, gathering, formed_s, self.keeper)
            if not self._watcher.ask(adopted).ok:
                groups.close()
                return
        except (GroupBroken, BackendError, Refused) as error:  # nothing of the user's runs in here
            self._retire()
            groups.close()
            if not self._watcher.knows_newer(number) and self._watcher.stop is None:
                cause = error.cause if isinstance(error, Refused) else "collective"
                self._send_left(cause, str(error), getattr(error, "peer_rank", None))
            return
        self.gathering = gathering
        self.ended = any(arrival.ended for arrival in gathering.arrivals)
        self.origin = Origin(number, assignment.uid, adopted.state.generation, adopted.start_step)
        self.rolled_back, self.kept_own_state = adopted.rolled_back, adopted.source == "self"
        self.adopted_at_s = time.monotonic()
        self.groups = groups
        self._watcher.watch(number, groups, settled=True)

    # --- small parts -------------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        if self._retired is not None:
            self._retired.close()
            self._retired = None

    def _send_left(self, cause: str | None = None, message: str = "", peer_rank: int | None = None) -> None:
        self._watcher.send(
            Left(
                left_up_to=self._floor,
                state=self._state.pair,
                state_adopted=self._state.adopted,
                step=self._state.step,
                cause=cause,
                message=shorten(message, 500),
                peer_rank=peer_rank,
            )
        )
