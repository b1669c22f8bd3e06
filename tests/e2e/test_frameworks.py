"""Frameworks as they are on pods, by the literal commands of their launchers: `kubectl get trainingjobs` shows Step and Loss.

The image has Python and torch, and nothing of ours. A volume has what the framework needs beside torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import paths
from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation
from harness.job import JobView
from tests.e2e.columns import cells
from tests.long import only_long

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
LOCKED = Path(__file__).parents[1] / "trainer"
PYTHON = "3.11"
"""Python of the image."""
EVERY = 50
OPERATOR = {"DS_BUILD_OPS": "0", "DS_BUILD_SHM_COMM": "1", "DS_ACCELERATOR": "cpu"}
"""DeepSpeed's setup builds the one operator that it loads without a GPU, since the image has no compiler."""
WITH_OPERATOR = (
    "--no-build-isolation-package",
    "deepspeed",
    "--config-settings-package",
    "deepspeed:built=shm_comm",
)
"""The setup needs torch. uv keeps what it has built by these settings, apart from a DeepSpeed without the operator."""
CAN_BUILD = bool(shutil.which("g++")) and f"{sys.version_info.major}.{sys.version_info.minor}" == PYTHON


def put_packages(directory: Path, scratch: Path, locked: str, *packages: str) -> None:
    """Install packages into a directory. The files are hard links to uv's cache where the file system allows it."""
    without_torch, constraints = scratch / "overrides.txt", scratch / "constraints.txt"
    without_torch.write_text("torch ; python_version < '3'\n")
    constraints.write_text(re.sub(r"\[.*?\]", "", (LOCKED / locked).read_text()))  # a constraint has no extras
    command = [str(paths.REPOSITORY / ".uv/bin/uv"), "pip", "install", "--quiet", "--target", str(directory)]
    command += ["--python-version", PYTHON, "--constraint", str(constraints), "--override", str(without_torch)]
    command += ["--python", sys.executable, *WITH_OPERATOR]
    subprocess.run([*command, *packages], env={**os.environ, **OPERATOR}, check=True)


def sample(name: str, namespace: str, image: str) -> dict[str, Any]:
    """Return the job of a sample's manifest, with this image and the volume of packages."""
    documents = yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text())
    job: dict[str, Any] = next(one for one in documents if one["kind"] == "DistributedTrainingJob")
    job["metadata"]["namespace"] = namespace
    pod = job["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "packages", "persistentVolumeClaim": {"claimName": "packages", "readOnly": True}})
    (trainer,) = pod["containers"]
    trainer["image"] = image
    trainer.setdefault("env", []).append({"name": "PYTHONPATH", "value": "/packages"})
    trainer["volumeMounts"].append({"name": "packages", "mountPath": "/packages"})
    trainer["resources"]["requests"] = {"cpu": "100m", "memory": "500Mi"}
    return job


def apply(
    k: Kubectl, name: str, namespace: str, image: str, *arguments: str, launcher: tuple[str, ...] = (), **spec: Any
) -> None:
    """Apply a sample's script and its job, whose command gets further arguments.

    `launcher` replaces what stands before the script in the command. `spec` has further fields. None removes one.
    """
    script = SAMPLES / f"{name}_train.py"
    metadata = {"name": f"{name}-script", "namespace": namespace}
    k.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {script.name: script.read_text()}})
    job = sample(name, namespace, image)
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    trainer["args"] += arguments
    if launcher:
        trainer["command"] = [*launcher, trainer["command"][-1]]
    job["spec"] = {name: value for name, value in {**job["spec"], **spec}.items() if value is not None}
    k.apply(job)


def containers(job: JobView) -> dict[str, int]:
    """Return how often the container of each pod was started again, by the pod's uid."""
    return {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in job.pods()}


@only_long("tests/trainer/test_torch_frameworks.py runs it under `regroup run`")
def test_trainer_as_it_is_shows_step_loss_and_progress_and_survives_a_kill(
    operator: Kubectl, train_namespace: str, torch_image: str, tmp_path: Path
) -> None:
    packages = installation.volume(operator, train_namespace, "packages")
    put_packages(packages, tmp_path, "torch-frameworks.txt", "transformers", "accelerate")
    saved = installation.volume(operator, train_namespace, "huggingface-data") / "checkpoints"
    apply(operator, "huggingface", train_namespace, torch_image)
    job = JobView(operator, train_namespace, "huggingface")

    def columns() -> dict[str, str]:
        return cells(operator.run("--namespace", train_namespace, "get", "trainingjobs", "huggingface"))

    def shows(beyond: int) -> dict[str, str] | None:
        seen = columns()
        return seen if seen["STEP"].isdecimal() and int(seen["STEP"]) > beyond and seen["ETA"] else None

    seen = wait_until(lambda: shows(0), "the Trainer's own step", timeout_s=240)
    assert (seen["STATE"], seen["READY"]) == ("Running", "2/2")
    assert seen["PROGRESS"] == f"{100 * int(seen['STEP']) // 300}%"
    assert 0 < float(seen["LOSS"]) < 4.5, "the loss of a model that knows nothing is ln(64) = 4.16"
    assert job.status()["progress"]["source"] == "Reported"

    wait_until(lambda: (saved / f"checkpoint-{EVERY}" / "trainer_state.json").exists(), "a checkpoint", timeout_s=120)
    before = containers(job)
    faults.kill_trainer(job.pod(1)["metadata"]["uid"])
    job.wait(240, "the Trainer ends", state="Succeeded")
    ended = columns()
    assert (ended["PROGRESS"], ended["RESTARTS"]) == ("100%", "1")
    assert containers(job) == before, "the kill cost a pod or a container"
    log = job.logs(job.pod(0)["metadata"]["name"])
    begins = [int(line.split()[-1]) for line in log.splitlines() if " begins at step " in line]
    assert (len(begins), begins[0]) == (2, 0), log
    assert begins[1] >= EVERY, "it went on from its checkpoint"


@only_long("tests/trainer/test_torch_frameworks.py runs them under `regroup run`")
@pytest.mark.parametrize(
    ("name", "launcher", "arguments", "spec"),
    [
        pytest.param(
            "accelerate",
            ("accelerate", "launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
            (),
            {"replicas": 1, "elasticPolicy": None},
            id="accelerate launch",
        ),
        pytest.param(
            "deepspeed",
            ("deepspeed", "--num_nodes", "2", "--num_gpus", "1"),
            ("--stage", "0"),
            {},
            id="deepspeed",
            marks=pytest.mark.skipif(
                not CAN_BUILD, reason=f"DeepSpeed's operator is built with g++ and Python {PYTHON}"
            ),
        ),
    ],
)
def test_command_of_its_documentation_goes_on_from_its_checkpoint_after_a_kill(
    operator: Kubectl, train_namespace: str, torch_image: str, tmp_path: Path,
    name: str, launcher: tuple[str, ...], arguments: tuple[str, ...], spec: dict[str, Any],
) -> None:  # fmt: skip
    """Two processes train: in one pod, as `--num_processes` and `--num_machines` say, or in two pods."""
    put_packages(installation.volume(operator, train_namespace, "packages"), tmp_path, "torch-frameworks.txt", name)
    installation.volume(operator, train_namespace, f"{name}-data")
    apply(operator, name, train_namespace, torch_image, *arguments, launcher=launcher, **spec)
    job = JobView(operator, train_namespace, name)

    def begun() -> dict[int, list[int]]:
        """Return the first steps of each process of two."""
        log = "".join(job.logs(pod["metadata"]["name"]) for pod in job.pods())
        found = re.findall(r"process (\d+) of 2 begins at step (\d+)", log)
        return {rank: [int(step) for of, step in found if int(of) == rank] for rank in (0, 1)}

    def step() -> int:
        return int((job.status().get("progress") or {}).get("step") or 0)

    wait_until(lambda: step() >= EVERY, "a checkpoint is saved", timeout_s=240)
    assert begun() == {0: [0], 1: [0]}
    before = containers(job)
    faults.kill_trainer(job.pods()[-1]["metadata"]["uid"])
    job.wait(240, "the script ends", state="Succeeded")
    assert containers(job) == before, "the kill cost a pod or a container"
    again = begun()
    assert [len(steps) for steps in again.values()] == [2, 2], again
    assert again[0] == again[1]
    assert again[0][1] >= EVERY, "it went on from its checkpoint"
    columns = cells(operator.run("--namespace", train_namespace, "get", "trainingjobs", name))
    assert (columns["STEP"], columns["RESTARTS"]) == ("300", "1")
    assert float(columns["LOSS"]) < 5, "a model that knows nothing has a loss of 20"


@only_long("tests/trainer/test_frameworks.py runs it under `regroup run`")
def test_xgboost_as_it_is_goes_on_after_a_kill_and_a_resize(
    operator: Kubectl, train_namespace: str, torch_image: str, tmp_path: Path
) -> None:
    packages = installation.volume(operator, train_namespace, "packages")
    put_packages(packages, tmp_path, "frameworks.txt", "xgboost-cpu")
    model = installation.volume(operator, train_namespace, "xgboost-data") / "model.json"
    apply(operator, "xgboost", train_namespace, torch_image, "--steps", "1200")
    view = JobView(operator, train_namespace, "xgboost")

    def step() -> int:
        return int((view.status().get("progress") or {}).get("step") or 0)

    def begun(size: int) -> list[int]:
        """Return the first steps of worker 0's processes in generations of this size."""
        log = view.logs(view.pod(0)["metadata"]["name"])
        return [int(found) for found in re.findall(rf"process 0 of {size} begins at step (\d+)", log)]

    wait_until(lambda: step() >= EVERY, "a model is saved", timeout_s=240)
    before = {pod["metadata"]["uid"] for pod in view.pods()}
    victim = view.pod(1)["metadata"]["uid"]
    (script,) = (p.inner_pid for p in faults.processes(victim) if "xgboost_train.py" in p.command and p.inner_pid != 1)
    faults.kill_inner(victim, script)
    wait_until(lambda: len(begun(2)) == 2, "both start again", timeout_s=120)
    assert begun(2)[0] == 0
    again = begun(2)[1]
    assert again >= EVERY, "it went on from its model"
    wait_until(lambda: step() > again, "it trains on", timeout_s=120)
    assert {pod["metadata"]["uid"] for pod in view.pods()} == before, "the kill cost a pod"
    view.scale(3)
    wait_until(lambda: bool(begun(3)), "three train", timeout_s=180)
    assert begun(3)[0] >= again
    view.wait(240, "it ends", state="Succeeded")
    columns = cells(operator.run("--namespace", train_namespace, "get", "trainingjobs", "xgboost"))
    assert (columns["STEP"], columns["RESTARTS"]) == ("1200", "1")
    assert len(json.loads(model.read_text())["learner"]["gradient_booster"]["model"]["trees"]) == 1200
