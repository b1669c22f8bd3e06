"""Each process has a GPU of its own, and torch's current one is that."""

from __future__ import annotations

import pytest
import torch

import regroup
from regroup import accelerator
from regroup.errors import UsageError
from regroup.protocol import env


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "want"),
    [
        pytest.param(0, 0, "cpu", id="no GPU"),
        pytest.param(3, 0, "cpu", id="no GPU, several processes"),
        pytest.param(0, 1, "cuda:0", id="one of each"),
        pytest.param(1, 4, "cuda:1", id="fewer processes than GPUs"),
        pytest.param(2, 2, "LOCAL_RANK is 2, and this worker sees 2 GPUs: ", id="fewer GPUs than processes"),
        pytest.param(1, 1, "LOCAL_RANK is 1, and this worker sees 1 GPU: ", id="one GPU for two processes"),
    ],
)
def test_device_of_a_process(local_rank: int, num_gpus: int, want: str) -> None:
    if want.startswith("LOCAL_RANK"):
        with pytest.raises(UsageError, match=want):
            accelerator.choose(local_rank, num_gpus)
    else:
        assert str(accelerator.choose(local_rank, num_gpus)) == want


@pytest.mark.parametrize("said", ["-1", "abc", "1.5"])
def test_local_rank_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv(env.LOCAL_RANK, said)
    with pytest.raises(UsageError, match=f"LOCAL_RANK is '{said}'; it must be a whole number"):
        regroup.device()


def test_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv(env.LOCAL_RANK, "2")
    assert regroup.device() == torch.device("cuda", 2)
    assert current == [torch.device("cuda", 2)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert regroup.device() == torch.device("cpu")
    assert len(current) == 1


def test_job_says_where_its_model_is() -> None:
    model = torch.nn.Linear(2, 1)
    data = (torch.zeros(4, 2), torch.zeros(4, 1))
    with regroup.session(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data=data, global_batch=4, microbatch=4
    ) as job:
        assert job.device == torch.device("cpu")
