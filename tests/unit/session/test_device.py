"""Each process has a GPU of its own, and torch's current one is that."""

from __future__ import annotations

import types
import uuid
from pathlib import Path

import pytest
import torch

import regroup
from regroup import accelerator
from regroup.errors import UsageError
from regroup.protocol import env, gpus


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


def test_processes_that_may_share_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(gpus.MULTI_RANK, "1")
    found = []
    for local_rank in range(3):
        monkeypatch.setenv(env.LOCAL_RANK, str(local_rank))
        found.append(str(regroup.device()))
    assert found == ["cuda:0", "cuda:1", "cuda:0"]


def test_gpu_is_known_by_its_machine_and_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's UUID prints without the prefix that nvidia-smi gives it; a torch of another maker has none."""
    monkeypatch.delenv(gpus.MULTI_RANK, raising=False)
    gpu = torch.device("cuda", 0)
    assert accelerator.identity(torch.device("cpu")) == ""
    properties = types.SimpleNamespace(uuid=uuid.UUID("5c1a3a52-7be1-4c32-b2a3-0d2f6b2f2a11"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert accelerator.identity(gpu) == f"{machine}/GPU-5c1a3a52-7be1-4c32-b2a3-0d2f6b2f2a11"
    monkeypatch.setenv(gpus.MULTI_RANK, "1")
    assert accelerator.identity(gpu) == ""
    monkeypatch.delenv(gpus.MULTI_RANK)
    del properties.uuid
    assert accelerator.identity(gpu) == ""


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
