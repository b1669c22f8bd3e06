"""Gradients lie in memory as their parameters do: an optimizer may go through both side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regroup
from regroup.errors import UsageError
from regroup.parallel.gradients import Gradients, is_dense
from regroup.state.training import TrainingState


def conv(dims: int) -> torch.nn.Module:
    """Return a small convolutional model whose weights are channels_last."""
    torch.manual_seed(0)
    if dims == 2:
        body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 16, 2)
        )
        return body.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    body = torch.nn.Sequential(
        torch.nn.Conv3d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 64, 2)
    )
    return body.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "plain"])
@pytest.mark.parametrize("strategy", [None, "exact", "powersgd"])
def test_session_trains_channels_last_as_a_plain_loop_does(
    dims: int, kind: dict[str, Any], strategy: str | None
) -> None:
    x = torch.randn(32, 3, *[6] * dims, generator=torch.Generator().manual_seed(1))
    y = (x.flatten(1).sum(1) > 0).long()
    plain, ours = conv(dims), conv(dims)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, **kind)
    for _ in range(12):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    hook = regroup.strategies.PowerSGD(rank=1, min_compression=1.0) if strategy == "powersgd" else None
    session = regroup.session(
        model=ours,
        optimizer=torch.optim.Adam(ours.parameters(), lr=0.01, **kind),
        data=(x, y),
        global_batch=32,
        microbatch=32,
        reduction="exact" if strategy == "exact" else "fast",
        strategy=None if hook is None else regroup.strategies.DataParallel(hook=hook),
    )
    with session as job:
        for step in job.steps(12):
            with step:
                for batch in step.microbatches():
                    step.backward(mean=torch.nn.functional.cross_entropy(ours(batch.x), batch.y), weight=len(batch.y))
                step.commit()
    for mine, theirs in zip(ours.parameters(), plain.parameters()):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-4)


def test_gradient_has_its_parameters_strides() -> None:
    model = conv(2)
    gradients = Gradients(model)
    gradients.begin()
    assert [p.grad is not None and p.grad.stride() for p in model.parameters()] == [
        p.stride() for p in model.parameters()
    ]


def test_parameter_with_gaps_is_refused() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(UsageError, match=r"Parameter weight has strides \[6, 2\] for shape \[4, 3\]"):
        Gradients(model)


def test_parameter_that_is_laid_out_anew_after_the_session_began_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3))
    gradients = Gradients(model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"0.weight has strides \[27, 1, 9, 3\], and had \[27, 9, 3, 1\]"):
        gradients.begin()


def test_strides_are_compared_where_a_dimension_has_several_elements() -> None:
    def state(model: torch.nn.Module) -> int:
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {}).strides()

    def last(model: torch.nn.Module) -> torch.nn.Module:
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def block(kernel: int, channels: int) -> torch.nn.Module:
        return torch.nn.Conv2d(channels, 8, kernel)

    assert state(last(block(3, 4))) != state(block(3, 4))
    assert state(last(block(3, 1))) == state(block(3, 1)), "it is the same order"
    assert state(last(block(1, 4))) == state(block(1, 4))


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(1, 3)[:, :1], True),
        (torch.zeros(3).expand(2, 3), False),
        (torch.zeros(4, 6)[:, ::2], False),
        (torch.zeros(0, 3), True),
        (torch.zeros(()), True),
    ],
)
def test_is_dense(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense


def test_synchronised_batch_norm_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    with pytest.raises(UsageError, match=r"1 is a SyncBatchNorm.*GroupNorm"):
        regroup.session(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=(torch.zeros(4, 2), torch.zeros(4)),
            global_batch=4,
            microbatch=4,
        )
