"""Jobs of other operators, converted by `regroup convert` and run to their end under `regroup run`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.local_run import LocalRun
from regroup_cli.convert.documents import Options, convert, read_documents
from tests.trainer.test_launchers import SCRIPT, ends_well, said


def arguments_of(text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments by which `regroup run` runs the job that a text is converted to. Its variables are set here."""
    (found,) = convert(read_documents(text, "job"), Options(image="example/train:1"))
    spec: dict[str, Any] = found.document["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    for one in container.get("env") or ():
        monkeypatch.setenv(one["name"], one["value"])
    options = ["--workers", str(spec["replicas"])]
    if "processesPerWorker" in spec:
        options += ["--processes-per-worker", str(spec["processesPerWorker"])]
    return [
        *options,
        "--framework",
        spec.get("framework", "PyTorch"),
        *container["command"],
        *container.get("args", []),
    ]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_pytorchjob_runs_to_its_end(
    start: Callable[..., LocalRun], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = {
        "name": "pytorch",
        "image": "example/train:1",
        "command": [
            "sh",
            "-c",
            f"torchrun --nnodes=$PET_NNODES --node_rank=$RANK --master_addr=$MASTER_ADDR {script} --lr 1",
        ],
        "env": [{"name": "A", "value": "b"}, {"name": "WORLD_SIZE", "value": "9"}],
    }
    replicas = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}}}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "train"},
        "spec": {"nprocPerNode": "2", "pytorchReplicaSpecs": {"Master": replicas, "Worker": replicas}},
    }
    ends_well(start(*arguments_of(yaml.safe_dump(job), monkeypatch)))
    processes = sorted((one["rank"], one["world"], one["A"], *one["args"]) for one in said(script))
    assert processes == [(rank, 4, "b", "--lr", "1") for rank in range(4)]


def test_script_for_sbatch_runs_to_its_end(
    start: Callable[..., LocalRun], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:10:00
module load cuda
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export A=$SLURM_NTASKS
srun --label bash -c 'export RANK=$SLURM_PROCID; exec {sys.executable} {script} --lr 0.1'
"""
    ends_well(start(*arguments_of(text, monkeypatch)))
    processes = sorted((one["rank"], one["local"], one["world"], one["A"], *one["args"]) for one in said(script))
    assert processes == [(rank, str(rank % 2), 4, "4", "--lr", "0.1") for rank in range(4)], json.dumps(processes)
