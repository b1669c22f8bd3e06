"""A worker with fewer GPUs than processes says so before any process starts, and starts none."""

from __future__ import annotations

from pathlib import Path

import pytest

from _regroup_agent import events as ev
from _regroup_agent.gpus import has_none, lack
from regroup.protocol import wire
from regroup.protocol.state import Phase
from tests.unit.agent.drive import Drive

MIG = "MIG-3f6b9e6c-1d0c-5b8e-9a44-6c1b2f8a7d33"


@pytest.mark.parametrize(
    ("processes", "devices", "environment", "has"),
    [
        pytest.param(2, ["nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm"], {}, "", id="one for each process"),
        pytest.param(1, ["nvidia3", "nvidia5"], {}, "", id="more than processes"),
        pytest.param(4, ["null", "nvidiactl"], {}, "", id="the CPU"),
        pytest.param(2, ["nvidia0", "nvidiactl"], {}, "1 GPU", id="one for two"),
        pytest.param(4, ["nvidia0", "nvidia1"], {}, "2 GPUs", id="two for four"),
        pytest.param(2, ["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, "", id="a script that computes on the CPU"),
        pytest.param(2, ["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, "1 GPU", id="one may be used"),
        pytest.param(2, ["nvidia0"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "1 GPU", id="one is there"),
        pytest.param(2, ["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": f"{MIG},{MIG}2"}, "1 GPU", id="MIG devices"),
        pytest.param(2, ["nvidia0"], {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "", id="processes may share"),
    ],
)
def test_worker_with_fewer_gpus_than_processes_says_so(
    tmp_path: Path, processes: int, devices: list[str], environment: dict[str, str], has: str
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    said = lack({"REGROUP_POD_NAME": "digits-worker-0-0", **environment}, processes, tmp_path)
    begins = (
        f"The container of pod digits-worker-0-0 has {has}, and spec.processesPerWorker is {processes}: each process"
    )
    assert said.startswith(begins) if has else said == ""


@pytest.mark.parametrize("tier", ["Session", "Script"])
def test_worker_that_cannot_train_tells_each_operator_and_starts_nothing(tier: str) -> None:
    drive = Drive(2, session=tier == "Session", cannot_run="2 processes, 1 GPU")
    for _ in range(2):
        drive.feed(ev.Connected())
        told = [
            e.report.body for e in drive.effects if isinstance(e, ev.Send) and isinstance(e.report.body, wire.Fault)
        ]
        assert [(fault.reason, fault.detail) for fault in told] == [(wire.CANNOT_RUN, "2 processes, 1 GPU")]
        drive.command(wire.Welcome(tier))
        drive.feed(ev.Disconnected())
    drive.feed(ev.Connected())
    assert drive.core.report(wire.Changed(), drive.now_s).condition.phase in (Phase.STARTING, Phase.IDLE), (
        "it is not ready"
    )
    drive.generation(1)
    drive.wait(60)
    assert not [e for e in drive.all if isinstance(e, ev.Start)]
    drive.command(wire.Stop("Failed"))
    assert [e.code for e in drive.all if isinstance(e, ev.Exit)] == [0]


@pytest.mark.parametrize(
    ("devices", "environment", "want"),
    [
        pytest.param(["null", "shm", "nvidiactl"], {}, True, id="no device of an accelerator"),
        pytest.param(["nvidia0"], {}, False, id="NVIDIA"),
        pytest.param(["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, True, id="NVIDIA, and CUDA is told to show none"),
        pytest.param(["nvidia0"], {"CUDA_VISIBLE_DEVICES": "0"}, False, id="NVIDIA, and CUDA is told to show it"),
        pytest.param(["kfd", "dri"], {}, False, id="AMD"),
        pytest.param(["kfd"], {"CUDA_VISIBLE_DEVICES": ""}, False, id="AMD, whatever CUDA is told"),
        pytest.param(["accel0"], {}, False, id="another one"),
    ],
)
def test_worker_that_certainly_computes_on_the_cpu(
    tmp_path: Path, devices: list[str], environment: dict[str, str], want: bool
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    assert has_none(environment, tmp_path) is want
    assert not has_none(environment, tmp_path / "unreadable"), "nobody knows"
