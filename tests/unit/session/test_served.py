"""A session with a parameter server in one process: what it refuses, and that it is data parallel's step where it should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regroup
from regroup.errors import SampleError, UsageError
from regroup.protocol import env
from regroup.strategies import DataParallel, ParameterServer

X = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.randn(8, 4, generator=torch.Generator().manual_seed(2))).argmax(1)


def make_model(*layers: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), *layers, torch.nn.ReLU(), torch.nn.Linear(16, 4))


def train(
    strategy: Any, steps: int = 8, model: torch.nn.Module | None = None, **settings: Any
) -> tuple[regroup.Job, list[torch.Tensor]]:
    model = make_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    settings = {"global_batch": 24, "microbatch": 4, "state": {"schedule": schedule}, **settings}
    with regroup.session(model=model, optimizer=optimizer, data=(X, Y), strategy=strategy, **settings) as job:
        for step in job.steps(steps):
            with step:
                for x, y in step.microbatches():
                    step.backward(mean=torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
                step.commit(after=[schedule.step], max_norm=0.5)
    return job, [one.detach().clone() for one in model.parameters()]


def test_synchronous_version_of_a_whole_batch_is_data_parallels_step() -> None:
    reference, want = train(DataParallel())
    job, got = train(ParameterServer())
    assert all(map(torch.equal, got, want))
    assert job.guarantees.whole_gradient
    assert job.plan.digest(8) == reference.plan.digest(8)
    assert (job.step, job.shares, job.global_batch) == (8, (6,), 24)


@pytest.mark.parametrize("strategy", [ParameterServer(staleness=None), ParameterServer(shares_per_version=2)])
def test_other_versions_are_no_gradient_of_a_whole_batch(strategy: ParameterServer) -> None:
    job, _ = train(strategy)
    assert not job.guarantees.whole_gradient
    assert not job.guarantees.survivor_has_all
    assert job.guarantees.samples_once
    assert job.plan.samples(8) == 8 * 4 * (strategy.shares_per_version or 1)


def test_checkpoint_has_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job goes on with is what it would have gone on with."""
    _, want = train(ParameterServer(staleness=None), 20)
    monkeypatch.setenv(env.CHECKPOINT_DIR, str(tmp_path))
    train(ParameterServer(staleness=None), 12)
    job, got = train(ParameterServer(staleness=None), 20)
    assert all(map(torch.equal, got, want))
    assert (job.generation, job.step, job.plan.samples(20)) == (2, 20, 80)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"reduction": "exact"}, 'reduction="exact"', id="exact"),
        pytest.param({"scaler": torch.amp.GradScaler("cpu")}, "scaler", id="scaler"),
        pytest.param({"global_batch": None, "batch_per_rank": 8}, "batch_per_rank", id="a batch for each rank"),
        pytest.param({"noise_scale": True}, "noise_scale", id="noise scale"),
        pytest.param({"data": regroup.stream(lambda _: iter(()))}, "stream", id="a stream"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"data": (X, Y), "global_batch": 24, "microbatch": 4, **settings}
    with pytest.raises(UsageError, match=f"{words}.*ParameterServer"):
        regroup.session(model=model, optimizer=optimizer, strategy=ParameterServer(), **given)


def test_memory_snapshot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.SNAPSHOT_DIR, str(tmp_path))
    with pytest.raises(UsageError, match=r"memory snapshot.*ParameterServer"):
        train(ParameterServer())


def test_version_of_more_than_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shares_per_version of ParameterServer is 7, .* 6 microbatches"):
        train(ParameterServer(shares_per_version=7))


def test_running_statistics_are_refused() -> None:
    with pytest.raises(UsageError, match=r"Forward changes buffer 1\.(num|running).*LayerNorm"):
        train(ParameterServer(), model=make_model(torch.nn.BatchNorm1d(16)))
    train(ParameterServer(), model=make_model(torch.nn.BatchNorm1d(16, track_running_stats=False)))


def test_block_of_collectives_is_refused() -> None:
    with regroup.session(
        model=(model := make_model()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=(X, Y),
        global_batch=24,
        microbatch=4,
        strategy=ParameterServer(),
    ) as job:
        with pytest.raises(UsageError, match=r"eval.*ParameterServer.*is_main"):
            job.collective("eval")
        for _step in job.steps(0):
            pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ParameterServer(staleness=-1), "staleness is -1"),
        (lambda: ParameterServer(staleness=True), "staleness is True"),
        (lambda: ParameterServer(shares_per_version=0), "shares_per_version is 0"),
        (lambda: ParameterServer(computes=1), "computes is 1"),  # type: ignore[arg-type]
    ],
)
def test_strategy_is_checked_where_it_is_written(make: Callable[[], ParameterServer], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_samples_that_were_not_used_are_no_push() -> None:
    def run() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with regroup.session(
            model=model, optimizer=optimizer, data=(X, Y), global_batch=24, microbatch=4, strategy=ParameterServer()
        ) as job:
            for step in job.steps(3):
                with step:
                    step.commit()

    with pytest.raises(SampleError, match="called for 0 of this rank's 6 microbatches"):
        run()
