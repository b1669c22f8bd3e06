"""Rounds of local steps: what ranks make of them is what one process makes of the same order by hand, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import regroup
from regroup.data import SamplePlan, as_source, make_feed
from regroup.errors import UsageError
from regroup.generation.groups import Groups
from regroup.parallel import ddp
from regroup.parallel.hooks import Plain
from regroup.parallel.local_steps import LocalSteps, inner_ends
from regroup.parallel.strategy import Share
from regroup.protocol import env, snapshot
from regroup.state.memory import Memory
from regroup.state.training import TrainingState
from regroup.step import Step
from regroup.strategies import DataParallel, DiLoCo, LocalSGD
from regroup.transaction.commit import Committer
from regroup.wiring import make_strategy
from tests.trainer.rounds import (
    Holder,
    Way,
    make_data,
    make_model,
    make_optimizer,
    replay_round,
    tensors_of,
)
from tests.unit.parallel.fake_device import DEVICE, FakeDevice
from tests.unit.parallel.ranks import Ranks, Told
from tests.unit.state.test_optimizers import Precise
from tests.unit.transaction.test_host_syncs import member

BATCH, MICROBATCH = 48, 4
Description = DataParallel | LocalSGD | DiLoCo


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.SOCKET, env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)


def train(
    description: Description,
    groups: Groups,
    rounds: int,
    make: Callable[[], torch.nn.Module] = make_model,
    optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer] = make_optimizer,
    plan: SamplePlan | None = None,
) -> tuple[list[torch.Tensor], list[float]]:
    """Commit steps on one of several ranks, as a session does; return all that it holds, and its losses."""
    model = make()
    optimizer = optimizer_of(model)
    source = as_source(make_data())
    plan = plan or SamplePlan(0, len(source), BATCH, MICROBATCH, groups.world_size)
    state = TrainingState(model, optimizer, {}, None)
    strategy = make_strategy(description, "fast", model, state, plan)
    memory = Memory(state, plan, None, groups.rank)
    committer = Committer(member(groups), strategy, state, plan, memory, lambda *_: None)
    committer.total = rounds
    committer.begin_generation()
    feed = make_feed(source, plan)
    losses = []
    for index in range(rounds):
        step = Step(index, committer, feed, model)
        with step:
            for x, y in step.microbatches():
                step.backward(mean=torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
            step.commit()
        losses.append(step.loss)
    strategy.close()
    outer = [] if strategy.outer is None else [strategy.outer]
    return tensors_of(model, optimizer, *outer), losses


@pytest.fixture
def no_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regroup.step.microbatch_rng", lambda: nullcontext(lambda *_: None))  # threads share them


WAYS = [
    pytest.param(LocalSGD(inner_steps=1), Way(1), id="local SGD, one inner step"),
    pytest.param(LocalSGD(inner_steps=2), Way(2), id="local SGD, two"),
    pytest.param(LocalSGD(inner_steps=4), Way(4), id="local SGD, as many as there are microbatches"),
    pytest.param(LocalSGD(inner_steps=3, max_norm=0.3), Way(3, max_norm=0.3), id="local SGD, clipped"),
    pytest.param(DiLoCo(inner_steps=1), Way(1, 0.7, 0.9), id="DiLoCo, one inner step"),
    pytest.param(DiLoCo(inner_steps=3), Way(3, 0.7, 0.9), id="DiLoCo, three"),
    pytest.param(
        DiLoCo(inner_steps=2, outer_learning_rate=0.3, outer_momentum=0.5), Way(2, 0.3, 0.5), id="DiLoCo, other numbers"
    ),
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("description", "way"), WAYS)
@pytest.mark.usefixtures("no_seeds")
def test_rounds_are_those_of_a_replay_bit_by_bit(description: Description, way: Way, world_size: int) -> None:
    rounds = 6
    outcomes = Ranks(world_size).run(lambda groups: train(description, groups, rounds))
    holders = [Holder.new(way, make_model(), make_optimizer) for _ in range(world_size)]
    plan, data = SamplePlan(0, 500, BATCH, MICROBATCH, world_size), make_data()
    for index in range(rounds):
        replay_round(holders, way, plan, data, index)
    for (got, losses), holder in zip(outcomes, holders):
        assert_bits(got, holder.bits())
        assert losses == pytest.approx(list(holder.losses.values()), rel=1e-6)
    if world_size > 1:  # the replay's ranks do have an optimizer's state each of their own
        first, second = (tensors_of(holder.inner) for holder in holders[:2])
        assert any(not torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.usefixtures("no_seeds")
def test_ranks_of_a_hand_over_that_have_too_few_microbatches_make_fewer_inner_steps() -> None:
    """Eight ranks share twelve microbatches, three inner steps each; and five share three: two of them have none."""
    way = Way(3, 0.7, 0.9)
    for batch, world_size, none in ((BATCH, 8, 0), (12, 5, 2)):
        plan = SamplePlan(0, 500, batch, MICROBATCH)
        outcomes = Ranks(world_size).run(lambda g, p=plan: train(DiLoCo(inner_steps=3), g, 4, plan=p))  # type: ignore[misc]
        holders = [Holder.new(way, make_model(), make_optimizer) for _ in range(world_size)]
        for index in range(4):
            replay_round(holders, way, plan, make_data(), index)
        for (got, _), holder in zip(outcomes, holders):
            assert_bits(got, holder.bits())
        assert sum(not share for share in plan.shares(world_size)) == none


@pytest.mark.usefixtures("no_seeds")
def test_parameters_that_are_all_reduced_are_those_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the rows: the backend chooses the order of the sum, so the bits may differ."""
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)
    ranks = Ranks(3)
    outcomes = ranks.run(lambda groups: train(DiLoCo(inner_steps=3), groups, 4))
    way = Way(3, 0.7, 0.9)
    holders = [Holder.new(way, make_model(), make_optimizer) for _ in range(3)]
    for index in range(4):
        replay_round(holders, way, SamplePlan(0, 500, BATCH, MICROBATCH, 3), make_data(), index)
    for (got, _), holder in zip(outcomes, holders):
        for mine, theirs in zip(got, holder.bits()):
            torch.testing.assert_close(mine, theirs)
    assert ranks.calls.count("allreduce") == 4, "once a round, whatever the number of inner steps"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.usefixtures("no_seeds")
def test_one_inner_step_of_sgd_is_data_parallel(world_size: int) -> None:
    """To 1e-6 after 20 steps: the sum is over changes of parameters, which are rounded, instead of gradients."""

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    want, _ = Ranks(world_size).run(lambda g: train(DataParallel(), g, 20, optimizer_of=sgd))[0]
    got, _ = Ranks(world_size).run(lambda g: train(LocalSGD(inner_steps=1), g, 20, optimizer_of=sgd))[0]
    two, _ = Ranks(world_size).run(lambda g: train(LocalSGD(inner_steps=2), g, 20, optimizer_of=sgd))[0]
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert any((mine - theirs).abs().max() > 1e-3 for mine, theirs in zip(two, want))


def assert_bits(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for number, (mine, theirs) in enumerate(zip(got, want)):
        assert torch.equal(mine, theirs), f"tensor {number}"


@pytest.mark.parametrize(
    ("share", "inner_steps", "ends"),
    [
        pytest.param(range(0, 6), 1, [5], id="one inner step takes all"),
        pytest.param(range(6, 12), 3, [7, 9, 11], id="even parts of a share in the middle"),
        pytest.param(range(0, 7), 3, [2, 4, 6], id="an uneven share"),
        pytest.param(range(4, 6), 3, [4, 5], id="fewer microbatches than inner steps"),
        pytest.param(range(0, 0), 3, [], id="an empty share"),
    ],
)
def test_inner_batches_of_a_share(share: range, inner_steps: int, ends: list[int]) -> None:
    assert inner_ends(share, inner_steps) == ends


def test_inner_batches_cover_every_share_once() -> None:
    for length in range(1, 30):
        for inner_steps in range(1, length + 1):
            ends = inner_ends(range(5, 5 + length), inner_steps)
            sizes = [end - before for before, end in zip([4, *ends], ends)]
            assert len(sizes) == inner_steps
            assert sum(sizes) == length
            assert max(sizes) - min(sizes) <= 1


class Normed(torch.nn.Module):
    """With running statistics, which forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def make_job(strategy: Any = DiLoCo(inner_steps=3), **changes: Any) -> regroup.Job:  # noqa: B008 - frozen
    torch.manual_seed(1)
    model = Normed()
    fields: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "data": make_data(),
        "global_batch": BATCH,
        "microbatch": MICROBATCH,
        "strategy": strategy,
    }
    return regroup.session(**{**fields, **changes})


class Stop(Exception):
    """The test's own."""


def run(job: regroup.Job, total: int, at: Callable[[Step, int], None] = lambda *_: None, **commit: Any) -> None:
    """Train; `at(step, microbatches)` is called before each microbatch's backward, and before the commit."""
    for step in job.steps(total):
        with step:
            number = -1
            for number, (x, y) in enumerate(step.microbatches()):
                at(step, number)
                step.backward(mean=torch.nn.functional.cross_entropy(job.model(x), y), weight=len(y))
            at(step, number + 1)
            step.commit(**commit)


@pytest.mark.parametrize("moment", [0, 3, 4, 5, 11, 12])
@pytest.mark.parametrize("index", [0, 2])
def test_round_that_is_cut_off_leaves_nothing(moment: int, index: int) -> None:
    """Of twelve microbatches an inner step takes four: nothing has been changed before the fourth's backward."""
    job = make_job()
    held: list[list[torch.Tensor]] = []

    def cut(step: Step, number: int) -> None:
        if number == 0 and step.index == index:
            held.append([one.clone() for one in tensors_of(job.model, job.optimizer, job._strategy.outer)])
        if (step.index, number) == (index, moment):
            changed = [one for one, old in zip(tensors_of(job.model), held[0]) if not torch.equal(one, old)]
            assert bool(changed) == (moment > 0), "BatchNorm's statistics at least"
            raise Stop

    with pytest.raises(Stop), job:
        run(job, 4, cut)
    assert_bits(tensors_of(job.model, job.optimizer, job._strategy.outer), held[0])


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "of several"])
def test_round_that_is_cut_off_does_not_round_float32_moments_of_bfloat16_parameters(several: bool) -> None:
    model = make_model().to(torch.bfloat16)
    own = Precise(model.parameters())
    x, y = make_data()
    job = make_job(model=model, optimizer=[own] if several else own, data=(x.to(torch.bfloat16), y))
    held: list[torch.Tensor] = []

    def cut(step: Step, number: int) -> None:
        if (step.index, number) == (1, 0):
            held.extend(one["momentum"].clone() for one in own.state.values())
        if (step.index, number) == (1, 9):
            raise Stop

    with pytest.raises(Stop), job:
        run(job, 2, cut)
    assert held
    assert any(not torch.equal(one, one.bfloat16().float()) for one in held), "a cast would be seen"
    assert_bits([one["momentum"] for one in own.state.values()], held)


def test_round_that_is_done_again_comes_to_the_same() -> None:
    """Under groups a membership change ends the block, and a new one comes: here the strategy is driven by hand."""

    def rounds(cut_at: Sequence[str]) -> list[torch.Tensor]:
        model = make_model()
        optimizer = make_optimizer(model)
        plan = SamplePlan(0, 500, BATCH, MICROBATCH)
        state = TrainingState(model, optimizer, {}, None)
        strategy = make_strategy(DiLoCo(inner_steps=3), "fast", model, state, plan)
        strategy.begin_generation(None)
        x, y = make_data()

        def once(index: int, cut: str) -> bool:
            strategy.begin_step()
            for v in range(plan.num_virtual):
                if (cut, v) == ("inside", 7):
                    return False
                ids = plan.ids(index, v)
                loss = torch.nn.functional.cross_entropy(model(x[ids]), y[ids])
                strategy.backward(loss, torch.full_like(loss, 4.0), last=v == plan.num_virtual - 1)
                strategy.added(v, 4.0)
            if cut == "computed":
                return False
            strategy.reduce(Share(index), Told(None))
            if cut == "reduced":
                return False
            strategy.scale(BATCH)
            strategy.outer.step()
            return True

        for index in range(3):
            for cut in cut_at:
                assert not once(index, cut)
                strategy.undo()
            assert once(index, "")
        return tensors_of(model, optimizer, strategy.outer)

    want = rounds([])
    for cut_at in (["inside"], ["computed"], ["reduced"], ["inside", "inside", "reduced"]):
        assert_bits(rounds(cut_at), want)


def test_script_that_fails_in_mid_round_leaves_its_last_commit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.SNAPSHOT_DIR, str(tmp_path))
    monkeypatch.setenv(env.JOB_UID, "job")
    job = make_job()
    assert isinstance(job._committer, Committer)
    job._memory = job._committer._memory = Memory(job.state, job.plan, lambda _: None, 0)
    held: list[list[torch.Tensor]] = []

    def cut(step: Step, number: int) -> None:
        if (step.index, number) == (2, 0):
            held.append([one.clone() for one in tensors_of(job.model, job.optimizer, job._strategy.outer)])
        if (step.index, number) == (2, 9):
            raise Stop

    with pytest.raises(Stop), job:
        run(job, 4, cut)
    assert snapshot.held(tmp_path, "job")[0].state.step == 2
    again = make_job()
    again._memory = Memory(again.state, again.plan, lambda _: None, 0)
    again._memory.restore()
    with again:
        assert_bits(tensors_of(again.model, again.optimizer, again._strategy.outer), held[0])


def test_snapshot_that_is_being_copied_is_waited_for_before_the_first_inner_step() -> None:
    job = make_job()
    moments: list[int] = []
    now = [0]
    job.state.before_change = lambda: moments.append(now[0])

    def note(_step: Step, number: int) -> None:
        now[0] = number

    with job:
        run(job, 1, note)
    assert moments == [3, 12], "with the first inner step, and with the commit"


def test_undo_that_fails_leaves_a_state_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()

    def broken() -> None:
        raise RuntimeError("CUDA error")

    def cut(step: Step, number: int) -> None:
        if (step.index, number) == (1, 9):
            monkeypatch.setattr(job._strategy, "undo", broken)
            raise Stop

    with pytest.raises(Stop), job:
        run(job, 4, cut)
    assert job.state.pair is None, "nobody copies what is half a round"


def test_checkpoint_has_the_outer_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_job() as job:
        run(job, 6)
        want = [one.clone() for one in tensors_of(job.model, job.optimizer, job._strategy.outer)]
    monkeypatch.setenv(env.CHECKPOINT_DIR, str(tmp_path))
    for total in (3, 6):
        with make_job() as job:
            run(job, total)
            got = [one.clone() for one in tensors_of(job.model, job.optimizer, job._strategy.outer)]
    assert_bits(got, want)


def test_padding_only_is_no_inner_step() -> None:
    """Of three inner batches the second weighs nothing: the optimizer is stepped twice, and its decay is not applied."""
    with make_job() as job:
        for step in job.steps(1):
            with step:
                for number, (x, y) in enumerate(step.microbatches()):
                    loss = torch.nn.functional.cross_entropy(job.model(x), y)
                    if 4 <= number < 8:
                        step.backward(sum=0 * loss, weight=0)
                    else:
                        step.backward(mean=loss, weight=len(y))
                step.commit()
        steps = {int(one["step"]) for one in job.optimizer.state.values()}
    assert steps == {2}


def test_schedule_is_stepped_once_a_round() -> None:
    torch.manual_seed(1)
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rates: list[list[float]] = []
    with make_job(model=model, optimizer=optimizer, state={"schedule": schedule}) as job:
        run(job, 3, lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]), after=[schedule.step])
    assert rates == [[1.0]] * 13 + [[0.5]] * 13 + [[0.25]] * 13


def test_what_holds_is_said() -> None:
    with make_job() as job:
        run(job, 1)
        held = job.guarantees
    assert (held.whole_gradient, held.equal_state, held.same_bits_at_any_size, held.survivor_has_all) == (
        False,
        False,
        False,
        True,
    )
    assert held.optimizer_steps == 3
    with make_job(DataParallel()) as job:
        run(job, 1)
        assert (job.guarantees.whole_gradient, job.guarantees.equal_state, job.guarantees.optimizer_steps) == (
            True,
            True,
            1,
        )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        pytest.param(lambda: LocalSGD(inner_steps=0), "inner_steps of LocalSGD is 0;", id="no inner step"),
        pytest.param(lambda: DiLoCo(inner_steps=True), "inner_steps of DiLoCo is True;", id="not a number"),
        pytest.param(lambda: LocalSGD(inner_steps=2, max_norm=0.0), "max_norm of LocalSGD is 0.0;", id="a norm of nothing"),
        pytest.param(lambda: DiLoCo(inner_steps=2, outer_momentum=0.0), "Without momentum, use LocalSGD.", id="no momentum"),
        pytest.param(
            lambda: DiLoCo(inner_steps=2, outer_learning_rate=-1), "outer_learning_rate of DiLoCo is -1;", id="uphill"
        ),
        pytest.param(lambda: make_job("diloco"), "strategy is a str; it must be one of regroup.strategies", id="a name"),
        pytest.param(
            lambda: make_job(reduction="exact"), "only DataParallel() without options", id="the exact reduction"
        ),
        pytest.param(
            lambda: make_job(scaler=torch.amp.GradScaler("cpu")), "scaler is given, and strategy is DiLoCo:", id="a scaler"
        ),
        pytest.param(
            lambda: make_job(LocalSGD(inner_steps=13)), "pass global_batch=52 or more", id="more inner steps than microbatches"
        ),
        pytest.param(
            lambda: make_job(state={"outer": torch.nn.Linear(1, 1)}), 'state["outer"] is the name', id="a name that is taken"
        ),
        pytest.param(
            lambda: run(make_job(), 1, max_norm=1.0), "Pass max_norm to the strategy", id="the norm of a gradient that is gone"
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_largest_number_of_processes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.MAX_WORLD_SIZE, "4")
    make_job(LocalSGD(inner_steps=3)).__exit__(None, None, None)
    with pytest.raises(UsageError, match="up to 4 processes"):
        make_job(LocalSGD(inner_steps=4))


def test_script_that_throws_its_gradients_away_before_an_inner_step_is_told() -> None:
    job = make_job()

    def throw(_step: Step, number: int) -> None:
        if number == 2:
            job.optimizer.zero_grad()

    with pytest.raises(UsageError, match="were discarded"), job:
        run(job, 1, throw)


@pytest.mark.parametrize(
    ("kept_own_state", "want"),
    [
        pytest.param(True, ["begin_generation"], id="the rank goes on with its own state"),
        pytest.param(False, ["forget", "begin_generation"], id="the rank's state is a copy of another rank's"),
    ],
)
def test_rank_that_gets_a_copy_of_the_state_forgets_what_it_kept(kept_own_state: bool, want: list[str]) -> None:
    called: list[str] = []

    class Noting(Plain):
        def forget(self) -> None:
            called.append("forget")

        def begin_generation(self, groups: Groups | None) -> None:
            super().begin_generation(groups)
            called.append("begin_generation")

    def one(groups: Groups) -> None:
        model = make_model()
        optimizer = make_optimizer(model)
        plan = SamplePlan(0, 500, BATCH, MICROBATCH, groups.world_size)
        state = TrainingState(model, optimizer, {}, None)
        strategy = make_strategy(DiLoCo(inner_steps=3), "fast", model, state, plan)
        assert isinstance(strategy, LocalSteps)
        strategy._sum._hook = Noting()
        membership = member(groups)
        membership.kept_own_state = kept_own_state
        Committer(
            membership, strategy, state, plan, Memory(state, plan, None, groups.rank), lambda *_: None
        ).begin_generation()
        strategy.close()

    Ranks(1).run(one)
    assert called == want


def test_strategy_leaves_nothing_at_the_model() -> None:
    model = make_model()
    before = copy.deepcopy([parameter._post_accumulate_grad_hooks for parameter in model.parameters()])
    plan = SamplePlan(0, 500, BATCH, MICROBATCH)
    strategy = make_strategy(
        DiLoCo(inner_steps=2), "fast", model, TrainingState(model, make_optimizer(model), {}, None), plan
    )
    assert isinstance(strategy, LocalSteps)
    strategy.close()
    after = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    assert [hooks or None for hooks in after] == [hooks or None for hooks in before]


def test_inner_steps_do_not_wait_for_the_device() -> None:
    """The host waits once in a round, for its row, as in a step of data parallel; and parameters there are set back and stepped."""
    with FakeDevice() as device:
        model = torch.nn.Sequential(torch.nn.Linear(8, 6, device=DEVICE), torch.nn.Linear(6, 4, device=DEVICE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy = DiLoCo(inner_steps=4, max_norm=1.0)
        with make_job(strategy, model=model, optimizer=optimizer) as job:
            for step in job.steps(3):
                device.take()
                with step:
                    for x, y in step.microbatches():
                        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
                        step.backward(mean=torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
                    step.commit()
        assert device.take() == ["agreement._row: copy to the host"]
