"""When buckets are sent: while backward still computes, if autograd hands gradients over before its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regroup.data import SamplePlan
from regroup.generation.groups import Groups
from regroup.parallel import ddp, gradients
from regroup.parallel.ddp import DataParallel
from regroup.train import build
from regroup.train.tasks.language_model import GPT, Shape

NUM_BLOCKS = 4
COMPUTES = (torch.ops.aten.threshold_backward.default, torch.ops.aten.gelu_backward.default)
"""What each block runs once in its backward, compiled or not: of this file's model, of the loop's GPT."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the blocks whose backward has run."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in COMPUTES
        return func(*args, **(kwargs or {}))


class Sent:
    """Groups of two ranks, as far as sending goes. `after`: for each bucket sent, how many blocks' backward had run."""

    rank, world_size = 0, 2

    def __init__(self, computed: Computed) -> None:
        self._computed = computed
        self.after: list[int] = []

    def launch(self, method: str, *_: Any, control: bool) -> None:
        assert (method, control) == ("allreduce", True)
        self.after.append(self._computed.num)


@pytest.fixture(autouse=True)
def one_bucket_a_block(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 80)
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)
    yield
    torch.compiler.reset()


def compile_blocks(model: Model) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of Dynamo's own
@pytest.mark.parametrize(
    ("compile_", "after"),
    [
        pytest.param(lambda _model: None, [1, 2, 3, 4], id="not compiled"),
        pytest.param(compile_blocks, [1, 2, 3, 4], id="compiled by blocks"),
        # AOTAutograd makes one autograd node of it, which hands over all gradients at its end.
        pytest.param(lambda model: model.compile(backend="aot_eager"), [4, 4, 4, 4], id="compiled as a whole"),
    ],
)
def test_buckets_are_sent_as_backward_fills_them(compile_: Any, after: list[int]) -> None:
    model = Model()
    compile_(model)
    strategy = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), SamplePlan(0, 64, 4, 2, 2))
    computed: Any = Computed()  # type: ignore[no-untyped-call]
    sent = Sent(computed)
    strategy.begin_generation(cast(Groups, sent))
    strategy.begin_step()
    loss = model(torch.randn(2, 4)).sum()
    with computed:  # in backward only: torch compiles nothing under such a mode
        strategy.backward(loss, torch.ones_like(loss), last=True)
    assert computed.num == NUM_BLOCKS
    assert sent.after == after


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of Dynamo's own
def test_buckets_of_a_configuration_are_sent_while_backward_runs() -> None:
    model = GPT(Shape(layers=NUM_BLOCKS, heads=2, width=8, length=4, vocabulary=16, tied=False))
    build.prepare_blocks(model.blocks, "none", compiles=True, backend="aot_eager")
    build.prepare_loss(model, backend="aot_eager")
    strategy = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), SamplePlan(0, 64, 4, 2, 2))
    computed: Any = Computed()  # type: ignore[no-untyped-call]
    sent = Sent(computed)
    strategy.begin_generation(cast(Groups, sent))
    strategy.begin_step()
    x = torch.zeros(2, 4, dtype=torch.int64)
    loss = model(x, x)
    with computed:
        strategy.backward(loss, torch.ones_like(loss), last=True)
    assert computed.num == NUM_BLOCKS
    assert set(sent.after) == {0, 1, 2, 3, 4}, "the output layer's bucket goes first, a block's with the block"
