"""Rows that leave before the device has ended backward, and losses that are read when somebody asks for them (adr/0074).

The device is a fake one whose work ends when the test says so (`FakeDevice.ended`). Ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import regroup
from regroup import strategies
from regroup.data import SamplePlan, as_source, make_feed
from regroup.errors import Aborted, DivergedError, GenerationChanged
from regroup.generation.groups import Groups
from regroup.parallel import ddp
from regroup.parallel.noise import NoiseScale
from regroup.protocol import env
from regroup.protocol.state import StatePair
from regroup.state.memory import Memory
from regroup.state.training import TrainingState
from regroup.step import Step
from regroup.transaction import agreement
from regroup.transaction.commit import Committer, Extras
from regroup.transaction.header import Row
from regroup.wiring import make_strategy
from tests.unit.parallel import ranks as ranks_module
from tests.unit.parallel.fake_device import DEVICE, FakeDevice, engine_of
from tests.unit.parallel.ranks import Ranks
from tests.unit.transaction.test_host_syncs import Descent, member

GLOBAL_BATCH, MICROBATCH, STEPS = 8, 2, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Torch imports its compiler with the first step of an optimizer. On a busy machine that takes longer than ranks have."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (env.SOCKET, env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("regroup.parallel.host.engine_of", engine_of)
    monkeypatch.setattr(ddp, "engine_of", engine_of)
    monkeypatch.setattr("regroup.step.microbatch_rng", lambda: nullcontext(lambda *_: None))  # ranks share generators
    yield
    torch.use_deterministic_algorithms(False)  # reduction="exact" turns them on


class Trainer:
    """One rank that commits steps as a session does. `losses` has the loss of each committed step."""

    def __init__(
        self,
        groups: Groups,
        device: torch.device = DEVICE,
        *,
        described: Any = None,
        reduction: str = "fast",
        noise: bool = False,
        buffers: bool = False,
        rate: bool = False,
        weight: bool = False,
    ) -> None:
        layers: list[torch.nn.Module] = [torch.nn.Linear(4, 3, device=device), torch.nn.Linear(3, 2, device=device)]
        self.model = torch.nn.Sequential(*layers)
        with torch.no_grad():
            for i, parameter in enumerate(self.model.parameters()):
                parameter.fill_(0.1 * (i + 1))
        if buffers:
            self.model.register_buffer("table", torch.ones(3, device=device))
        optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if rate:
            optimizer = Descent(self.model.parameters(), {"lr": torch.tensor(0.1).to(device, non_blocking=True)})
        own = torch.Generator().manual_seed(7)
        x, y = torch.randn(64, 4, generator=own), torch.randint(2, (64,), generator=own)
        source = as_source((x, y))
        self.plan = SamplePlan(0, len(source), GLOBAL_BATCH, MICROBATCH, 2)
        self.state = TrainingState(self.model, optimizer, {})
        self.state.named(StatePair(1, 0), 1)
        described = described or strategies.DataParallel()
        strategy = make_strategy(described, reduction, self.model, self.state, self.plan, measures=noise)
        uneven = isinstance(described, strategies.DataParallel) and described.uneven
        self.member = member(groups)
        self.committer = Committer(
            self.member,
            strategy,
            self.state,
            self.plan,
            Memory(self.state, self.plan, None, groups.rank),
            lambda *_: None,
            Extras(uneven=uneven, noise=NoiseScale() if noise else None),
        )
        self.committer.total = STEPS
        self.committer.begin_generation()
        self.feed = make_feed(source, self.plan)
        self.device, self.has_weight_on_device = device, weight
        self.losses: list[float] = []

    def run(self, index: int) -> Step:
        step = Step(index, self.committer, self.feed, self.model)
        with step:
            for x, y in step.microbatches():
                x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
                loss = torch.nn.functional.cross_entropy(self.model(x), y, reduction="sum")
                step.backward(sum=loss, weight=(y >= 0).sum() if self.has_weight_on_device else len(y))
            step.commit()
        return step

    def values(self) -> list[list[float]]:
        """Return what is trained, as it is now on the device."""
        return [getattr(one, "held", one).detach().flatten().tolist() for one in self.model.parameters()]


class Sent:
    """The first row of each rank's step, and what the host had waited for when it left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[int, Row] = {}
        self.waits: dict[int, list[str]] = {}
        self.device: dict[int, FakeDevice] = {}
        self.on_row: Callable[[int], None] = lambda _rank: None
        gather = agreement.gather

        def sending(groups: Any, row: Row, *others: Any) -> Any:
            if groups.rank not in self.rows:
                self.rows[groups.rank] = row
                self.waits[groups.rank] = self.device[groups.rank].take() if groups.rank in self.device else []
                self.on_row(groups.rank)
            return gather(groups, row, *others)

        monkeypatch.setattr(agreement, "gather", sending)


NOTHING: list[str] = []
READS = ["agreement._row: mark"]


@pytest.mark.parametrize(
    ("device", "fields", "waits", "has_loss", "is_late"),
    [
        pytest.param(DEVICE, {}, NOTHING, False, True, id="data parallel"),
        *(
            pytest.param(DEVICE, {"described": strategies.DataParallel(hook)}, NOTHING, False, True, id=f"hook {hook}")
            for hook in ("bf16", "fp16")
        ),
        pytest.param(
            DEVICE,
            {"described": strategies.DataParallel(strategies.PowerSGD(start_step=9))},
            NOTHING,
            False,
            True,
            id="hook PowerSGD",
        ),
        pytest.param(DEVICE, {"described": strategies.LocalSGD(inner_steps=2)}, NOTHING, False, True, id="local steps"),
        pytest.param(
            DEVICE, {"weight": True}, READS, False, True, id="a weight on the device is read, the loss is not"
        ),
        pytest.param(DEVICE, {"rate": True}, READS, False, True, id="a rate on the device is read, the loss is not"),
        pytest.param(DEVICE, {"buffers": True}, READS, True, False, id="buffers may change"),
        pytest.param(DEVICE, {"noise": True}, READS, True, False, id="the noise scale is measured"),
        pytest.param(
            DEVICE,
            {"described": strategies.DataParallel(uneven=True)},
            READS,
            True,
            False,
            id="shares follow the time of the device",
        ),
        pytest.param(DEVICE, {"reduction": "exact"}, READS, True, False, id="exact"),
        pytest.param(CPU, {}, NOTHING, True, False, id="on a CPU"),
        pytest.param(CPU, {"reduction": "exact"}, NOTHING, True, False, id="exact on a CPU"),
    ],
)
def test_what_the_row_of_a_step_has(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    fields: dict[str, Any],
    waits: list[str],
    has_loss: bool,
    is_late: bool,
) -> None:
    """A late row has the parameters' hash of the step before: the first one of a generation has none."""
    if device == DEVICE:
        monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)
    sent = Sent(monkeypatch)

    def one(groups: Groups) -> tuple[list[Row], float]:
        rows = []
        with FakeDevice() as fake:
            trainer = Trainer(groups, device, **fields)
            for index in range(2):
                fake.take()
                sent.device[groups.rank] = fake
                sent.rows.pop(groups.rank, None)
                step = trainer.run(index)
                rows.append(sent.rows[groups.rank])
            return rows, step.loss

    (rows, loss), (_, other_loss) = Ranks(2, device).run(one)
    assert [wait for wait in sent.waits[0] if "_catch_up" not in wait] == waits  # the step before has ended long ago
    assert loss == other_loss
    assert 0 < loss < 2
    assert [row.loss_sum > 0 for row in rows] == [has_loss] * 2
    assert [row.weight for row in rows] == [4.0] * 2
    assert all(row.hashes.settings for row in rows)
    assert [row.hashes.parameters != 0 for row in rows] == [not is_late, True]


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_and_parameters_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)

    def one(groups: Groups, device: torch.device) -> tuple[list[float], list[list[float]]]:
        with FakeDevice():
            trainer = Trainer(groups, device)
            losses = [trainer.run(index).loss for index in range(STEPS)]
            return losses, trainer.values()

    on_device = Ranks(world_size, DEVICE).run(lambda groups: one(groups, DEVICE))
    (losses, values), *_ = Ranks(world_size).run(lambda groups: one(groups, CPU))
    assert on_device == [on_device[0]] * world_size
    assert on_device[0][0] == pytest.approx(losses, rel=1e-14)
    assert on_device[0][1] == values


def test_rows_leave_before_any_work_of_the_device_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    fakes: dict[int, FakeDevice] = {}

    def end_all(rank: int) -> None:
        fakes[rank].ended.set()  # not before the row was sent: a wait before it would not end

    sent.on_row = end_all

    def one(groups: Groups) -> float:
        with FakeDevice() as fake:
            fakes[groups.rank] = fake
            trainer = Trainer(groups)
            fake.ended.clear()
            return trainer.run(0).loss

    losses = Ranks(2, DEVICE).run(one)
    assert losses[0] == losses[1] > 0


def test_loss_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)

    def one(groups: Groups) -> tuple[list[str], list[str], float, float]:
        with FakeDevice() as fake:
            trainer = Trainer(groups)
            trainer.run(0)
            fake.take()
            step = trainer.run(1)
            in_step = fake.take()
            loss = step.loss
            asked = fake.take()
            record = trainer.state.record
            assert record is not None
            return in_step, asked, loss, float(record.loss)

    for in_step, asked, loss, recorded in Ranks(2, DEVICE).run(one):
        # The loss of the step before, which has ended long ago; and, after the row was sent, the end of backward.
        assert in_step == ["commit._catch_up: mark", "equal.wait: mark"]
        assert asked == ["step.loss: mark"]
        assert loss == recorded > 0


def test_rank_that_is_alone_waits_for_the_step_before() -> None:
    """So the host is at most one step ahead of the device."""
    with FakeDevice() as fake:
        model = torch.nn.Linear(4, 2, device=DEVICE)
        data = torch.randn(64, 4), torch.randint(2, (64,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[float] = []
        with regroup.session(model=model, optimizer=optimizer, data=data, global_batch=8, microbatch=4) as job:
            for step in job.steps(3):
                fake.take()
                with step:
                    for x, y in step.microbatches():
                        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
                        step.backward(mean=torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
                    hooks = [] if step.index < 2 else [lambda step=step: seen.append(step.loss)]
                    step.commit(after=hooks)
                if step.index == 1:
                    assert fake.take() == ["commit._catch_up: mark"]
        assert seen == [step.loss]
        assert 0 < step.loss < 3


@pytest.mark.parametrize("again", [False, True], ids=["left", "done again"])
def test_abort_before_the_end_of_the_sums_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)
    aborts = False
    wait = ranks_module._Rank.wait

    def waiting(rank: Any, pending: Any) -> None:
        if aborts and not all(one.control for one in pending):
            raise Aborted("the groups of generation 1 were left")
        wait(rank, pending)

    monkeypatch.setattr(ranks_module._Rank, "wait", waiting)
    ranks = Ranks(2, DEVICE)

    def one(groups: Groups, *, cut: bool) -> tuple[list[float], list[list[float]]]:
        nonlocal aborts
        with FakeDevice():
            trainer = Trainer(groups)
            losses = [trainer.run(0).loss]
            if cut:
                before, pair, record = trainer.values(), trainer.state.pair, trainer.state.record
                ranks.exchange(groups.rank, None)
                aborts = True
                with pytest.raises(GenerationChanged):
                    trainer.run(1)
                assert trainer.values() == before
                assert (trainer.state.pair, trainer.state.record) == (pair, record)
                ranks.exchange(groups.rank, None)
                aborts = False
                if not again:
                    return losses, trainer.values()
                trainer.committer.begin_generation()
            losses += [trainer.run(index).loss for index in range(1, STEPS if again else 1)]
            return losses, trainer.values()

    disturbed = ranks.run(lambda groups: one(groups, cut=True))
    assert disturbed == ranks.run(lambda groups: one(groups, cut=False))


def test_parameters_that_differ_are_found_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)

    def one(groups: Groups, device: torch.device, found_in: int) -> None:
        with FakeDevice():
            trainer = Trainer(groups, device)
            trainer.run(0)
            if groups.rank == 1:
                with torch.no_grad():
                    next(trainer.model.parameters()).add_(1.0)
            for index in range(1, found_in):
                trainer.run(index)
            with pytest.raises(DivergedError, match="parameters or buffers differ between rank 0 and rank 1"):
                trainer.run(found_in)

    Ranks(2, DEVICE).run(lambda groups: one(groups, DEVICE, found_in=2))
    Ranks(2).run(lambda groups: one(groups, CPU, found_in=1))
