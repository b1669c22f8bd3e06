"""Gradients that are kept beside the state stay what they were, whatever comes before they are applied (rule KEEP)."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regroup.data import SamplePlan
from regroup.errors import GenerationChanged, PeerLost
from regroup.generation.groups import Groups
from regroup.parallel.ddp import DataParallel
from regroup.parallel.strategy import Share, Word
from regroup.protocol.state import StatePair
from regroup.state.memory import Memory
from regroup.state.training import CommitRecord, TrainingState
from regroup.transaction import agreement
from regroup.transaction import kept as shelves
from regroup.transaction.agreement import Agreement
from regroup.transaction.commit import Committer
from regroup.transaction.hooks import Arguments
from tests.unit.parallel.ranks import Ranks, Told
from tests.unit.transaction.test_host_syncs import member


class Kept:
    """A strategy that has reduced a step and given its gradients away."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.strategy = DataParallel(self.model, self.optimizer, SamplePlan(0, 64, 8, 2, 4))
        self.strategy.begin_generation(None)
        self.strategy.begin_step()
        loss = self.model(torch.ones(2, 3)).square().sum()
        self.strategy.backward(loss, torch.ones_like(loss), last=True)
        self.strategy.reduce(Share(0), Told(None))
        self.reduced = [gradient.clone() for gradient in self.gradients]
        assert all(gradient.any() for gradient in self.reduced)
        self.taken = self.strategy.take()

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def assert_back(self) -> None:
        assert len(self.gradients) == len(self.reduced)
        assert all(map(torch.equal, self.gradients, self.reduced))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_script_zeroes_gradients_after_the_step(set_to_none: bool) -> None:
    kept = Kept()
    kept.optimizer.zero_grad(set_to_none=set_to_none)
    kept.strategy.put_back(kept.taken, None)
    kept.assert_back()


def test_a_cut_off_sum_of_a_later_generation_still_writes_into_its_bucket() -> None:
    kept = Kept()
    kept.strategy.begin_step()
    later = kept.gradients  # gloo's thread writes there
    kept.strategy.put_back(kept.taken, None)
    for gradient in later:
        gradient.fill_(9.0)
    kept.assert_back()
    kept.strategy.scale(2.0)
    assert all(torch.equal(2 * one, was) for one, was in zip(kept.gradients, kept.reduced))


def on_shelf(generation: int, base: tuple[int, int]) -> shelves.Kept:
    return shelves.Kept(generation, StatePair(*base), None, Arguments())


def test_only_what_fits_the_held_state_is_named_and_kept() -> None:
    shelf = shelves.Shelf()
    first, second, other = on_shelf(1, (1, 5)), on_shelf(2, (1, 5)), on_shelf(2, (2, 5))
    for one in (first, second, other):
        shelf.add(one)
    held, copied = StatePair(1, 5), StatePair(2, 5)
    assert shelf.find(held, StatePair(1, 6)) is first
    assert shelf.find(held, StatePair(2, 6)) is second, "the generation decides, not the step alone"
    assert shelf.find(held, StatePair(2, 7)) is None
    assert shelf.find(copied, StatePair(2, 6)) is other, "another state was reduced on"
    assert shelf.names(held) == ((1, held), (2, held))
    assert shelf.find(copied, StatePair(2, 6)) is None, "forgotten: the process holds another state"


def test_nothing_is_kept_after_a_step_was_applied_or_the_state_was_lost() -> None:
    shelf = shelves.Shelf()
    shelf.add(on_shelf(1, (1, 5)))
    shelf.clear()
    assert shelf.names(StatePair(1, 5)) == ()
    shelf.add(on_shelf(1, (1, 5)))
    assert shelf.names(None) == ()
    assert shelf.names(StatePair(1, 5)) == ()


def test_a_step_that_was_applied_frees_what_was_kept() -> None:
    """It is as large as the model."""
    kept = Kept()
    base, wanted = StatePair(1, 5), StatePair(1, 6)
    state = TrainingState(kept.model, kept.optimizer, {})
    state.named(base, 1)
    plan = SamplePlan(0, 64, 8, 2, 4)

    def follow(groups: Groups) -> None:
        committer = Committer(member(groups), kept.strategy, state, plan, Memory(state, plan, None, 0), lambda *_: None)
        shelf = committer._shelf
        (flat,), *_ = kept.taken
        shelf.add(shelves.Kept(1, base, kept.taken, Arguments()))
        kept.taken = None
        assert committer.kept() == ((1, base),)
        assert committer.roll_forward(wanted, CommitRecord(wanted, 0.5, 1.0))
        assert state.pair == wanted
        found = weakref.ref(flat)
        del flat
        gc.collect()
        assert found() is None

    Ranks(1).run(follow)


@pytest.mark.parametrize("aborted", [True, False], ids=["aborted before the row is sent", "the rows do not come"])
def test_what_an_abort_may_have_left_is_not_kept(monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    """On GPUs the host has not waited for what was summed inside the group. Until its row is sent nobody has applied the step."""
    kept, sent = [], []

    def check() -> None:
        if aborted:
            raise GenerationChanged("generation 1 has ended")

    def gather(*_: Any) -> None:
        sent.append("row")
        raise PeerLost("rank 1")

    membership: Any = SimpleNamespace(check=check, groups=None)
    plan: Any = SimpleNamespace(layout=SimpleNamespace(size=2))
    nothing: Any = None
    rows = Agreement(membership, plan, nothing, nothing, nothing, None, lambda: False)
    rows.begin(Share(0), 1, lambda: kept.append("gradients"))
    monkeypatch.setattr(rows, "_row", lambda *_: "row")
    monkeypatch.setattr(agreement, "gather", gather)
    with pytest.raises(GenerationChanged if aborted else PeerLost):
        rows([], Word)
    assert (kept, sent) == (([], []) if aborted else (["gradients"], ["row"]))
