"""The session in plain `python`: a world of one with the same rules, and sentences for what cannot work."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import regroup
from regroup import strategies
from regroup.checkpoint import CheckpointError
from regroup.data import DataError
from regroup.data.sources import TensorSource
from regroup.errors import SampleError, StateError, UsageError
from regroup.job import Job
from regroup.layout import Layout
from regroup.protocol import env
from regroup.step import Step
from regroup.transaction import laps
from regroup.transaction.rehearsal import Rehearsal


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.SOCKET, env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)


def make_job(**changes: Any) -> Job:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    fields: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "data": (torch.randn(64, 4), torch.randint(2, (64,))),
        "global_batch": 16,
        "microbatch": 4,
    }
    return regroup.session(**{**fields, **changes})


def train(job: Job, total: int, *, in_step: Callable[[Any], None] | None = None) -> list[float]:
    losses = []
    for step in job.steps(total):
        with step:
            for batch in step.microbatches():
                loss = torch.nn.functional.cross_entropy(job.model(batch.x), batch.y, reduction="sum")
                step.backward(sum=loss, weight=len(batch.y))
            if in_step is not None:
                in_step(step)
            step.commit()
        losses.append(step.loss)
    return losses


def run(job: Job, *, batches: int = 4, commit: bool = True, after: Sequence[Callable[[], None]] = ()) -> None:
    """One step of a script that does something wrong."""
    with job:
        for step in job.steps(1):
            with step:
                for batch, _ in zip(step.microbatches(), range(batches)):
                    step.backward(sum=job.model(batch.x).sum(), weight=4)
                if commit:
                    step.commit(after=after)


def test_training_alone_equals_the_same_loop_by_hand() -> None:
    job = make_job()
    by_hand = torch.nn.Linear(4, 2)
    by_hand.load_state_dict(job.model.state_dict())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    assert isinstance(job.source, TensorSource)
    x, y = job.source.tensors
    with job:
        train(job, 6)
    for step in range(6):
        optimizer.zero_grad()
        ids = torch.cat([job.plan.ids(step, v) for v in range(4)])
        torch.nn.functional.cross_entropy(by_hand(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for ours, theirs in zip(job.model.parameters(), by_hand.parameters()):
        torch.testing.assert_close(ours, theirs)


def test_loop_that_breaks_early_ends_the_job_there() -> None:
    with make_job() as job:
        for step in job.steps(10):
            with step:
                for batch in step.microbatches():
                    step.backward(sum=job.model(batch.x).sum(), weight=4)
                step.commit()
            if step.index == 2:
                break
    assert (job.outcome, job.step) == ("Complete", 3)


class Unsaveable:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"inner": {"value": self.value}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["inner"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        pytest.param({"state": {"sched": 3}}, StateError, ['state["sched"]', "int"], id="state without state_dict"),
        pytest.param(
            {"state": {"ema": Unsaveable({1, 2})}}, StateError, ["ema.inner.value", "set"], id="state that holds a set"
        ),
        pytest.param({"reduction": "slow"}, UsageError, ["'slow'", '"exact"'], id="unknown reduction"),
        pytest.param(
            {"global_batch": 18}, Exception, ["global_batch (18)", "microbatch (4)"], id="uneven microbatches"
        ),
        pytest.param({"data": 3}, Exception, ["data is int"], id="data without samples"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        make_job(**changes)
    assert all(word in str(caught.value) for word in words), caught.value
    assert str(caught.value).count("\n") == 0


def test_processes_that_would_each_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 4, .*`regroup run --workers N`"):
        make_job()
    monkeypatch.setenv("WORLD_SIZE", "1")
    make_job()


def test_global_batch_with_fewer_microbatches_than_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.MAX_WORLD_SIZE, "5")
    with pytest.raises(Exception, match="less than the largest number of ranks"):
        make_job()


def test_step_without_commit_is_an_error() -> None:
    with pytest.raises(UsageError, match="step 0 ended without"):
        run(make_job(), commit=False)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_commit_is_refused_when_a_microbatch_is_missing(reduction: str) -> None:
    job = make_job(reduction=reduction)
    before = [p.detach().clone() for p in job.model.parameters()]
    try:
        with pytest.raises(SampleError, match=r"Step 0 was not committed: .* for 1 of this rank's 4 microbatches"):
            run(job, batches=1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(before, job.model.parameters()))


def test_commit_is_refused_when_the_samples_are_not_the_steps() -> None:
    """Rule QUOTA: the sum of sample hashes is not the step's, though their number is."""

    def other_samples(step: Any) -> None:
        step._share.sample_hash += 1

    job = make_job()
    before = [p.detach().clone() for p in job.model.parameters()]
    with pytest.raises(SampleError, match="Step 0 was not committed: the ranks did not use its"), job:
        train(job, 1, in_step=other_samples)
    assert all(torch.equal(a, b) for a, b in zip(before, job.model.parameters()))


def test_what_a_dataset_draws_is_the_steps_own() -> None:
    """Whatever the process drew before: a redo, or another rank, sees the same augmentation."""

    class Noisy(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return torch.rand(4) + random.random() + np.random.rand(), index % 2

    seen: list[list[torch.Tensor]] = []
    for drawn in range(2):
        job = make_job(data=Noisy())
        torch.rand(drawn)
        random.seed(drawn)
        np.random.seed(drawn)
        with job:
            for step in job.steps(2):
                with step:
                    seen.append([])
                    for batch in step.microbatches():
                        seen[-1].append(batch[0])
                        step.backward(sum=job.model(batch[0]).sum(), weight=4)
                    step.commit()
    assert [torch.stack(one).tolist() for one in seen[:2]] == [torch.stack(one).tolist() for one in seen[2:]]
    assert not torch.equal(seen[0][0], seen[0][1])


def test_second_loop_is_refused() -> None:
    with make_job() as job:
        train(job, 3)
        with pytest.raises(UsageError, match=r"job\.steps\(\) was called a second time"):
            train(job, 3)


def test_collectives_are_refused_after_the_loop_and_in_a_step() -> None:
    def evaluate(job: Job) -> None:
        for attempt in job.collective("eval"):
            with attempt as team:
                team.all_reduce(torch.ones(1))

    with make_job() as job:
        evaluate(job)
        train(job, 1)
        with pytest.raises(UsageError, match=r'job\.collective\("eval"\) comes after the loop'):
            evaluate(job)
    other = make_job()
    with pytest.raises(UsageError, match=r'job\.collective\("eval"\) is inside `with step:`'), other:
        train(other, 1, in_step=lambda _step: evaluate(other))


def test_parameters_that_would_be_trained_apart_are_refused() -> None:
    model, head = torch.nn.Linear(4, 2), torch.nn.Linear(2, 3)
    both = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(UsageError, match=r"param_groups\[0\]\['params'\]\[2\], of shape \[3, 2\], is not a parameter"):
        make_job(model=model, optimizer=both)
    two = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
    two[0].weight.requires_grad_(False)
    job = make_job(model=two, optimizer=torch.optim.SGD(two.parameters(), lr=0.1))
    two[0].weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"parameter 0\.weight is True, and was False"), job:
        train(job, 1)


def test_every_error_for_the_user_is_a_regroup_error() -> None:
    assert issubclass(DataError, regroup.RegroupError)
    assert issubclass(CheckpointError, regroup.RegroupError)


def test_users_own_error_is_raised_and_a_failed_apply_leaves_no_state() -> None:
    def fails() -> None:
        raise ZeroDivisionError("mine")

    job = make_job()
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(job, after=[fails])
    assert job.state.pair is None


def test_strategy_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(UsageError, match=r"strategy is a str; it must be one of regroup\.strategies"):
        make_job(strategy="ddp")


REFUSED = [
    (lambda: strategies.DataParallel(hook="fp8"), r"DataParallel\.hook is 'fp8'; it must be \"fp16\""),
    (lambda: strategies.DataParallel(algorithm="tree"), r"DataParallel\.algorithm is 'tree'; it must be"),
    (lambda: strategies.DataParallel("bf16", "ring"), r"algorithm is \"ring\" and hook is 'bf16'"),
    (lambda: strategies.PowerSGD(rank=0), r"PowerSGD\.rank is 0; it must be a whole number of at least 1"),
    (lambda: strategies.PowerSGD(start_step=1.5), r"PowerSGD\.start_step is 1\.5"),  # type: ignore[arg-type]
    (lambda: strategies.PowerSGD(min_compression=0.5), r"PowerSGD\.min_compression is 0\.5"),
    (
        lambda: make_job(reduction="exact", strategy=strategies.DataParallel(hook="bf16")),
        r"reduction is \"exact\" and strategy is DataParallel\(hook='bf16'",
    ),
    (
        lambda: make_job(
            scaler=torch.amp.GradScaler("cpu"), strategy=strategies.DataParallel(hook=strategies.PowerSGD())
        ),
        "PowerSGD hook, and scaler is set",
    ),
    *(
        (lambda fields=fields: make_job(noise_scale=True, **fields), f"noise_scale=True does not work with {what}")
        for what, fields in (
            ('reduction="exact"', {"reduction": "exact"}),
            ("strategy LocalSGD", {"strategy": strategies.LocalSGD(inner_steps=2)}),
            ("a PowerSGD hook", {"strategy": strategies.DataParallel(hook=strategies.PowerSGD())}),
            ("scaler", {"scaler": torch.amp.GradScaler("cpu")}),
        )
    ),
    (lambda: make_job(noise_scale="yes"), "noise_scale is 'yes'; it must be True or False"),
    (lambda: strategies.DataParallel(uneven=1), r"DataParallel\.uneven is 1; it must be True or False"),  # type: ignore[arg-type]
    (
        lambda: make_job(reduction="exact", strategy=strategies.DataParallel(uneven=True)),
        r"uneven=True.*without options",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_strategy_with_options_that_cannot_work_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make()


BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"batch_per_rank": 8}, r"global_batch is 16 and batch_per_rank is 8; exactly one"),
    ({"global_batch": None}, r"global_batch is None and batch_per_rank is None; exactly one"),
    ({"global_batch": None, "batch_per_rank": 6}, r"batch_per_rank \(6\) is not a multiple of microbatch \(4\)"),
    ({"global_batch": None, "batch_per_rank": 0}, r"batch_per_rank is 0; it must be a whole number"),
    ({"global_batch": None, "batch_per_rank": 8, "reduction": "exact"}, r"have no equal bits"),
    (
        {"global_batch": None, "batch_per_rank": 8, "strategy": strategies.DataParallel(uneven=True)},
        r"batch_per_rank is set, which gives each process the same work",
    ),
    ({"rate_scaling": strategies.RateScaling(16)}, r"rate_scaling is set, and global_batch never changes"),
]


@pytest.mark.parametrize(("fields", "sentence"), BATCHES)
def test_batch_that_cannot_be_chosen_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make_job(**fields)


def test_batch_per_rank_is_that_of_one_rank_in_plain_python_and_scales_the_rate() -> None:
    def run(**fields: Any) -> tuple[list[float], list[float]]:
        job, losses, rates = make_job(**fields), [], []
        with job:
            for step in job.steps(6):
                with step:
                    for batch in step.microbatches():
                        loss = torch.nn.functional.cross_entropy(job.model(batch.x), batch.y)
                        step.backward(mean=loss, weight=len(batch.x))
                    step.commit()
                losses.append(step.loss)
                rates.append(step.learning_rates[0])
        assert (job.optimizer.param_groups[0]["lr"], job.global_batch) == (0.1, 16)
        return losses, rates

    def per_rank(**fields: Any) -> tuple[list[float], list[float]]:
        return run(global_batch=None, batch_per_rank=16, **fields)

    assert per_rank() == run()
    _, rates = per_rank(rate_scaling=strategies.RateScaling(8, "linear", 2))
    assert rates == pytest.approx([0.1, 0.15, 0.2, 0.2, 0.2, 0.2])


def test_guarantees_say_what_only_a_rank_has() -> None:
    assert make_job().guarantees.lost_with_a_rank == ""
    job = make_job(strategy=strategies.DataParallel(hook=strategies.PowerSGD()))
    assert "error feedback" in job.guarantees.lost_with_a_rank


def test_strategy_by_default_is_data_parallel() -> None:
    default, named = make_job(), make_job(strategy=strategies.DataParallel())
    with default, named:
        assert train(default, 2) == train(named, 2)
        assert type(default._strategy) is type(named._strategy)


def test_changing_buffers_are_refused_in_exact_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    job = make_job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), reduction="exact")
    try:
        with pytest.raises(UsageError, match=r"refuses buffers that change in forward \(1\.running_mean\)"), job:
            train(job, 1)
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_replaced_by_the_user_are_still_reduced() -> None:
    straight, replaced = make_job(), make_job()
    with straight:
        train(straight, 2)

    def replace(_step: object) -> None:
        for parameter in replaced.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()

    with replaced:
        train(replaced, 2, in_step=replace)
    for a, b in zip(straight.model.parameters(), replaced.model.parameters()):
        assert torch.equal(a, b)


def test_plain_python_continues_from_its_checkpoint_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_job() as straight:
        train(straight, 8)
    monkeypatch.setenv(env.CHECKPOINT_DIR, str(tmp_path))
    with make_job() as first:
        train(first, 5)
    with make_job() as second:
        losses = train(second, 8)
    assert len(losses) == 3
    for a, b in zip(straight.model.parameters(), second.model.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first_measures", [False, True])
def test_checkpoint_is_continued_with_and_without_the_noise_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_measures: bool
) -> None:
    monkeypatch.setenv(env.CHECKPOINT_DIR, str(tmp_path))
    with make_job(noise_scale=first_measures) as first:
        train(first, 2)
    with make_job(noise_scale=not first_measures) as second:
        assert len(train(second, 5)) == 3


def test_noise_scale_is_not_known_with_one_process() -> None:
    with make_job(noise_scale=True) as job:
        for step in job.steps(2):
            with step:
                assert step.noise_scale is None
                for batch in step.microbatches():
                    step.backward(mean=torch.nn.functional.cross_entropy(job.model(batch.x), batch.y), weight=4)
                step.commit()
            assert step.noise_scale is None


def one_step(job: Job, backward: Callable[[Any, Any], None], **commit: Any) -> Any:
    """Train one step; `backward(step, batch)` is the script's part for a microbatch. Returns the step."""
    with job:
        for step in job.steps(1):
            with step:
                for batch in step.microbatches():
                    backward(step, batch)
                step.commit(**commit)
    return step


def test_mean_and_its_weight_are_the_sum() -> None:
    """Weights differ, as tokens do: the mean over microbatches is by weight."""
    jobs = [make_job() for _ in range(2)]

    def loss(job: Job, batch: Any, reduction: str) -> tuple[torch.Tensor, int]:
        n = int(batch.y.sum()) + 1
        x, y = batch.x[:n], batch.y[:n]
        return torch.nn.functional.cross_entropy(job.model(x), y, reduction=reduction), len(y)

    def by_sum(step: Any, batch: Any) -> None:
        value, n = loss(jobs[0], batch, "sum")
        step.backward(sum=value, weight=n)

    def by_mean(step: Any, batch: Any) -> None:
        value, n = loss(jobs[1], batch, "mean")
        step.backward(mean=value, weight=torch.tensor(n))

    first, second = one_step(jobs[0], by_sum), one_step(jobs[1], by_mean)
    assert first.loss == pytest.approx(second.loss)
    for got, want in zip(jobs[1].model.parameters(), jobs[0].model.parameters()):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_weight_is_the_number_of_samples_by_default(reduction: str) -> None:
    jobs = [make_job() for _ in range(2)]

    def backward(job: Job, **weight: Any) -> Callable[[Any, Any], None]:
        def of(step: Any, batch: Any) -> None:
            loss = torch.nn.functional.cross_entropy(job.model(batch.x), batch.y, reduction=reduction)
            step.backward(**{reduction: loss}, **weight)

        return of

    default, given = one_step(jobs[0], backward(jobs[0])), one_step(jobs[1], backward(jobs[1], weight=4))
    assert default.loss == given.loss > 0
    assert all(torch.equal(a, b) for a, b in zip(jobs[0].model.parameters(), jobs[1].model.parameters()))


def test_weight_must_be_given_where_ranks_have_parts_of_a_sequence() -> None:
    job = make_job()
    job.plan = replace(job.plan, layout=Layout.of({"context": 2}))
    step = Step(0, Rehearsal(job._strategy, job.state, job.plan), job._feed, job.model)
    with pytest.raises(UsageError, match=r"weight of step.backward\(\) is not given, .*context=2.* Pass weight=n"):
        step._weight(None, is_late=True)
    assert step._weight(3, is_late=True) == 3.0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        pytest.param(lambda step, loss: step.backward(loss, weight=4), "takes the loss as sum=loss", id="by position"),
        pytest.param(lambda step, loss: step.backward(sum=loss, mean=loss, weight=4), "as sum=loss", id="both"),
        pytest.param(lambda step, _: step.backward(weight=4), "takes the loss as sum=loss", id="no loss"),
        pytest.param(
            lambda step, loss: step.backward(sum=loss, weight=-1), "weight of step.backward", id="a weight below 0"
        ),
        pytest.param(
            lambda step, loss: step.backward(sum=loss, weight=float("nan")), "is nan", id="a weight that is none"
        ),
        pytest.param(
            lambda step, loss: step.backward(sum=loss.detach(), weight=4), "depends on no parameter", id="detached"
        ),
        pytest.param(
            lambda step, loss: step.backward(sum=loss.expand(4), weight=4), r"of shape \[4\]", id="not reduced"
        ),
        pytest.param(lambda step, loss: step.backward(sum=loss.item(), weight=4), "is a float", id="a number"),
    ],
)
def test_loss_that_could_be_mistaken_is_refused(call: Callable[[Any, Any], None], sentence: str) -> None:
    job = make_job()
    with pytest.raises(UsageError, match=sentence):
        one_step(job, lambda step, batch: call(step, job.model(batch.x).sum()))


def by_sum(job: Job) -> Callable[[Any, Any], None]:
    return lambda step, batch: step.backward(sum=job.model(batch.x).pow(2).sum(), weight=len(batch.y))


def test_step_knows_its_norm_learning_rate_and_samples() -> None:
    job = make_job()
    samples: list[int] = []

    def backward(step: Any, batch: Any) -> None:
        assert torch.equal(batch.x, job.source.fetch(step.ids).x)
        samples.extend(step.ids.tolist())
        by_sum(job)(step, batch)

    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
    job.state.extra["schedule"] = schedule
    step = one_step(job, backward, after=[schedule.step], max_norm=1e-3)
    assert step.norm > 1e-3
    assert step.learning_rates == (0.1,)
    assert not step.skipped
    assert sorted(samples) == sorted(torch.cat([job.plan.ids(0, v) for v in range(4)]).tolist())


def test_several_optimizers_are_one() -> None:
    def make(split: bool) -> Job:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 2)
        whole = torch.optim.Adam(model.parameters(), lr=0.1)
        parts = [torch.optim.Adam([parameter], lr=0.1) for parameter in model.parameters()]
        return make_job(model=model, optimizer=parts if split else whole)

    jobs = [make(split) for split in (True, False)]
    steps = [one_step(job, by_sum(job)) for job in jobs]
    for got, want in zip(jobs[0].model.parameters(), jobs[1].model.parameters()):
        assert torch.equal(got, want)
    assert steps[0].learning_rates == (0.1, 0.1)
    other = make(True)
    other.state.load(jobs[0].state.tree())
    assert str(other.state.optimizer.state_dict()) == str(jobs[0].state.optimizer.state_dict())


def test_gradient_is_unscaled_before_it_is_clipped() -> None:
    def make(scaler: Any) -> Job:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 2)
        return make_job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)

    plain, scaled = make(None), make(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    steps = [one_step(job, by_sum(job), max_norm=0.5) for job in (plain, scaled)]
    assert steps[1].norm == pytest.approx(steps[0].norm)
    assert steps[1].loss == pytest.approx(steps[0].loss)
    for got, want in zip(scaled.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(got, want)


def test_overflow_is_a_committed_step_that_applies_nothing() -> None:
    model = torch.nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    job = make_job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    scales: list[float] = []
    with job:
        for step in job.steps(2):
            with step:
                for batch in step.microbatches():
                    factor = float("inf") if step.index == 0 and step.virtual_worker == 2 else 1.0
                    step.backward(sum=(model(batch.x) * factor).sum(), weight=len(batch.y))
                step.commit(max_norm=1e6)
            assert step.skipped == (step.index == 0)
            same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
            assert same == (step.index == 0)
            scales.append(scaler.get_scale())
    assert scales == [2.0**9, 2.0**9]
    assert job.state.tree()["state"]["scaler"]["scale"] == 2.0**9
    want = torch.cat([job.source.fetch(job.plan.ids(1, v)).x for v in range(4)]).mean(0)
    torch.testing.assert_close(before[0] - model.weight.detach(), 0.1 * want.expand(2, 4))


@pytest.mark.parametrize(
    ("commit", "sentence"),
    [
        pytest.param({"after": print}, r"after of step.commit\(\) is a list", id="a hook without a list"),
        pytest.param({"max_norm": -1.0}, r"max_norm .* is -1.0; it must be a number above 0", id="a norm below 0"),
        pytest.param({"max_norm": "1"}, "must be a number above 0", id="a norm as text"),
    ],
)
def test_arguments_of_commit_are_checked(commit: dict[str, Any], sentence: str) -> None:
    job = make_job()
    with pytest.raises(UsageError, match=sentence):
        one_step(job, by_sum(job), **commit)


def test_hook_sees_the_steps_loss() -> None:
    job = make_job()
    seen: list[float] = []
    with job:
        for step in job.steps(1):
            with step:
                for batch in step.microbatches():
                    by_sum(job)(step, batch)
                step.commit(after=[lambda: seen.append(step.loss)])  # noqa: B023 - called at once
            assert seen == [step.loss]
            assert seen[0] > 0


def test_sum_of_weight_0_counts() -> None:
    """An auxiliary loss over padding: no mean of nothing, but a sum."""
    job = make_job()
    weight: Any = job.model.weight
    before = weight.detach().clone()

    def backward(step: Any, batch: Any) -> None:
        step.backward(sum=job.model(batch.x).sum(), weight=0 if step.virtual_worker else 4)

    step = one_step(job, backward)
    want = torch.cat([job.source.fetch(job.plan.ids(0, v)).x for v in range(4)]).sum(0) / 4
    torch.testing.assert_close(before - weight.detach(), 0.1 * want.expand(2, 4))
    assert step.committed


def test_no_hooks_can_be_said_as_none() -> None:
    job = make_job()
    assert one_step(job, by_sum(job), after=None, before=None).committed


def test_step_without_its_block_is_refused() -> None:
    """Its gradients would be those of all steps before, too."""
    job = make_job()
    with job:
        step = next(job.steps(1))
        with pytest.raises(UsageError, match=r"outside its block. Write `with step:`"):
            next(step.microbatches())
        job.total = None  # or the block's end would go on with the loop


@pytest.mark.parametrize("total", [10.0, -1, None, True])
def test_number_of_steps_is_checked(total: Any) -> None:
    job = make_job()
    with job, pytest.raises(UsageError, match="it takes the number of steps"):
        job.steps(total)


def test_zero_grad_between_microbatches_is_refused() -> None:
    job = make_job()

    def backward(step: Any, batch: Any) -> None:
        job.optimizer.zero_grad()
        by_sum(job)(step, batch)

    with pytest.raises(UsageError, match="discarded between two microbatches"):
        one_step(job, backward)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_microbatch_of_padding_alone_adds_nothing(reduction: str) -> None:
    """A mean over nothing is no number."""
    jobs = [make_job(reduction=reduction) for _ in range(2)]
    torch.use_deterministic_algorithms(False)
    empty = jobs[0].plan.share(0, 1)[-1]

    def padded(step: Any, batch: Any) -> None:
        loss = torch.nn.functional.cross_entropy(jobs[0].model(batch.x), batch.y)
        if step.virtual_worker == empty:
            step.backward(mean=loss * float("nan"), weight=0)
        else:
            step.backward(mean=loss, weight=len(batch.y))

    def without(step: Any, batch: Any) -> None:
        loss = torch.nn.functional.cross_entropy(jobs[1].model(batch.x), batch.y, reduction="sum")
        step.backward(
            sum=loss * (step.virtual_worker != empty), weight=0 if step.virtual_worker == empty else len(batch.y)
        )

    steps = [one_step(jobs[0], padded), one_step(jobs[1], without)]
    assert steps[0].loss == pytest.approx(steps[1].loss)
    for got, want in zip(jobs[0].model.parameters(), jobs[1].model.parameters()):
        torch.testing.assert_close(got, want)


def test_overflow_for_one_optimizer_stops_all_of_them() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    job = make_job(model=model, optimizer=optimizers, scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]

    def backward(step: Any, batch: Any) -> None:
        factor = float("inf") if step.index == 0 else 1.0
        # The third part is used by nobody: its optimizer has nothing to unscale.
        step.backward(sum=model[0](batch.x).sum() + (model[1](batch.x) * factor).sum(), weight=len(batch.y))

    with job:
        for step in job.steps(2):
            with step:
                for batch in step.microbatches():
                    backward(step, batch)
                step.commit()
            same = [torch.equal(p, old) for p, old in zip(model.parameters(), before)]
            assert (step.skipped, same) == (
                (True, [True] * 6) if step.index == 0 else (False, [False] * 4 + [True] * 2)
            )


def test_exception_in_a_block_leaves_the_buffers_of_the_last_commit() -> None:
    """What a process leaves behind as it ends must be the state that its name says."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    job = make_job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    kept: dict[str, torch.Tensor] = {}

    def train_and_raise() -> None:
        for step in job.steps(2):
            with step:
                for batch in step.microbatches():
                    loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum")
                    step.backward(sum=loss, weight=len(batch.y))
                    if step.index == 1:
                        raise OSError("no answer")
                step.commit()
            kept.update((name, buffer.clone()) for name, buffer in model.named_buffers())

    with pytest.raises(OSError, match="no answer"), job:
        train_and_raise()
    assert kept
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())


def test_time_of_a_step_is_divided_into_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the script's own parts move on: nothing else takes time."""
    now_s = [0.0]
    monkeypatch.setattr(laps, "perf_counter", lambda: now_s[0])

    def takes(seconds: float) -> Callable[[], None]:
        def run() -> None:
            now_s[0] += seconds

        return run

    class Slow:
        def __len__(self) -> int:
            return 64

        def fetch(self, ids: torch.Tensor) -> Any:
            takes(1.0)()
            return torch.ones(len(ids), 4)

    job = make_job(data=Slow())
    seen = []
    for step in job.steps(2):
        takes(100.0)()
        with step:
            assert step.times is None
            for batch in step.microbatches():
                loss = job.model(batch).sum()
                takes(10.0)()
                step.backward(sum=loss, weight=len(batch))
            step.commit(before=[takes(1000.0)], after=[takes(2000.0)])
        seen.append(step.times)
        takes(500.0)()
    assert seen[0] == (4.0, 40.0, 0.0, 0.0, 0.0, 0.0, 3000.0, 100.0)
    assert seen[1] == (4.0, 40.0, 0.0, 0.0, 0.0, 0.0, 3000.0, 600.0)


def test_gradients_that_were_applied_are_there_until_the_next_step() -> None:
    """What histograms of gradients are made of."""
    job = make_job()
    for step in job.steps(1):
        with step:
            for batch in step.microbatches():
                loss = torch.nn.functional.cross_entropy(job.model(batch.x), batch.y)
                step.backward(mean=loss, weight=len(batch.y))
            before = [parameter.detach().clone() for parameter in job.model.parameters()]
            step.commit(max_norm=0.01)
        for old, parameter in zip(before, job.model.parameters()):
            assert parameter.grad is not None
            assert torch.allclose(old - parameter, 0.1 * parameter.grad, atol=1e-6)


def loss_of(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return torch.nn.functional.cross_entropy(output, batch.y, reduction="sum"), len(batch.y)


@pytest.mark.parametrize("share", [None, range(0)], ids=["a share", "no share, as in a hand-over of many ranks"])
def test_step_is_run_once(monkeypatch: pytest.MonkeyPatch, share: range | None) -> None:
    def run_twice() -> None:
        with make_job() as job:
            for step in job.steps(1):
                with step:
                    if share is not None:
                        monkeypatch.setattr(step._transaction, "share", lambda: share)
                    step.run(loss_of, inputs=lambda batch: batch.x)
                    step.run(loss_of, inputs=lambda batch: batch.x)

    with pytest.raises(UsageError, match=r"step\.run\(\) was called twice in step 0"):
        run_twice()


def test_step_is_not_run_after_a_loop_over_its_microbatches() -> None:
    def loop_and_run() -> None:
        with make_job() as job:
            for step in job.steps(1):
                with step:
                    for batch in step.microbatches():
                        step.backward(sum=job.model(batch.x).sum(), weight=4)
                    step.run(loss_of, inputs=lambda batch: batch.x)

    with pytest.raises(UsageError, match=r"step\.run\(\) was called after step\.backward\(\) in step 0"):
        loop_and_run()


@pytest.mark.parametrize("part", ["weight", "running_mean"])
def test_model_without_values_is_refused(part: str) -> None:
    model = torch.nn.BatchNorm1d(4)
    if part == "weight":
        model.weight = torch.nn.Parameter(torch.empty(4, device="meta"))
    else:
        model.running_mean = torch.empty(4, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        UsageError, match=rf"{part} of the model is on the meta device.*model\.to_empty\(device="
    ) as caught:
        make_job(model=model, optimizer=optimizer)
    assert "\n" not in str(caught.value)


class Graph(torch.nn.Module):
    """A layer with a constant, which is a dense tensor in its state_dict if `is_hidden`."""

    def __init__(self, constant: torch.Tensor, *, kind: str, is_hidden: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        if kind == "Parameter":
            self.graph = torch.nn.Parameter(constant, requires_grad=False)
        else:
            self.register_buffer("graph", constant, persistent=kind == "Buffer")
        if is_hidden:
            self._register_state_dict_hook(_make_dense)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.layer(x))


def _make_dense(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state[f"{prefix}graph"] = state[f"{prefix}graph"].to_dense()


_CSR = pytest.mark.filterwarnings("ignore:Sparse CSR")


@pytest.mark.parametrize("kind", ["Parameter", "Buffer"])
@pytest.mark.parametrize(
    ("make", "is_hidden", "words"),
    [
        pytest.param(lambda: torch.eye(4).to_sparse(), False, "is a torch.sparse_coo tensor", id="sparse"),
        pytest.param(lambda: torch.eye(4).to_sparse_csr(), False, "is a torch.sparse_csr", id="csr", marks=_CSR),
        pytest.param(lambda: torch.eye(4).to_sparse(), True, "is a torch.sparse_coo tensor", id="dense if saved"),
        pytest.param(lambda: torch.zeros(1).expand(4), False, "has strides [0] for shape [4]", id="expanded"),
    ],
)
def test_tensor_that_no_rank_can_copy_is_refused(
    kind: str, make: Callable[[], torch.Tensor], is_hidden: bool, words: str
) -> None:
    model = Graph(make(), kind=kind, is_hidden=is_hidden)
    with pytest.raises(UsageError) as caught:
        make_job(model=model, optimizer=torch.optim.SGD(model.layer.parameters(), lr=0.1))
    assert str(caught.value).startswith(f"{kind} graph of the model {words}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_sparse_buffer_that_is_not_persistent_is_left_alone(reduction: str) -> None:
    model = Graph(torch.eye(4).to_sparse(), kind="not persistent")
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    with make_job(model=model, optimizer=optimizer, reduction=reduction, rehearse=True) as job:
        assert len(train(job, 2)) == 2


@pytest.mark.parametrize("strategy", [None, strategies.ParameterServer()], ids=["whole batch", "parameter server"])
@pytest.mark.parametrize(
    ("make", "asked", "shuffles"),
    [
        pytest.param(lambda rows: DataLoader(rows, batch_size=4), None, False, id="a loader"),
        pytest.param(
            lambda rows: DataLoader(rows, batch_size=4, shuffle=True), None, True, id="a loader that shuffles"
        ),
        pytest.param(lambda rows: (rows,), None, True, id="tensors"),
        pytest.param(lambda rows: (rows,), True, True, id="tensors, shuffle=True"),
        pytest.param(lambda rows: (rows,), False, False, id="tensors, shuffle=False"),
        pytest.param(list, np.False_, False, id="a dataset, shuffle=False of numpy"),
        pytest.param(lambda rows: TensorSource((rows,)), False, False, id="an object with fetch, shuffle=False"),
    ],
)
def test_script_says_whether_epochs_are_shuffled(
    make: Callable[[torch.Tensor], Any], asked: Any, shuffles: bool, strategy: Any
) -> None:
    model = torch.nn.Linear(1, 1)
    rows = torch.arange(16.0).unsqueeze(1)
    seen: list[float] = []
    with regroup.session(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=make(rows),
        global_batch=8,
        microbatch=4,
        shuffle=asked,
        strategy=strategy,
    ) as job:
        for step in job.steps(4):
            with step:
                for batch in step.microbatches():
                    x = batch[0] if isinstance(batch, tuple) else batch
                    seen += x.flatten().tolist()
                    step.backward(sum=model(x).sum(), weight=len(x))
                step.commit()
    epochs = [seen[at : at + 16] for at in (0, 16)]
    in_order = rows.flatten().tolist()
    assert [sorted(epoch) for epoch in epochs] == [in_order] * 2, "each sample once an epoch"
    assert [epoch == in_order for epoch in epochs] == [not shuffles] * 2


@pytest.mark.parametrize(
    ("data", "asked", "sentence"),
    [
        pytest.param((torch.ones(8, 4),), "no", r"shuffle is 'no'; it must be True or False\.", id="no truth value"),
        pytest.param(
            DataLoader([torch.ones(4)] * 8, batch_size=4, shuffle=True),  # type: ignore[arg-type]
            False,
            r"shuffle is False and data is a DataLoader, whose own shuffle \(True\) counts",
            id="a loader has its own",
        ),
        pytest.param(regroup.stream(lambda _: iter([torch.ones(4)] * 100)), True, "data is a stream", id="a stream"),
    ],
)
def test_shuffle_that_would_be_ignored_is_refused(data: Any, asked: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make_job(data=data, shuffle=asked)
