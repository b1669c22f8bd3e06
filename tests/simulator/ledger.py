"""What a simulated job has committed, announced and released so far, and what must hold of it at every turn.

No generation number ever stands for two lists of members, and none is announced before it is written. A group that commits a
step continues from the newest committed one, and nobody rolls back while a worker that can be reached holds that. A pause of
the network alone loses no worker. What does not hold is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _regroup_agent.observing import EVERY_S
from _regroup_agent.statefile import Saved
from regroup.protocol.local import FinishLocally
from regroup.protocol.state import StatePair
from regroup.protocol.wire import SILENT_S
from regroup_operator.api import parse_job
from regroup_operator.api.members import MemberId
from regroup_operator.api.names import worker_pod_name

if TYPE_CHECKING:
    from tests.simulator.trainers import Group, Place, Trainer
    from tests.simulator.world import World


@dataclass(frozen=True, eq=False)
class End:
    """A process or a container that ended by itself or was ended from outside, as an operator is told of it."""

    at_s: float
    pod: str
    generation: int
    """As its agent says it; of a container or pod, the newest one."""
    code: int | None
    reason: str = ""
    hung: bool = False
    """The operator had it killed."""
    is_disruption: bool = False
    local_rank: int | None = None
    """None: of a whole container or pod."""
    is_calm: bool = False
    """Nothing else was going on (walk.py)."""


class Ledger:
    """One job's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.committed: list[tuple[int, int]] = []
        """(generation, step) of every step that counts, in order."""
        self.num_commits = 0
        self.last_commit_s = world.now_s
        self.in_part: set[StatePair] = set()
        """States that only some ranks of a group have committed."""
        self.rolled_back = 0
        """Committed steps that were lost."""
        self.generations: dict[int, str] = {}
        """The UID of each number's document."""
        self.unwritten: set[int] = set()
        """Numbers that a restored status does not name any more."""
        self.released: list[str] = []
        """Pod UIDs."""
        self.num_unheard = 0
        """How often a worker was lost because observers did not hear it."""
        self.ends: list[End] = []
        self.calm = False
        """What ends now ends while nothing else is going on."""
        self.returned: set[Place] = set()
        """Whose script has returned 0."""
        self._ending: dict[Place, Trainer] = {}
        """Which process ran the end of whose script last."""
        self._judged = 0
        """The newest generation of such a loss."""

    # --- steps -----------------------------------------------------------------------------------------------------

    def group_committed(self, state: tuple[int, int]) -> None:
        """A group has committed a step: the one after the newest, and it is not fenced (rule FENCE)."""
        newest = self.committed[-1] if self.committed else None
        assert state[1] == self._newest_step + 1, f"step {state} after {newest or self._newest_step}"
        assert newest is None or state[0] >= newest[0], f"a fenced group committed {state}"
        self.commit(state)

    @property
    def _newest_step(self) -> int:
        return self.committed[-1][1] if self.committed else self._world.disk.begins_at

    def commit(self, state: tuple[int, int]) -> None:
        """A step counts from now on."""
        world = self._world
        self.committed.append(state)
        self.num_commits += 1
        self.last_commit_s = world.now_s
        world.happened("committed", "")
        if world.total_steps - state[1] == 2:
            world.happened("near-end", "")

    def continues_from(self, state: StatePair, group: Group) -> None:
        """A group is about to continue from `state`: no process of a worker that can be reached may hold a newer committed
        step. One that cannot be reached is waited for only so long (rule BEST), stopped with its stream open or not, and one
        that was released not at all (rule RELEASE)."""
        state = state if state.step else StatePair(0, 0)  # what begins anew is older than anything
        if not self.committed or state >= self.committed[-1]:
            return
        patience_s = self._patience_s()
        agents = [a for a in self._world.agents.values() if a.connected and a.uid not in self.released]
        agents = [a for a in agents if not a.silent_for(patience_s)]
        held = [t for a in agents for t in a.trainers.values() if t.alive and t.state is not None]
        known = set(self.committed)
        holders = [
            f"{t.agent.name} {tuple(t.state)}"
            for t in held
            if t.state is not None and t.state > state and tuple(t.state) in known
        ]
        holders += [
            f"{a.name}'s snapshot {tuple(a.memory.state)}"
            for a in agents
            if a.memory is not None and a.memory.state > state and tuple(a.memory.state) in known
        ]
        assert not holders, (
            f"generation {group.number} rolled back to {tuple(state)} while there was {', '.join(holders)}; "
            f"the newest was {tuple(self.committed[-1])}"
        )
        lost = [pair for pair in self.committed if pair[1] > state.step]
        self.rolled_back += len(lost)
        self.committed = [pair for pair in self.committed if pair[1] <= state.step]

    def trains_from(self, state: StatePair) -> None:
        """Every rank of a group has adopted `state`: a step that only some had committed counts from now on."""
        if state in self.in_part and state.step == self._newest_step + 1:
            self.committed.append((state.generation, state.step))

    def end_begins(self, trainer: Trainer, finish: FinishLocally, state: StatePair) -> None:
        """A script leaves its loop: with the state of the last step, and no other process runs it in that place (rule END)."""
        place = (finish.generation, finish.rank)
        newest = self.committed[-1] if self.committed else (0, 0)
        assert tuple(state) == newest, f"{trainer.agent.name} ends with {tuple(state)}, and {newest} is the last step"
        assert state.step == self._world.total_steps, f"{trainer.agent.name} leaves its loop after step {state.step}"
        other = self._ending.get(place)
        beside = other is not None and other is not trainer and other.alive
        assert not beside, (
            f"{trainer.agent.name} runs the end of rank {finish.rank} beside {other and other.agent.name}"
        )
        self._ending[place] = trainer

    def has_returned(self, generation: int, members: Sequence[MemberId]) -> bool:
        """Return whether the script of all members of a generation has returned 0 in every process."""
        world = self._world
        if world.script == "plain":
            names = {worker_pod_name("digits", *member) for member in members}
            return {(name, rank) for name in names for rank in range(world.processes)} <= {
                place for number, place in self.returned if number == generation
            }
        ranks = {place for number, place in self.returned if number == generation}
        return ranks >= set(range(len(members) * world.processes))

    def _patience_s(self) -> float:
        """Return how long a worker that cannot be reached and may hold the newest state is waited for."""
        job = parse_job(self._world.store.read())
        return job.spec.recovery.disconnect_seconds + self._world.settings.replace_after_s

    # --- ends --------------------------------------------------------------------------------------------------------

    def ended(
        self,
        pod: str,
        generation: int,
        code: int | None,
        *,
        reason: str = "",
        hung: bool = False,
        is_disruption: bool = False,
        local_rank: int | None = None,
    ) -> None:
        """Something of a worker has ended, and the leader is told."""
        world = self._world
        self.ends.append(End(world.now_s, pod, generation, code, reason, hung, is_disruption, local_rank, self.calm))

    # --- generations -----------------------------------------------------------------------------------------------

    def wrote(self, status: dict[str, Any]) -> None:
        """An operator has written the job's status."""
        self._judge_unheard(status)
        restarts = status.get("restarts") or {}
        causes = restarts.get("causes") or {}
        assert sum(causes.values()) == restarts.get("total", 0), f"{restarts['total']} restarts, by cause {causes}"
        self.released += [uid for uid in status.get("released", ()) if uid not in self.released]
        if "membership" in status:
            self.saw_generation(status["membership"]["generation"], status["membership"]["uid"])

    def saw_generation(self, number: int, uid: str, digest: str = "") -> None:
        """A generation is written or, where it has a document's `digest`, announced to its member."""
        said = self.generations.setdefault(number, uid)
        if said != uid and number in self.unwritten and not self._is_remembered(number):
            self.generations[number] = said = uid
            self.unwritten.discard(number)
        assert said == uid, f"generation {number} stands for two lists of members"
        if digest:
            membership = self._world.status["membership"]
            assert membership["generation"] >= number, f"generation {number} was announced before it was written"

    def _is_remembered(self, number: int) -> bool:
        """Return whether anybody that lives, or a disk that is still there, knows that there was a generation of this number."""
        world = self._world
        agents = [a for a in world.agents.values() if a.alive]
        disks = [*(world.saved.get(uid, Saved()) for uid in world.pods.by_uid), *(a.saved for a in agents)]
        heard = [a.core._worker.heard for a in agents]
        return max([*heard, *(max(s.entered, s.sealed) for s in disks)], default=0) >= number

    def _judge_unheard(self, status: dict[str, Any]) -> None:
        """A pause alone loses nobody: who is lost because nobody hears it was cut off for longer than that."""
        newest = (status.get("incidents") or [{}])[-1]
        if newest.get("cause") == "Unheard" and newest["generation"] > self._judged:
            self._judged = newest["generation"]
            self.num_unheard += 1
            # A job may wait for a worker until it can decide, and an operator may be stopped before it has written that.
            detected_s = self._world.asked_s - newest.get("decideMs", 0.0) / 1000
            is_late = detected_s - self._world.network.refused_s > 2 * EVERY_S + SILENT_S
            # What observers have said stands while they hang. A worker that hangs, too, is lost anyway.
            hung = {str(self._world.pods.by_uid[a.uid].id) for a in self._world.agents.values() if a.stopped}
            is_lost = hung.issuperset(newest["culprit"].split(","))
            assert is_lost or not is_late, f"a pause has lost a worker: {newest['decision']}"
