"""Literal commands of launchers on real pods. That of `torchrun --nnodes=1:3` goes through a kill and resizes in samples.py."""

from __future__ import annotations

import pytest

from cluster.kubectl import Kubectl
from harness import traced_job
from tests.long import only_long

PROGRAM = ["/regroup-samples/script.py", "--checkpoint", "/trace/script.pt", "--steps", "100"]


@only_long("tests/trainer starts each of them under regroup run")
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        pytest.param("module", ["python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"], id="module"),
        pytest.param("rendezvous", ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                                    "--rdzv-endpoint", "train-0:29500", "--rdzv-id", "7"], id="torchrun with its rendezvous"),
        pytest.param("mpirun", ["mpirun", "-np", "4", "-x", "LEVEL", "--bind-to", "none", "python"], id="mpirun"),
        pytest.param("horovodrun", ["horovodrun", "-np", "4", "-H", "a:2,b:2", "python"], id="horovodrun"),
    ],
)  # fmt: skip
def test_literal_command_starts_its_program_on_every_rank(
    operator: Kubectl, train_namespace: str, name: str, launcher: list[str]
) -> None:
    job = traced_job.start(
        operator, train_namespace, name, replicas=2, elastic=None, command=[*launcher, *PROGRAM], processesPerWorker=2
    )
    job.wait(180, f"the program of {name} ends", state="Succeeded")
    logs = "".join(job.logs(pod["metadata"]["name"]) for pod in job.pods())
    assert [f"rank {rank} finished step 100" in logs for rank in range(4)] == [True] * 4, logs
