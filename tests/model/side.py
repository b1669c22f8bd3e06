"""Small models beside the core: QUOTA (rule 14), CKPT (rule 18), what a job begins with, and the RELEASE half of rule 16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from tests.model.search import Move


def _with_item(items: tuple[Any, ...], index: int, item: object) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


class QuotaState(NamedTuple):
    heard: tuple[int, int, int]  # version of the shares that each rank has heard
    contributions: tuple[tuple[int, int] | None, ...]  # (version used, version heard) of each rank in this step
    step: int
    version_in_force: int


class Quota:
    """Three ranks share four virtual workers; new shares reach each rank at a time of its own.

    guard: none | count (refuse a step whose number of samples is wrong) | hash (refuse one whose sum of hashes is
    wrong) | versioned (new shares count from the step after the one in which all ranks have them).
    """

    SHARES = ((2, 1, 1), (1, 1, 2))
    """Contiguous shares by version: mixed, virtual worker 1 is used twice, 2 never, and the count is still right."""

    def __init__(self, guard: Literal["none", "count", "hash", "versioned"], *, steps: int = 3) -> None:
        self.guard = guard
        self.steps = steps

    def init(self) -> QuotaState:
        return QuotaState((0, 0, 0), (None, None, None), 0, 0)

    def share(self, version: int, rank: int) -> tuple[int, ...]:
        first = sum(self.SHARES[version][:rank])
        return tuple(range(first, first + self.SHARES[version][rank]))

    def is_goal(self, state: QuotaState) -> bool:
        return state.step >= self.steps

    def is_cut(self, state: QuotaState) -> bool:  # noqa: ARG002
        return False

    def is_judged(self, state: QuotaState) -> bool:  # noqa: ARG002
        return True

    def moves(self, state: QuotaState) -> Iterator[Move]:
        if self.is_goal(state):
            return
        next_step = state.step + 1
        for rank in range(3):
            if state.heard[rank] == 0:
                heard = state._replace(heard=_with_item(state.heard, rank, 1))
                yield Move(f"rank {rank} hears quotas v1", False, heard)
            if state.contributions[rank] is None:
                version = state.version_in_force if self.guard == "versioned" else state.heard[rank]
                computed = _with_item(state.contributions, rank, (version, state.heard[rank]))
                label = f"rank {rank} computes {self.share(version, rank)} of step {next_step}"
                yield Move(label, False, state._replace(contributions=computed))
        done = [c for c in state.contributions if c is not None]
        if len(done) < 3:
            return
        samples = [i for rank in range(3) for i in self.share(done[rank][0], rank)]
        is_right = sorted(samples) == [0, 1, 2, 3]
        redo = state._replace(contributions=(None, None, None))
        if (self.guard == "count" and len(samples) != 4) or (self.guard == "hash" and not is_right):
            yield Move(f"all-reduce refuses step {next_step}: redo", False, redo)
            return
        in_force = 1 if all(heard for _, heard in done) else state.version_in_force
        violation = None if is_right else f"step {next_step} used samples {samples}"
        committed = redo._replace(step=next_step, version_in_force=in_force)
        yield Move(f"commit step {next_step}", False, committed, violation)


Checkpoint = tuple[int, int]
"""(generation, step)."""


class CkptState(NamedTuple):
    zombie_step: int
    zombie_pending: int | None  # step whose COMMIT.json is about to be written: the fence was looked at before
    step: int | None  # of generation 2; None: not announced
    complete: frozenset[Checkpoint]
    reported: int  # newest step that generation 2 wrote into `status.checkpoint`


class Ckpt:
    """Generation 1 on an unreachable node (pods force-deleted, processes alive, volume reachable) writes on.

    Meanwhile generation 2, rolled back with notice to the newest durable step, trains, and loses every pod: which
    checkpoint does generation 3 restore? The fence is looked at first and COMMIT.json written later, so a pause may
    lie between. order: what "newest" and retention go by, the step or (generation, step).
    """

    def __init__(self, order: Literal["step", "generation"], *, keep: int = 2) -> None:
        self.order = order
        self.keep = keep

    def init(self) -> CkptState:
        return CkptState(2, None, None, frozenset({(1, 1)}), 0)

    def is_goal(self, state: CkptState) -> bool:  # noqa: ARG002
        return True

    is_cut = is_goal
    is_judged = is_goal

    def _key(self, checkpoint: Checkpoint) -> tuple[int, int]:
        return checkpoint[::-1] if self.order == "step" else checkpoint

    def _prune(self, complete: frozenset[Checkpoint]) -> frozenset[Checkpoint]:
        return frozenset(sorted(complete, key=self._key)[-self.keep :])

    def moves(self, state: CkptState) -> Iterator[Move]:
        yield from self._zombie_moves(state)
        newest = max(state.complete, key=self._key)
        if state.step is None:
            label = f"g2 announced (rollback, said so): restores step-{newest[1]}.g{newest[0]}"
            yield Move(label, False, state._replace(step=newest[1]))
            return
        if state.step < 4:
            yield Move(f"g2 trains step {state.step + 1}", False, state._replace(step=state.step + 1))
        own = (2, state.step)
        if own not in state.complete and state.step > state.reported:
            kept = self._prune(state.complete | {own})
            violation = None
            if own not in kept:
                violation = f"retention removed the new checkpoint step-{state.step}.g2 in favour of {sorted(kept)}"
            label = f"g2 commits step-{state.step}.g2, prunes to {sorted(kept)}"
            yield Move(label, False, state._replace(complete=kept, reported=state.step), violation)
        if state.reported:
            violation = None
            if newest != (2, state.reported):
                violation = (
                    f"g3 restores the fenced branch step-{newest[1]}.g{newest[0]}, status says step-{state.reported}.g2"
                )
            label = f"g2 loses every pod; g3 restores step-{newest[1]}.g{newest[0]}"
            yield Move(label, True, state, violation)

    def _zombie_moves(self, state: CkptState) -> Iterator[Move]:
        step, pending = state.zombie_step, state.zombie_pending
        if step < 4:
            yield Move(f"g1 (zombie) trains step {step + 1}", False, state._replace(zombie_step=step + 1))
        if pending is None and state.step is None:
            label = f"g1 passes the fence check for step-{step}.g1"
            yield Move(label, False, state._replace(zombie_pending=step))
        if pending is not None:
            complete = self._prune(state.complete | {(1, pending)})
            label = f"g1 writes COMMIT of step-{pending}.g1, prunes"
            yield Move(label, False, state._replace(zombie_pending=None, complete=complete))


class ReleaseState(NamedTuple):
    old_leader: Literal["running", "formed", "deleting", "ended"]
    has_w0: int
    has_w1: int
    newest: int
    is_released: int  # w1 is in `status.released`
    is_back: int  # w1 is a member of the newest generation again


class Release:
    """Leader A scales w1 away (g2 = {w0}) and pauses before it deletes the pod; B leads; w0 dies; B takes w1 back."""

    def __init__(self, *, is_persisted: bool) -> None:
        """`is_persisted`: w1's uid goes into `status.released` by compare-and-swap before the pod is deleted."""
        self.is_persisted = is_persisted

    def init(self) -> ReleaseState:
        return ReleaseState("running", 1, 1, 1, 0, 0)

    def is_goal(self, state: ReleaseState) -> bool:  # noqa: ARG002
        return True

    is_cut = is_goal
    is_judged = is_goal

    def moves(self, state: ReleaseState) -> Iterator[Move]:
        if state.old_leader == "running" and state.newest == 1:
            formed = state._replace(old_leader="formed", newest=2, is_back=0)
            yield Move("leader A announces g2={w0}, formed", False, formed)
        if state.old_leader == "formed":
            deleting = state._replace(old_leader="deleting")
            if not self.is_persisted:
                yield Move("leader A decides to delete w1, pauses, lease expires", False, deleting)
            elif state.newest == 2:
                label = "leader A persists released={w1} (compare-and-swap on g2)"
                yield Move(label, False, deleting._replace(is_released=1))
        if state.old_leader == "deleting" and state.has_w1:
            violation = "w1, re-admitted in g3 and last holder, deleted by the old leader" if state.is_back else None
            label = "leader A wakes and deletes w1 (uid precondition holds)"
            yield Move(label, False, state._replace(old_leader="ended", has_w1=0), violation)
        if state.has_w0 and state.newest == 2:
            yield Move("FAULT w0's pod lost", True, state._replace(has_w0=0))
        if not state.has_w0 and state.has_w1 and state.newest == 2 and not state.is_released:
            yield Move("leader B announces g3={w1}", False, state._replace(newest=3, is_back=1))


class GivenUpState(NamedTuple):
    newest: int  # g1={w0}, g2={w0,w1}, g3={w0}
    w1: Literal["waits", "entered", "adopted"]  # how far it has come in g2
    known: Literal["waits", "entered", "adopted"]  # what it has told the operator of that
    is_connected: int  # w1
    is_g3_adopted: int
    is_released: int  # w1


_FAR: tuple[Literal["waits", "entered", "adopted"], ...] = ("waits", "entered", "adopted")


class GivenUp:
    """w1 joins w0 in g2. It is released at once if it has told of no entering, and is given up, or another worker has its slot: it
    witnesses nothing."""

    def __init__(self, *, is_named_kept: bool) -> None:
        """`is_named_kept`: not while a generation names it that is newest, or newer than the last that all have adopted."""
        self.is_named_kept = is_named_kept

    def init(self) -> GivenUpState:
        return GivenUpState(1, "waits", "waits", 1, 0, 0)

    def is_goal(self, state: GivenUpState) -> bool:  # noqa: ARG002
        return True

    is_cut = is_goal
    is_judged = is_goal

    def moves(self, state: GivenUpState) -> Iterator[Move]:
        if state.newest == 1 and state.is_connected and not state.is_released:
            yield Move("operator announces g2={w0,w1}", False, state._replace(newest=2))
        if state.newest >= 2 and state.w1 != "adopted" and not state.is_g3_adopted and not state.is_released:
            further = _FAR[_FAR.index(state.w1) + 1]
            yield Move(f"w1 has {further} g2", False, state._replace(w1=further))
        if state.is_connected and state.known != state.w1:
            yield Move(f"w1 reports {state.w1} g2", False, state._replace(known=state.w1))
        if state.is_connected:
            yield Move("FAULT w1's stream breaks", True, state._replace(is_connected=0))
        elif state.newest == 2:
            yield Move("operator gives w1 up, announces g3={w0}", False, state._replace(newest=3))
        if state.newest == 3 and not state.is_g3_adopted:
            yield Move("w0 adopts g3 and says so", False, state._replace(is_g3_adopted=1))
        # The last generation that all have adopted is g1 until g3 is: g2 names w1 all the while.
        is_kept = self.is_named_kept and state.newest >= 2 and not state.is_g3_adopted
        if state.known == "waits" and not is_kept and not state.is_released:
            is_holder = state.w1 == "adopted" and not state.is_g3_adopted
            violation = "w1, which holds the state of g2, is released before w0 has a newer one" if is_holder else None
            yield Move("operator persists released={w1}", False, state._replace(is_released=1), violation)


class ImportState(NamedTuple):
    source: int  # newest step in the directory of another job, which still runs
    generation: int  # 0: none
    begun: int  # step with which the job has begun; 0: it has not
    has_own: int  # a step of g1 is committed, in w0's memory
    lives: int  # w0


class Import:
    """A job begins with a checkpoint of another one (adr/0071); g2 is a second beginning, or has w1, which would read it anew."""

    FIRST, LATER, FOREIGN = 7, 9, 5
    """Steps in the other job's directory, and the generation there that wrote them."""

    def __init__(self, *, is_pinned: bool = True, is_named_zero: bool = True) -> None:
        """`is_pinned`: the spec names one; else each generation takes the newest. `is_named_zero`: its state is (0, N); else it
        has the name that it had in the other job."""
        self.is_pinned, self.is_named_zero = is_pinned, is_named_zero

    def init(self) -> ImportState:
        return ImportState(self.FIRST, 0, 0, 0, 0)

    def is_goal(self, state: ImportState) -> bool:
        return state.generation == 2

    def is_cut(self, state: ImportState) -> bool:
        return self.is_goal(state)

    def is_judged(self, state: ImportState) -> bool:  # noqa: ARG002
        return True

    def moves(self, state: ImportState) -> Iterator[Move]:
        step = self.FIRST if self.is_pinned else state.source
        pair = (0 if self.is_named_zero else self.FOREIGN, step)
        if state.source == self.FIRST:
            yield Move("the other job commits step 9", False, state._replace(source=self.LATER))
        if state.generation == 0:
            yield Move(f"g1 begins with step {step}", False, state._replace(generation=1, begun=step, lives=1))
        if state.generation != 1:
            return
        if state.lives and not state.has_own:
            yield Move("g1 commits a step", False, state._replace(has_own=1))
        if state.lives:
            yield Move("FAULT w0 is lost with its state", True, state._replace(lives=0, has_own=0))
        violation = None
        if state.lives and state.has_own and pair > (1, state.begun + 1):
            violation = f"g2 goes back to step {step} behind a step of g1"
        elif not state.lives and step != state.begun:
            violation = f"g1 began with step {state.begun}, g2 begins with step {step}"
        yield Move("w1 joins, g2 continues from the newest state", False, state._replace(generation=2), violation)
