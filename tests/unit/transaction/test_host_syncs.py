"""How often the host waits for the device in one step of a session: each such wait leaves the device without work.

What remains, and why:
- *the row* (`Agreement._row`), once: it has the losses, the hashes of what has to be equal, and whether forward has changed a
  buffer. Ranks agree by their rows, which is the host's work. All of it is read together, after every reduction has been
  started. A rank that is alone has only its losses.
- *the reductions* (`Groups.wait`), once: until they are complete without an error nothing may be applied.
- *the overflow* (`commit._unscale`), once, with a scaler: whether the optimizers are stepped is the host's decision.
Not counted here: what a script does itself, such as `loss.item()`, or a weight of `step.backward(mean=)` that is on the device.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import regroup
from regroup.data import SamplePlan, as_source, make_feed
from regroup.generation.groups import Groups
from regroup.parallel import ddp
from regroup.parallel.ddp import DataParallel
from regroup.parallel.host import to_host
from regroup.parallel.strategy import Share
from regroup.protocol import env
from regroup.state.memory import Memory
from regroup.state.training import TrainingState
from regroup.step import Step
from regroup.transaction.commit import Committer
from tests.unit.parallel.fake_device import DEVICE, FakeDevice
from tests.unit.parallel.ranks import Ranks

GLOBAL_BATCH, MICROBATCH = 16, 2
LAST = 3
"""Steps before this one are not counted: the first ones of a generation learn what forward changes."""
ROW = {"agreement._row: copy to the host": 1}
OVERFLOW = {"commit._unscale: copy to the host": 1}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.SOCKET, env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)


class Model(torch.nn.Module):
    """With running statistics, which forward changes, and persistent tables, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8, device=DEVICE), torch.nn.Linear(8, 2, device=DEVICE)
        self.norm = torch.nn.BatchNorm1d(8, device=DEVICE)
        # torch.tensor(0, device=..), which torch has there, makes no tensor that a dispatch mode sees.
        self.norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for name in ("causal", "positions"):
            self.register_buffer(name, torch.ones(3, 3, device=DEVICE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out


def make_data(device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(64, 4), torch.randint(2, (64,))
    return (x, y) if device is None else (x.to(device), y.to(device))


def run(step: Step, model: torch.nn.Module, **commit: Any) -> None:
    """The script's block."""
    with step:
        for x, y in step.microbatches():
            x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
            step.backward(mean=torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
        step.commit(**commit)


Case = tuple[dict[str, Any], dict[str, Any], dict[str, int]]
CASES = [
    pytest.param({}, {}, {}, id="plain"),
    pytest.param({}, {"max_norm": 1.0}, {}, id="clipped: the norm stays on the device"),
    pytest.param({"rate": True}, {}, {}, id="a learning rate on the device"),
    pytest.param({"scaler": True}, {"max_norm": 1.0}, OVERFLOW, id="with a scaler"),
    pytest.param({"scaler": True, "parts": True}, {}, OVERFLOW, id="two optimizers and a scaler"),
]


class Descent(torch.optim.Optimizer):
    """Takes a learning rate on the device as it is: on a CPU, torch's own read it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)


def make_optimizer(model: Model, *, rate: bool = False, parts: bool = False, scaler: bool = False) -> tuple[Any, Any]:
    """Return optimizer and scaler of a case."""
    if rate:
        return Descent(model.parameters(), {"lr": torch.tensor(0.1).to(DEVICE, non_blocking=True)}), None
    split = [[*model.first.parameters()], [*model.norm.parameters(), *model.last.parameters()]]
    optimizers = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in (split if parts else [[*model.parameters()]])]
    return (optimizers if parts else optimizers[0]), torch.amp.GradScaler("cpu") if scaler else None


@pytest.mark.parametrize(("fields", "commit", "more"), CASES)
def test_rank_that_is_alone_waits_for_its_losses(
    fields: dict[str, Any], commit: dict[str, Any], more: dict[str, int]
) -> None:
    with FakeDevice() as device:
        model = Model()
        optimizer, scaler = make_optimizer(model, **fields)
        job = regroup.session(
            model=model,
            optimizer=optimizer,
            data=make_data(),
            global_batch=GLOBAL_BATCH,
            microbatch=MICROBATCH,
            scaler=scaler,
        )
        with job:
            for step in job.steps(LAST + 1):
                device.take()
                run(step, model, **commit)
    assert Counter(device.take()) == ROW | more
    assert step.loss > 0


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_weight_on_the_device_is_read_with_the_loss(reduction: str) -> None:
    """Only a mean needs its weight at once: a mean over nothing is left out."""

    def train(**weight: Any) -> tuple[list[str], float]:
        with FakeDevice() as device:
            model = Model()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.1)
            optimizer, _ = make_optimizer(model)
            job = regroup.session(
                model=model, optimizer=optimizer, data=make_data(), global_batch=GLOBAL_BATCH, microbatch=MICROBATCH
            )
            with job:
                for step in job.steps(LAST + 1):
                    device.take()
                    with step:
                        for x, y in step.microbatches():
                            x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
                            loss = torch.nn.functional.cross_entropy(model(x), y, reduction=reduction)
                            step.backward(**{reduction: loss}, weight=weight.get("weight", (y >= 0).sum()))
                        step.commit()
                    waits = device.take()
            return waits, step.loss

    torch.manual_seed(3)
    late, loss = train()
    torch.manual_seed(3)
    _, other_loss = train(weight=MICROBATCH)
    assert loss == other_loss > 0
    assert len(late) == (1 if reduction == "sum" else 1 + GLOBAL_BATCH // MICROBATCH), late


def test_weight_on_the_device_is_that_of_its_microbatch() -> None:
    share, count = Share(0), torch.tensor(3)
    for v in range(2):
        share.add(v, torch.tensor(1.0), 1.0, count)
        count.add_(1)
    share.tell(to_host(share.ask()))
    assert (share.weights, share.loss_sums) == ({0: 3.0, 1: 4.0}, {0: 1.0, 1: 1.0})


def test_weight_on_the_device_that_is_none_is_refused_in_the_commit() -> None:
    share = Share(0)
    share.add(0, torch.tensor(1.0), 1.0, torch.tensor(-1.0))
    with pytest.raises(
        regroup.RegroupError, match=r"weight of step.backward\(\) is -1.0; it must be a number of samples"
    ):
        share.tell(to_host(share.ask()))


@pytest.mark.parametrize(("fields", "commit", "more"), CASES)
def test_two_ranks_wait_for_their_row_and_their_reductions(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], commit: dict[str, Any], more: dict[str, int]
) -> None:
    monkeypatch.setattr(
        "regroup.step.microbatch_rng", lambda: nullcontext(lambda *_: None)
    )  # threads share the generators
    ranks = Ranks(2, DEVICE)

    def one(groups: Groups) -> tuple[list[str], int, float]:
        with FakeDevice() as device:
            torch.manual_seed(1)
            model = Model()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.1)
            optimizer, scaler = make_optimizer(model, **fields)
            source = as_source(make_data())
            plan = SamplePlan(0, len(source), GLOBAL_BATCH, MICROBATCH, 2)
            state = TrainingState(model, optimizer, {}, scaler)
            strategy = DataParallel(model, state.optimizer, plan)
            memory = Memory(state, plan, None, groups.rank)
            committer = Committer(member(groups), strategy, state, plan, memory, lambda *_: None)
            committer.total = LAST + 1
            committer.begin_generation()
            feed = make_feed(source, plan)
            for index in range(LAST + 1):
                device.take()
                waits = ranks.waits
                step = Step(index, committer, feed, model)
                run(step, model, **commit)
            return device.take(), ranks.waits - waits, step.loss

    (first, waits, loss), (second, _, other_loss) = ranks.run(one)
    assert Counter(first) == Counter(second) == ROW | more
    assert waits == 1, "gradients and running statistics are waited for together"
    assert loss == other_loss


def member(groups: Groups) -> Any:
    """A membership that does not change."""

    class Member:
        generation, rank, world_size = 1, groups.rank, groups.world_size
        kept_own_state = True

        def __init__(self) -> None:
            self.groups = groups

        def check(self) -> None: ...

        def knows_newer(self) -> bool:
            return False

        def explains(self, _error: BaseException) -> bool:
            return False

        def leave(self, _error: BaseException) -> None: ...

    return Member()


def test_what_a_script_asks_for_is_read_then() -> None:
    """The norm is read where `step.norm` is; rows of a tensor on the device are found by ids that are sent without a wait."""
    with FakeDevice() as device:
        model = Model()
        optimizer, _ = make_optimizer(model)
        job = regroup.session(
            model=model, optimizer=optimizer, data=make_data(DEVICE), global_batch=GLOBAL_BATCH, microbatch=MICROBATCH
        )
        with job:
            for step in job.steps(LAST + 1):
                device.take()
                run(step, model, max_norm=1.0)
        assert Counter(device.take()) == ROW
        assert step.norm is not None
        assert step.norm > 0
        assert device.take() == ["step.norm: _local_scalar_dense"] * 2
