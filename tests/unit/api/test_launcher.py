"""Counts of a launcher's command and the spec: what follows from them, and which contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.api import SpecError, parse_job, processes_per_worker
from regroup_operator.api.launcher import ignored_options
from regroup_operator.decision_log import _reduced
from regroup_operator.render import RenderSettings, worker_pod
from tests.builders.jobs import make_job, stored_job

GPUS = {"resources": {"limits": {"nvidia.com/gpu": 4}}}


def job_of(command: str, container: dict[str, Any] | None = None, **spec: Any) -> Any:
    """Return the parsed job of 2 workers, fixed unless `spec` says otherwise, whose only container has this command."""
    only = {"name": "main", "image": "example/trainer:1", "command": command.split(), **(container or {})}
    raw = stored_job(**{"replicas": 2, "template": {"spec": {"containers": [only]}}, **spec})
    if "elasticPolicy" not in spec:
        del raw["spec"]["elasticPolicy"]
    return parse_job(raw)


@pytest.mark.parametrize(
    ("command", "container", "spec", "want"),
    [
        ("torchrun t.py", {}, {}, 1),
        ("torchrun t.py", GPUS, {}, 4),
        ("torchrun t.py", GPUS, {"processesPerWorker": 2}, 2),
        ("torchrun --nproc-per-node 3 t.py", GPUS, {}, 3),
        ("torchrun --nproc-per-node gpu t.py", GPUS, {}, 4),
        ("torchrun --nproc-per-node auto t.py", GPUS, {}, 4),
        ("torchrun --nproc-per-node cpu t.py", {}, {"processesPerWorker": 5}, 5),
        ("torchrun --nproc-per-node $(N) t.py", {"env": [{"name": "N", "value": "6"}]}, {}, 6),
        ("torchrun t.py", {"env": [{"name": "PET_NPROC_PER_NODE", "value": "7"}]}, {}, 7),
        (
            "torchrun --nproc-per-node $(N) t.py",
            {"env": [{"name": "N", "valueFrom": {}}]},
            {"processesPerWorker": 2},
            2,
        ),
        ("accelerate launch --num_processes 8 --num_machines 2 t.py", {}, {}, 4),
        ("deepspeed --num_gpus 2 t.py", {}, {}, 2),
        ("mpirun -np 4 python t.py", {}, {}, 2),
        (
            "mpirun -np 4 python t.py",
            {},
            {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}, "processesPerWorker": 1},
            1,
        ),
        ("horovodrun -np 4 -H a:2,b:2 python t.py", {}, {}, 2),
        ("python t.py", GPUS, {}, 4),
    ],
)
def test_processes_of_a_worker(command: str, container: dict[str, Any], spec: dict[str, Any], want: int) -> None:
    assert processes_per_worker(job_of(command, container, **spec)) == want


@pytest.mark.parametrize("command", ["torchrun --nnodes 1:4 t.py", "torchrun --nnodes 2 t.py", "torchrun t.py"])
def test_range_of_nodes_is_the_elastic_policy(command: str) -> None:
    job = job_of(command)
    assert (job.elastic, job.min_replicas, job.max_replicas) == ((True, 1, 4) if ":" in command else (False, 2, 2))


@pytest.mark.parametrize(
    ("command", "spec", "sentence"),
    [
        ("torchrun --nproc-per-node 2 t.py", {"processesPerWorker": 4},
         "spec.processesPerWorker (4) differs from --nproc-per-node 2 in the command"),
        ("torchrun --nproc-per-node gpu t.py", {}, "needs a limit of GPUs, and the container has none"),
        ("torchrun --nproc-per-node cpu t.py", {}, "is the number of CPUs of a node"),
        ("torchrun --nnodes 3 t.py", {}, "spec.replicas (2) differs from --nnodes 3 in the command. Set spec.replicas to 3"),
        ("torchrun --nnodes 3:4 t.py", {}, "Set spec.replicas to a number from 3 to 4"),
        ("torchrun --nnodes 1:4 t.py", {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 8}},
         "spec.elasticPolicy (1 to 8) differs from --nnodes 1:4 in the command"),
        ("torchrun --nnodes 2 t.py", {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 8}}, "differs from --nnodes 2"),
        ("accelerate launch --num_machines 3 t.py", {}, "differs from --num_machines 3"),
        ("mpirun -np 3 python t.py", {}, "3 processes in the command differ from those of the job"),
        ("mpirun -np 4 python t.py", {"processesPerWorker": 1}, "(2: spec.replicas times 1 in each worker)"),
        ("mpirun -np 4 python t.py", {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}}, "Set spec.processesPerWorker"),
        ("torchrun --virtual-local-rank t.py", {}, "command of container main cannot be translated."),
    ],
)  # fmt: skip
def test_contradiction_is_refused(command: str, spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        job_of(command, **spec)
    assert sentence in str(refused.value)
    assert str(refused.value).endswith(".")


def test_pod_keeps_the_name_of_its_only_container() -> None:
    pod = worker_pod(job_of("torchrun t.py"), 0, 0, settings=RenderSettings("https://o:8443", "operator:1"))
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "main"
    assert container["command"][-3:] == ["--", "torchrun", "t.py"]
    annotations = pod["metadata"]["annotations"]
    assert annotations["kubectl.kubernetes.io/default-container"] == "main"
    assert annotations["regroup.dev/trainer-container"] == "main"


def test_trainer_is_the_container_of_that_name_where_there_are_several() -> None:
    raw = make_job()
    raw["spec"]["template"]["spec"]["containers"].insert(0, {"name": "proxy", "image": "x"})
    raw["metadata"].update(uid="u", resourceVersion="1", generation=1)
    pod = worker_pod(parse_job(raw), 0, 0, settings=RenderSettings("https://o:8443", "operator:1"))
    proxy, trainer = pod["spec"]["containers"]
    assert (proxy, trainer["command"][-2:]) == ({"name": "proxy", "image": "x"}, ["python", "train.py"])
    assert "regroup.dev/trainer-container" not in pod["metadata"]["annotations"]


def test_decision_log_keeps_the_counts_of_the_command_and_nothing_else() -> None:
    raw = job_of("torchrun --nnodes 1:4 --nproc-per-node 2 t.py --token secret").raw
    kept = _reduced(raw)
    again = parse_job(kept)
    assert (again.min_replicas, again.max_replicas, processes_per_worker(again)) == (1, 4, 2)
    assert "secret" not in str(kept)


ALL_OF_TORCHRUN = (
    "--rdzv-backend c10d --rdzv-endpoint secret:1 --rdzv-id 7 --rdzv-conf a=b --standalone --master-addr h --role r"
)


@pytest.mark.parametrize(
    ("command", "want"),
    [
        ("python t.py", ""),
        ("torchrun --nproc-per-node 2 t.py --max-restarts 3", ""),
        ("torchrun --max_restarts 3 t.py", "torchrun in the command: --max-restarts ("),
        ("deepspeed --hostfile secret t.py", "deepspeed in the command: -H ("),
        (
            f"torchrun {ALL_OF_TORCHRUN} --node-rank 0 --max-restarts 3 t.py",
            "torchrun in the command: --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf, --standalone, --master-addr, "
            "--node-rank, --max-restarts and 1 more (",
        ),
    ],
)
def test_sentence_on_ignored_options_has_no_values(command: str, want: str) -> None:
    job = job_of(command)
    said = ignored_options(job.raw["spec"])
    assert said.startswith(f"Regroup ignores options of {want}" if want else said), said
    assert bool(said) is bool(want)
    assert "secret" not in said
    assert ignored_options(_reduced(job.raw)["spec"]) == said, (
        "a plan that is run again from the decision log says the same"
    )
