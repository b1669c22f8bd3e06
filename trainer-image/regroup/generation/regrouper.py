"""Interrupt -> form -> adopt: how this process gets from one generation's groups into the next one's.

Owns the order of events towards the agent (entering answered before forming, adopted answered before the first
contribution, left with the state that is kept) and the retries. Runs in the main thread; `watcher` interrupts it. What the
group continues from is decided in `adoption`.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from regroup import accelerator, cannot_run
from regroup.checkpoint import CheckpointError, CheckpointInfo, ImportMissing
from regroup.checkpoint.checkpointer import Origin
from regroup.data import SamplePlan
from regroup.errors import (
    BackendError,
    GenerationChanged,
    GroupBroken,
    PeerLost,
    Refused,
    StateError,
    UsageError,
)
from regroup.protocol import env
from regroup.protocol.document import Document
from regroup.protocol.local import (
    COMPLETE,
    AdoptedLocally,
    Arrived,
    Assignment,
    Entering,
    FinishLocally,
    FormedLocally,
    Left,
    PruneLocally,
    StopLocally,
)
from regroup.protocol.state import StatePair
from regroup.protocol.text import shorten
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import CommitRecord, TrainingState

from . import edges, living, nccl, parts, transfer
from .adoption import Arrival, Block, Copy, Fallback, Refuse, beginner, decide, odd_strides, shared_gpu
from .backends import wait_closed, wait_ended
from .groups import Gathering, Groups, Part
from .membership import Keeper, Stopped
from .origins import is_collectives
from .watcher import Watcher

END_S = 10.0
"""Longest time that the end of a session waits for the ends of NCCL's communicators."""
CLOSED_S = 1.0
"""... and for gloo's threads. They end in milliseconds, or never where gloo has forgotten a message."""
SUPERSEDED_S = 2.0
"""Where gloo fails and every connection stands, so long a newer generation is waited for."""


@dataclass(frozen=True)
class _OnDisk:
    """What the rank that reads the disk for all has found there."""

    info: CheckpointInfo | None = None
    imports: bool = False
    """`info` is of another job: this one begins with it."""
    why: str = ""
    """Why checkpoints could not be read, sentences."""
    missing: str = ""
    """Sentence: what the job is to begin with does not exist."""

    @property
    def imported(self) -> str | None:
        """The fingerprint of another job's checkpoint, None: `info` is none."""
        return self.info.commit.fingerprint if self.info is not None and self.imports else None


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
        self._seed = torch.initial_seed()  # the script has built its model
        self._strides = state.strides()
        self._gpu = accelerator.identity(device)
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
        self._durable = durable
        self._memory = memory
        self._host = os.environ.get(env.POD_IP) or "127.0.0.1"
        self._floor = 0
        """Highest generation that this process will never enter (again): entered, or heard without being a member."""
        self._retired: Groups | None = None
        self._imported: str | None = None
        """Fingerprint of the earlier job's checkpoint that the newest generation began with; None: it began with something else."""

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
        """See Membership.

        Ours say so themselves, and the connections say it of a collective of the user's own. A backend's error in one of ours
        that they do not explain counts if a newer generation is heard soon; this waits for it.
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
        """All steps are committed, and this process was not there: take a place and exactly the state of the last step (rule END).

        Raises StateError, or CheckpointError, where that state is nowhere.
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
        self.origin = Origin(finish.generation, "", pair.generation, finish.step)
        self._last_rank, self._last_world_size = finish.rank, finish.world_size
        self.over = True

    # --- one generation ----------------------------------------------------------------------------------------------

    def _enter(self, assignment: Assignment) -> None:
        """Try to become a part of a generation; without success `groups` stays None and the next one is waited for."""
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
            arrival = self._arrival(answer.adopted)
            gathering = groups.form(arrival, listen_fd, lambda: self._watcher.send(Arrived(number)))
            self._retire()
            self._check_gpus(gathering, assignment.rank)  # NCCL would refuse them, each rank by itself and not in words
            formed_s = time.monotonic()
            self._watcher.send(FormedLocally(number, (formed_s - began_s) * 1e3))
            groups.connect()  # from here on the operator allows the time of an adoption, which is longer (adr/0026)
            living.bind(groups)
            adopted = self._adopt(groups, gathering, formed_s)
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

    def _arrival(self, agent_adopted: int) -> Arrival:
        """Return what this process brings: the state that it holds, else what its worker's memory snapshot has."""
        state, kept = self._state, self._memory.newest if self._state.pair is None else None
        if self._plan.layout.size > 1:
            return self._arrival_with_part(agent_adopted)
        if kept is None:
            return Arrival(
                state.pair,
                state.adopted,
                agent_adopted,
                self.block,
                self.ended,
                torn=state.torn,
                strides=self._strides,
                gpu=self._gpu,
            )
        return Arrival(
            kept.state,
            kept.adopted,
            agent_adopted,
            self.block,
            self.ended,
            from_snapshot=True,
            is_backup=not kept.is_last,
            torn=state.torn,
            strides=self._strides,
            gpu=self._gpu,
        )

    def _arrival_with_part(self, agent_adopted: int) -> Arrival:
        """As `_arrival`, in a model group. What a process copied as it ended is what it held: it counts as its state."""
        assert self.keeper is not None
        state, last = self._state, self._memory.last if self._state.pair is None else None
        record = None if state.record is None else state.record.to_json()
        return Arrival(
            state.pair if last is None else last.state,
            state.adopted if last is None else last.adopted,
            agent_adopted,
            self.block,
            self.ended,
            from_snapshot=last is not None,
            torn=state.torn,
            group_size=self._plan.layout.size,
            pending=self.keeper.kept(),
            record=record if last is None else last.description["said"]["record"],
            seed=self._seed,
            snapshots=self._memory.held,
            strides=self._strides,
            gpu=self._gpu,
        )

    def _check_gpus(self, gathering: Gathering, rank: int) -> None:
        """Refuse ranks that compute on one GPU. Nothing was trained: raises UsageError on all ranks, and the job ends. Others train
        without the rank that is new: raises UsageError on that one, and PeerLost on the others. A worker only takes over from the
        one before it in its slot (rule HANDOVER), which leaves the GPU soon: raises PeerLost."""
        shared = shared_gpu(gathering.arrivals)
        if shared is None:
            return
        one, other = (gathering.document.member_of_rank(rank) for rank in shared)
        gpu = gathering.arrivals[shared[0]].gpu.rpartition("/")[2]
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
        new = [number for number in shared if gathering.arrivals[number].state is None]
        if not new or all(arrival.state is None for arrival in gathering.arrivals):
            cannot_run.refuse(sentence)
        if rank in new:
            raise UsageError(sentence)
        raise PeerLost(sentence, new[0])

    def _adopt(self, groups: Groups, gathering: Gathering, formed_s: float) -> AdoptedLocally:
        """Continue from a state, on all ranks. Raises StateError or UsageError where they do not fit together."""
        odd = odd_strides(gathering.arrivals, self._plan.layout.size)
        if odd is not None:
            cannot_run.refuse(
                f"The parameters of rank {odd[0]} and of rank {odd[1]} lie in memory in different orders, and gradients are summed "
                "as they lie. Call model.to(memory_format=...) in all processes, or in none, before regroup.session()."
            )
        self._imported = None
        source, pair, rolled_back = (
            self._adopt_whole(groups, gathering) if self._plan.layout.size == 1 else self._adopt_part(groups, gathering)
        )
        self._state.named(pair, groups.generation)
        transfer_ms = (time.monotonic() - formed_s) * 1e3
        return AdoptedLocally(groups.generation, pair.step, source, pair, transfer_ms, rolled_back, self._imported)

    def _adopt_whole(self, groups: Groups, gathering: Gathering) -> tuple[str, StatePair, bool]:
        """Continue from a state of which each rank has all; return (source, its name, whether that is less than was reached)."""
        decision = decide(gathering.document, gathering.arrivals)
        if isinstance(decision, Refuse):
            raise Refused(decision.reason)
        if isinstance(decision, Fallback):
            source, pair = self._fall_back(groups, gathering, decision)
        else:
            source, pair = self._copy(groups, gathering, decision)
        return source, pair, decision.rolled_back

    def _adopt_part(self, groups: Groups, gathering: Gathering) -> tuple[str, StatePair, bool]:
        """As `_adopt_whole`, in a model group: what travels does so among the ranks of one inner index."""
        layout, arrivals = self._plan.layout, gathering.arrivals
        decision = parts.decide(gathering.document, arrivals, layout.size)
        if isinstance(decision, Refuse):
            raise Refused(decision.reason)
        if isinstance(decision, parts.FallbackParts):
            best = decision.best
            pair = self._read_parts(groups, gathering, above=None if best is None else best.state)
            if pair is not None:
                return "disk", pair, decision.rolled_back
            if best is None:
                pair = self._begin_parts(groups, arrivals)
                return "nothing", pair, decision.rolled_back
            return *self._follow_parts(groups, gathering, best), decision.rolled_back
        return *self._follow_parts(groups, gathering, decision), isinstance(decision, parts.RestoreParts)

    def _begin_parts(self, groups: Groups, arrivals: Sequence[Arrival]) -> StatePair:
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
        return pair

    def _follow_parts(
        self, groups: Groups, gathering: Gathering, decision: parts.CopyParts | parts.RestoreParts
    ) -> tuple[str, StatePair]:
        """Follow the source of this rank's inner index, or be it; return (source, the state's name)."""
        layout, arrivals, wanted = self._plan.layout, gathering.arrivals, decision.state
        among, source = groups.part(layout.part_name()), decision.sources[groups.rank % layout.size]

        def holds(rank: int) -> bool:
            """In its process, that is: what lies in a snapshot is loaded by the source alone."""
            arrival = arrivals[rank]
            if arrival.state == wanted and not arrival.from_snapshot:
                return True
            return isinstance(decision, parts.CopyParts) and parts.rolls(arrival, wanted)

        is_held = holds(groups.rank)
        if is_held and arrivals[groups.rank].state != wanted:  # before any copy is served (rule SERVE)
            assert isinstance(decision, parts.CopyParts)
            assert self.keeper is not None
            assert decision.record is not None
            is_held = self.keeper.roll_forward(wanted, CommitRecord.from_json(decision.record))
        elif groups.rank == source and not is_held:
            self._memory.restore(wanted)
            is_held = True
        lacking = [rank for rank in among.ranks if rank != source and not holds(rank)]
        if lacking:
            self._move(among, among.ranks.index(source), wanted, keep=groups.rank in lacking)
        return ("self" if is_held else gathering.document.member_of_rank(source).pod_uid), wanted

    def _copy(self, groups: Groups, gathering: Gathering, decision: Copy) -> tuple[str, StatePair]:
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
        if equal[groups.rank]:
            return "self", decision.state
        return gathering.document.member_of_rank(decision.source).pod_uid, decision.state

    def _read_parts(self, groups: Groups, gathering: Gathering, above: StatePair | None) -> StatePair | None:
        """Continue from the newest checkpoint: each rank of one model group reads its part, and the others of its inner index get
        copies. None: there is none that is newer than `above`. Raises Refused as `_fall_back` does."""
        layout, document = self._plan.layout, gathering.document
        workers_per_group = max(1, layout.size // document.members[0].processes)
        reader = document.rank_offset(
            document.readers(workers_per_group)[0].pod_uid
        )  # another one each time (rule RETRY)
        group = reader // layout.size
        disk = self._newest_on_disk(gathering, above) if groups.rank == reader else _OnDisk()
        said = {
            "directory": disk.info.name.directory if disk.info is not None else None,
            "imported": disk.imported,
            "why": disk.why,
            "missing": disk.missing,
        }
        found = json.loads(transfer.share_text(groups, reader, json.dumps(said)))
        if found["directory"] is None:
            if above is None:
                self._refuse_to_begin_anew(document, found["why"], found["missing"])
            return None
        among = groups.part(layout.part_name())
        assert self._durable.checkpointer is not None
        if groups.rank // layout.size == group:
            checkpointer, imported = self._durable.checkpointer, found["imported"]
            if imported is not None:
                assert self._durable.resume_from is not None
                info = checkpointer.imported(self._durable.resume_from, imported)
            else:
                info = checkpointer.info_of(found["directory"])
            self._durable.load(info)
            text = json.dumps(info.pair)
        else:
            text = ""
        self._imported = found["imported"]
        pair = StatePair(*json.loads(transfer.share_text(among, group, text)))
        self._move(among, group, pair, keep=True)
        return pair

    def _refuse_to_begin_anew(self, document: Document, why: str, missing: str) -> None:
        """Raise Refused where the job's status names a checkpoint, or the job is to begin with one, and none can be read;
        UsageError, on all ranks, where what it is to begin with does not exist (`missing`)."""
        named = document.checkpoint
        if named is not None:
            raise Refused(
                f"The job's status names checkpoint {named.directory}, and no checkpoint can be read: "
                f"{why or 'REGROUP_CHECKPOINT_DIR is not set.'} "
                "Make it readable; it is tried again automatically.",
                cause="checkpoint",
            )
        if missing:
            raise UsageError(missing)
        if self._durable.resume_from:
            raise Refused(
                f"The job is to begin with checkpoint {self._durable.resume_from}, which cannot be read: {why} "
                "Restore it, or make it readable; it is tried again automatically.",
                cause="checkpoint",
            )

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
        """Take part in a broadcast. Who holds no state has nothing to lose: what is on the GPU arrives where it will stay."""
        if not keep or self._state.pair is not None or self._device.type == "cpu":
            return transfer.receive(groups, source, keep=keep)
        self._state.begin_receiving()
        return transfer.receive(groups, source, keep=keep, into=self._state.packed()[1])

    def _fall_back(self, groups: Groups, gathering: Gathering, decision: Fallback) -> tuple[str, StatePair]:
        """Follow the newest of the best survivor, the durable checkpoint and nothing. One rank reads the disk for all.

        Raises Refused, on all ranks, when that would be nothing although the job's status names a checkpoint: a volume
        that cannot be read today may be read tomorrow, and a history that begins anew would let it be pruned. The
        operator then tries again with a pause, and another worker reads (rule RETRY).
        """
        document = gathering.document
        best, reader = decision.best, document.rank_offset(document.reader().pod_uid)
        held = best.state if best is not None else None
        disk = self._newest_on_disk(gathering, above=held) if groups.rank == reader else _OnDisk()
        info = disk.info
        said = {
            "pair": None if info is None else info.pair,
            "imported": disk.imported,
            "why": disk.why,
            "missing": disk.missing,
        }
        found = json.loads(transfer.share_text(groups, reader, json.dumps(said)))
        if found["pair"] is None:
            if best is not None:
                return self._copy(groups, gathering, best)
            self._refuse_to_begin_anew(document, found["why"], found["missing"])
            pair = StatePair(groups.generation, 0)
            source = beginner(gathering.arrivals, reader)
            if source is None:
                raise StateError(
                    "There is no state to continue from, and a copy of one was cut off on every rank. The processes have to start "
                    "again; they do so by themselves."
                )
            self._move(groups, source, pair, keep=True)
            return "nothing", pair
        self._imported = found["imported"]
        pair = StatePair(*found["pair"])
        if info is not None:
            self._durable.load(info)
        self._move(groups, reader, pair, keep=True)
        return "disk", pair

    def _newest_on_disk(self, gathering: Gathering, above: StatePair | None) -> _OnDisk:
        """Return the newest checkpoint that is newer than `above`, else, where the job has neither a state nor a checkpoint, the
        one that it is to begin with."""
        checkpointer = self._durable.checkpointer
        if checkpointer is None:
            return _OnDisk()
        document = gathering.document
        newest = checkpointer.newest(document.lineage, document.checkpoint, is_all=above is None)
        for sentence in newest.skipped:
            print(sentence, flush=True)
        if newest.info is not None and (above is None or newest.info.pair > above):
            return _OnDisk(newest.info)
        why = shorten(" ".join(newest.skipped), 300)
        # Once the status names a checkpoint of the job's own, that one is waited for: what the job began with is older.
        if above is not None or document.checkpoint is not None or self._durable.resume_from is None:
            return _OnDisk(why=why)
        try:
            return _OnDisk(checkpointer.imported(self._durable.resume_from, document.imported), imports=True)
        except ImportMissing as error:
            return _OnDisk(missing=str(error))
        except CheckpointError as error:
            return _OnDisk(why=shorten(str(error), 300))

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
