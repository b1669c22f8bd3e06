"""Frameworks as they are on pods, by the literal commands of their launchers: `kubectl get trainingjobs` shows Step and Loss.

The image has Python and torch, and nothing of ours. A volume has what the framework needs beside torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
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
    k: Kubectl, name: str, namespace: str, image: str, *arguments: str,
    launcher: tuple[str, ...] = (), script: Path | None = None, **spec: Any,
) -> None:  # fmt: skip
    """Apply a sample's script and its job, whose command gets further arguments.

    `launcher` replaces what stands before the script in the command. `spec` has further fields. None removes one.
    """
    script = script or SAMPLES / f"{name}_train.py"
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


@dataclass(frozen=True)
class Script:
    """A job of two workers whose script prints `process R of N begins at step S`."""

    job: JobView

    def step(self) -> int:
        return int((self.job.status().get("progress") or {}).get("step") or 0)

    def begun(self, size: int) -> list[int]:
        """Return the first steps of worker 0's processes in generations of this size."""
        log = self.job.logs(self.job.pod(0)["metadata"]["name"])
        return [int(found) for found in re.findall(rf"process 0 of {size} begins at step (\d+)", log)]

    def wait_beyond(self, step: int) -> None:
        wait_until(lambda: self.step() > step, f"it is beyond step {step}", timeout_s=240)

    def goes_on(self, times: int) -> None:
        """Wait until both processes have begun so often, the last time from a checkpoint, and have saved another one."""
        wait_until(lambda: len(self.begun(2)) == times, "both start again", timeout_s=180)
        assert self.begun(2)[0] == 0
        assert self.begun(2)[-1] >= EVERY, "it went on from its checkpoint"
        self.wait_beyond(self.begun(2)[-1] + EVERY)

    def ends_with_three(self, steps: int, *, restarts: int) -> None:
        """Add a worker, and wait for the end."""
        self.job.scale(3)
        wait_until(lambda: bool(self.begun(3)), "three train", timeout_s=240)
        assert self.begun(3)[0] >= self.begun(2)[-1]
        self.job.wait(300, "it ends", state="Succeeded")
        columns = cells(self.job.kubectl.run("--namespace", self.job.namespace, "get", "trainingjobs", self.job.name))
        assert (columns["STEP"], columns["RESTARTS"]) == (str(steps), str(restarts))


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


@only_long("tests/trainer/test_torch_frameworks.py runs it under `regroup run`")
def test_accelerate_launch_goes_on_after_a_kill_a_stop_and_a_resize(
    operator: Kubectl, train_namespace: str, torch_image: str, tmp_path: Path
) -> None:
    """The command has no numbers, so the spec's count. A stopped process is found by its lines, which stand still."""
    name = "accelerate"
    put_packages(installation.volume(operator, train_namespace, "packages"), tmp_path, "torch-frameworks.txt", name)
    installation.volume(operator, train_namespace, f"{name}-data")
    launcher = ("accelerate", "launch", "--mixed_precision", "no")
    recovery = {"hangSeconds": 10}
    apply(operator, name, train_namespace, torch_image, "--steps", "900", launcher=launcher, recovery=recovery)
    run = Script(JobView(operator, train_namespace, name))
    run.wait_beyond(EVERY)
    before = containers(run.job)
    for times, number in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
        os.kill(faults.trainers(run.job.pod(1)["metadata"]["uid"])[0], number)
        run.goes_on(times)
    assert containers(run.job) == before, "a pod or a container was started again"
    assert {"ProcessExited", "Hung"} <= {one["cause"] for one in run.job.status()["incidents"]}
    run.ends_with_three(900, restarts=2)


@only_long("tests/trainer runs them under `regroup run`")
@pytest.mark.parametrize(
    ("name", "locked", "packages"),
    [
        pytest.param("xgboost", "frameworks.txt", ("xgboost-cpu",), id="XGBoost"),
        pytest.param("jax", "frameworks.txt", ("jax",), id="JAX"),
        pytest.param("tensorflow", "frameworks.txt", ("tensorflow-cpu",), id="TensorFlow"),
        pytest.param("keras", "frameworks.txt", ("tensorflow-cpu", "tf-keras"), id="Keras"),
        pytest.param("lightning", "torch-frameworks.txt", ("lightning",), id="Lightning"),
    ],
)
def test_script_as_it_is_goes_on_after_a_kill_and_a_resize(
    operator: Kubectl, train_namespace: str, torch_image: str, tmp_path: Path,
    name: str, locked: str, packages: tuple[str, ...],
) -> None:  # fmt: skip
    put_packages(installation.volume(operator, train_namespace, "packages"), tmp_path, locked, *packages)
    saved = installation.volume(operator, train_namespace, f"{name}-data")
    apply(operator, name, train_namespace, torch_image, "--steps", "1200", "--every", str(EVERY))
    run = Script(JobView(operator, train_namespace, name))
    run.wait_beyond(EVERY)
    before = {pod["metadata"]["uid"] for pod in run.job.pods()}
    victim = run.job.pod(1)["metadata"]["uid"]
    scripts = [p.pid for p in faults.processes(victim) if p.inner_pid != 1 and f"{name}_train.py" in p.command]
    (script,) = (
        faults.trainers(victim) or scripts
    )  # where a zygote has forked the process, both have the script in their command
    os.kill(script, signal.SIGKILL)
    run.goes_on(2)
    assert {pod["metadata"]["uid"] for pod in run.job.pods()} == before, "the kill cost a pod"
    run.ends_with_three(1200, restarts=1)
    if name == "xgboost":
        model = json.loads((saved / "model.json").read_text())
        assert len(model["learner"]["gradient_booster"]["model"]["trees"]) == 1200


@only_long("tests/trainer/test_horovod_elastic.py runs it under `regroup run`")
def test_survivors_of_elastic_horovod_keep_their_processes_through_a_kill_and_resizes(
    operator: Kubectl, train_namespace: str, torch_image: str
) -> None:
    name = "horovod-elastic"
    shared = installation.volume(operator, train_namespace, "packages")
    installation.volume(operator, train_namespace, f"{name}-checkpoints")
    script = SAMPLES / "horovod_elastic.py"
    arguments = ("--epochs", "40", "--pace", "0.3", "--hurry", "/packages/hurry")
    apply(operator, name, train_namespace, torch_image, *arguments, script=script)
    view = JobView(operator, train_namespace, name)

    def process(slot: int) -> list[int]:
        return faults.trainers(view.pod(slot)["metadata"]["uid"])

    status = view.wait(240, "commits", state="Running", world_size=2, step=5)
    (survivor,), victim, before = process(0), process(1), containers(view)
    faults.kill_trainer(view.pod(1)["metadata"]["uid"])
    for generation, size in ((status["membership"]["generation"] + 1, 2), (0, 3), (0, 1)):
        if size != 2:
            generation = view.status()["membership"]["generation"] + 1
            view.scale(size)
        status = view.wait(180, f"{size} train", world_size=size, adopted=True, generation=generation)
        view.wait(120, "a commit", step=status["membership"]["startStep"] + 2)
        assert process(0) == [survivor], f"the process of worker 0 was replaced with {size} workers"
        if size == 2:
            assert containers(view) == before, "the kill cost a pod or a container"
            assert process(1) != victim
    log = view.logs(view.pod(0)["metadata"]["name"])
    places = [(int(epoch), int(batch)) for epoch, batch in re.findall(r"goes on at epoch (\d+) batch (\d+)", log)]
    assert places == sorted(places), "training never goes back"
    assert len(places) >= 4, "it trains alone before the killed process is back, if that takes longer than a step"
    (shared / "hurry").touch()
    view.wait(240, "the end", state="Succeeded")
    assert cells(operator.run("--namespace", train_namespace, "get", "trainingjobs", name))["RESTARTS"] == "1"
    log = view.logs(view.pod(0)["metadata"]["name"])
    assert float(re.findall(r"rank 0 of 1 .* accuracy ([\d.]+)", log)[0]) > 0.7
