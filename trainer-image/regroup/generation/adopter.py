"""The adoption of a state by this process: it keeps its own, applies kept gradients, receives a copy, or loads from memory or disk.

`adoption` and `parts` decide what the ranks of a generation continue from. `Adopter` does its rank's part of that.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from regroup import accelerator, cannot_run
from regroup.data import SamplePlan
from regroup.errors import PeerLost, Refused, StateError, UsageError
from regroup.protocol.local import AdoptedLocally, FinishLocally
from regroup.protocol.state import StatePair
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import CommitRecord, TrainingState

from . import parts, transfer
from .adoption import Arrival, Block, Copy, Fallback, Refuse, beginner, decide, odd_strides, shared_gpu
from .checkpoints import Checkpoints
from .groups import Gathering, Groups, Part
from .membership import Keeper


class _Adopted(NamedTuple):
    """The state that was adopted."""

    source: str
    """The pod UID of the worker whose state it was, "self", "disk" or "nothing"."""
    pair: StatePair
    rolled_back: bool = False
    """The state is older than one that was reached before."""
    imported: str | None = None
    """The fingerprint of the earlier job's checkpoint that it was read from; None: it was not."""


class Adopter:
    """Adopts states for one process. A `keeper` owns its kept gradients; only a model group needs one."""

    def __init__(
        self, state: TrainingState, plan: SamplePlan, device: torch.device, durable: Durable, memory: Memory
    ) -> None:
        self._state, self._plan, self._device = state, plan, device
        self._durable, self._memory = durable, memory
        self._checkpoints = Checkpoints(durable)
        self._seed = torch.initial_seed()  # the script has built its model
        self._strides = state.strides()
        self._gpu = accelerator.identity(device)

    def arrival(self, agent_adopted: int, block: Block | None, ended: bool, keeper: Keeper | None) -> Arrival:
        """Return what this process brings: the state that it holds, else the one in its worker's memory snapshot."""
        state, memory = self._state, self._memory
        mine = Arrival(
            state.pair,
            state.adopted,
            agent_adopted,
            block,
            ended,
            torn=state.torn,
            strides=self._strides,
            gpu=self._gpu,
        )
        if self._plan.layout.size == 1:
            kept = memory.newest if state.pair is None else None
            if kept is None:
                return mine
            return replace(
                mine, state=kept.state, state_adopted=kept.adopted, from_snapshot=True, is_backup=not kept.is_last
            )
        assert keeper is not None
        mine = replace(
            mine,
            group_size=self._plan.layout.size,
            pending=keeper.kept(),
            record=None if state.record is None else state.record.to_json(),
            seed=self._seed,
            snapshots=memory.held,
        )
        last = memory.last if state.pair is None else None
        if last is None:
            return mine
        # What a process copied as it ended is what it held: it counts as its state.
        record = last.description["said"]["record"]
        return replace(mine, state=last.state, state_adopted=last.adopted, from_snapshot=True, record=record)

    def adopt(self, groups: Groups, gathering: Gathering, formed_s: float, keeper: Keeper | None) -> AdoptedLocally:
        """Continue from a state, on all ranks. Raises StateError or UsageError where they do not fit together.

        `formed_s` is the monotonic time at which the generation formed.
        """
        odd = odd_strides(gathering.arrivals, self._plan.layout.size)
        if odd is not None:
            cannot_run.refuse(
                f"The parameters of rank {odd[0]} and of rank {odd[1]} lie in memory in different orders, and gradients are summed "
                "as they lie. Call model.to(memory_format=...) in all processes, or in none, before regroup.session()."
            )
        if self._plan.layout.size == 1:
            adopted = self._adopt_whole(groups, gathering)
        else:
            adopted = self._adopt_part(groups, gathering, keeper)
        pair = adopted.pair
        self._state.named(pair, groups.generation)
        transfer_ms = (time.monotonic() - formed_s) * 1e3
        return AdoptedLocally(
            groups.generation,
            pair.step,
            adopted.source,
            pair,
            transfer_ms,
            adopted.rolled_back,
            adopted.imported,
            own_steps=self._plan.own_steps,
        )

    def adopt_exactly(self, finish: FinishLocally) -> StatePair:
        """Hold exactly the state of the last step, which this process did not commit; return its name (rule END).

        Raises StateError, or CheckpointError, if that state is nowhere.
        """
        checkpointer = self._durable.checkpointer
        pair: StatePair | None
        if (self._state.step, self._state.adopted) == (finish.step, finish.generation):
            pair = self._state.pair
        else:
            pair = self._memory.restore_exactly(finish.step, finish.generation)
        if pair is None and finish.checkpoint is not None and checkpointer is not None:
            info = checkpointer.info_of(finish.checkpoint.directory)
            self._durable.load(info)
            pair = info.pair
        if pair is None:
            raise StateError(
                f"The state of step {finish.step}, the last one, is in no checkpoint and in no memory snapshot, so what follows "
                "the loop cannot run again. Give the job a checkpoint (spec.checkpoint, or regroup run --checkpoint)."
            )
        self._state.named(pair, finish.generation)
        return pair

    # --- a state of which each rank has all --------------------------------------------------------------------------

    def _adopt_whole(self, groups: Groups, gathering: Gathering) -> _Adopted:
        decision = decide(gathering.document, gathering.arrivals)
        if isinstance(decision, Refuse):
            raise Refused(decision.reason)
        if isinstance(decision, Fallback):
            return self._fall_back(groups, gathering, decision)
        return self._copy(groups, gathering, decision)

    def _copy(self, groups: Groups, gathering: Gathering, decision: Copy) -> _Adopted:
        """Follow a rank's state: send it, receive it, or hold it already."""
        source = gathering.arrivals[decision.source]
        if groups.rank == decision.source and source.from_snapshot:
            self._memory.restore()
        equal = [
            arrival.state == decision.state and (not arrival.from_snapshot or rank == decision.source)
            for rank, arrival in enumerate(gathering.arrivals)
        ]
        if not all(equal):
            self._move(groups, decision.source, decision.state, keep=not equal[groups.rank])
        uid = gathering.document.member_of_rank(decision.source).pod_uid
        return _Adopted("self" if equal[groups.rank] else uid, decision.state, decision.rolled_back)

    def _fall_back(self, groups: Groups, gathering: Gathering, decision: Fallback) -> _Adopted:
        """Follow the newest of the best survivor, the durable checkpoint and nothing. Raises as `Checkpoints.find` does."""
        document, best = gathering.document, decision.best
        reader = document.rank_offset(document.reader().pod_uid)
        disk = self._checkpoints.find(groups, document, reader, above=None if best is None else best.state)
        if disk.pair is not None:
            if groups.rank == reader:
                self._checkpoints.load(disk)
            self._move(groups, reader, disk.pair, keep=True)
            return _Adopted("disk", disk.pair, decision.rolled_back, disk.imported)
        if best is not None:
            return self._copy(groups, gathering, best)
        source = beginner(gathering.arrivals, reader)
        if source is None:
            raise StateError(
                "There is no state to continue from, and a copy of one was cut off on every rank. The processes have to start "
                "again; they do so by themselves."
            )
        pair = StatePair(groups.generation, 0)
        self._move(groups, source, pair, keep=True)
        return _Adopted("nothing", pair, decision.rolled_back)

    # --- a part of a state: it travels among the ranks of one inner index --------------------------------------------

    def _adopt_part(self, groups: Groups, gathering: Gathering, keeper: Keeper | None) -> _Adopted:
        decision = parts.decide(gathering.document, gathering.arrivals, self._plan.layout.size)
        if isinstance(decision, Refuse):
            raise Refused(decision.reason)
        if not isinstance(decision, parts.FallbackParts):
            rolled_back = isinstance(decision, parts.RestoreParts)
            return self._follow_parts(groups, gathering, decision, keeper)._replace(rolled_back=rolled_back)
        best = decision.best
        adopted = self._read_parts(groups, gathering, above=None if best is None else best.state)
        if adopted is None and best is not None:
            adopted = self._follow_parts(groups, gathering, best, keeper)
        if adopted is None:
            adopted = self._begin_parts(groups, gathering.arrivals)
        return adopted._replace(rolled_back=decision.rolled_back)

    def _begin_parts(self, groups: Groups, arrivals: Sequence[Arrival]) -> _Adopted:
        """Continue from the parts as the scripts have made them. Raises StateError or UsageError, on all ranks."""
        layout = self._plan.layout
        first = parts.beginners(arrivals, layout.size)
        if first is None:
            raise StateError(
                "There is no state to continue from that all ranks of a model group hold. The processes have to start again; "
                "they do so by themselves."
            )
        odd = parts.odd_seed(arrivals, first)
        if odd is not None:
            cannot_run.refuse(
                f"Rank {first[0]} and rank {odd} have built the model from different seeds (torch.initial_seed()), and each "
                "holds a part of its own. Call torch.manual_seed() with one number in all processes before the model is built, "
                "and with no other before regroup.session()."
            )
        among, pair = groups.part(layout.part_name()), StatePair(groups.generation, 0)
        self._move(among, among.ranks.index(first[groups.rank % layout.size]), pair, keep=True)
        return _Adopted("nothing", pair)

    def _follow_parts(
        self,
        groups: Groups,
        gathering: Gathering,
        decision: parts.CopyParts | parts.RestoreParts,
        keeper: Keeper | None,
    ) -> _Adopted:
        """Follow the source of this rank's inner index, or be it."""
        layout, arrivals, wanted = self._plan.layout, gathering.arrivals, decision.state
        among, source = groups.part(layout.part_name()), decision.sources[groups.rank % layout.size]

        def holds(rank: int) -> bool:
            """Return whether a rank's process holds the part. A part in a snapshot is loaded by the source alone."""
            arrival = arrivals[rank]
            if arrival.state == wanted and not arrival.from_snapshot:
                return True
            return isinstance(decision, parts.CopyParts) and parts.rolls(arrival, wanted)

        is_held = holds(groups.rank)
        if is_held and arrivals[groups.rank].state != wanted:  # before any copy is served (rule SERVE)
            assert isinstance(decision, parts.CopyParts)
            assert keeper is not None
            assert decision.record is not None
            is_held = keeper.roll_forward(wanted, CommitRecord.from_json(decision.record))
        elif groups.rank == source and not is_held:
            self._memory.restore(wanted)
            is_held = True
        lacking = [rank for rank in among.ranks if rank != source and not holds(rank)]
        if lacking:
            self._move(among, among.ranks.index(source), wanted, keep=groups.rank in lacking)
        return _Adopted("self" if is_held else gathering.document.member_of_rank(source).pod_uid, wanted)

    def _read_parts(self, groups: Groups, gathering: Gathering, above: StatePair | None) -> _Adopted | None:
        """Continue from the newest checkpoint; None: there is none that is newer than `above`. Raises as `Checkpoints.find` does.

        Each rank of one model group reads its part, and the others of its inner index get copies.
        """
        layout, document = self._plan.layout, gathering.document
        workers_per_group = max(1, layout.size // document.members[0].processes)
        reader = document.rank_offset(document.readers(workers_per_group)[0].pod_uid)
        disk = self._checkpoints.find(groups, document, reader, above)
        if disk.pair is None:
            return None
        group = reader // layout.size
        if groups.rank // layout.size == group:
            self._checkpoints.load(disk)
        self._move(groups.part(layout.part_name()), group, disk.pair, keep=True)
        return _Adopted("disk", disk.pair, imported=disk.imported)

    # --- the bytes ---------------------------------------------------------------------------------------------------

    def _move(self, groups: Groups | Part, source: int, pair: StatePair, *, keep: bool) -> None:
        if groups.rank == source:
            transfer.send(groups, self._state.packed(), self._plan.digest(pair.step), self._state.record)
            return
        received = self._receive(groups, source, keep=keep)
        if received is not None:
            tree, digest, record = received
            self._state.load(tree)
            self._state.record = record
            self._plan.digest(pair.step, known=(pair.step, digest))

    def _receive(self, groups: Groups | Part, source: int, *, keep: bool) -> transfer.Received | None:
        """Take part in a broadcast. A process without a state has nothing to lose: on the GPU a copy arrives in its tensors."""
        if not keep or self._state.pair is not None or self._device.type == "cpu":
            return transfer.receive(groups, source, keep=keep)
        self._state.begin_receiving()
        return transfer.receive(groups, source, keep=keep, into=self._state.packed()[1])


def refuse_shared_gpu(gathering: Gathering, rank: int) -> None:
    """Refuse ranks that compute on one GPU, before NCCL does so on each rank by itself.

    - If nothing was trained, all ranks raise UsageError, and the job ends.
    - If the others train without the rank that is new, that one raises UsageError, and the others raise PeerLost.
    - If a worker takes over from the one before it in its slot (rule HANDOVER), all raise PeerLost: the GPU is free soon.
    """
    arrivals, shared = gathering.arrivals, shared_gpu(gathering.arrivals)
    if shared is None:
        return
    one, other = (gathering.document.member_of_rank(at) for at in shared)
    gpu = arrivals[shared[0]].gpu.rpartition("/")[2]
    if one.pod_uid == other.pod_uid:
        sentence = (
            f"Rank {shared[0]} and rank {shared[1]}, both in worker {one.slot} (pod {one.pod}), compute on the same GPU "
            f"({gpu}), and NCCL needs one for each process. Build the model on the device that regroup.device() returns, and "
            "give the worker as many GPUs as it has processes."
        )
    else:
        sentence = (
            f"Rank {shared[0]} in worker {one.slot} (pod {one.pod}) and rank {shared[1]} in worker {other.slot} "
            f"(pod {other.pod}) compute on the same GPU ({gpu}), and NCCL needs one for each process. Give each worker GPUs of "
            "its own, without time slicing, or lower the number of workers."
        )
        if one.slot == other.slot:
            raise PeerLost(sentence)
    new = [at for at in shared if arrivals[at].state is None]
    if not new or all(arrival.state is None for arrival in arrivals):
        cannot_run.refuse(sentence)
    if rank in new:
        raise UsageError(sentence)
    raise PeerLost(sentence, new[0])
