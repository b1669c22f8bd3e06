"""A state that arrives where it will stay is torn when its source dies; one that was held is not (rule TORN)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regroup.checkpoint import tree as trees
from regroup.data import SamplePlan
from regroup.errors import PeerLost
from regroup.generation import transfer
from regroup.generation.adopter import Adopter
from regroup.protocol.state import StatePair
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import TrainingState

PAIR = StatePair(3, 7)


@pytest.mark.parametrize(
    ("device", "held", "torn"),
    [
        pytest.param("cuda", None, True, id="nothing was held: it arrives in the tensors themselves"),
        pytest.param("cuda", PAIR, False, id="a state was held: it stays until the last byte is there"),
        pytest.param("cpu", None, False, id="in host memory there is room for a second copy"),
    ],
)
def test_source_dies_in_the_middle_of_a_copy(
    monkeypatch: pytest.MonkeyPatch, device: str, held: StatePair | None, torn: bool
) -> None:
    model = torch.nn.Linear(2, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    plan = SamplePlan(0, 8, 4, 2, 1)
    adopter = Adopter(state, plan, torch.device(device), Durable(state, plan), Memory(state, plan, None, 0))
    if held is not None:
        state.named(held, 3)

    def receive(_groups: Any, _source: int, *, keep: bool, into: Any = None) -> None:
        assert keep
        for tensor in (into or {}).values():
            tensor.detach().zero_()
        raise PeerLost("gone", 0)

    monkeypatch.setattr(transfer, "receive", receive)
    before = trees.unpack(*trees.pack({"model": {k: v.clone() for k, v in model.state_dict().items()}}))
    with pytest.raises(PeerLost):
        adopter._receive(None, 0, keep=True)  # type: ignore[arg-type]
    assert state.pair == held
    assert state.torn is torn
    assert adopter.arrival(0, None, False, None).torn is torn
    assert all(torch.equal(before["model"][name], now) for name, now in model.state_dict().items()) is not torn
    state.load(state.tree())
    assert not state.torn
