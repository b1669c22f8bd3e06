"""Hugging Face's Trainer and XGBoost as they are on pods: `kubectl get trainingjobs` shows Step, Loss and Progress.

The image has Python and torch, and nothing of ours. A volume has what the framework needs beside torch.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

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


def put_packages(directory: Path, scratch: Path, locked: str, *packages: str) -> None:
    """Install packages into a directory. The files are hard links to uv's cache where the file system allows it."""
    without_torch, constraints = scratch / "overrides.txt", scratch / "constraints.txt"
    without_torch.write_text("torch ; python_version < '3'\n")
    constraints.write_text(re.sub(r"\[.*?\]", "", (LOCKED / locked).read_text()))  # a constraint has no extras
    command = [str(paths.REPOSITORY / ".uv/bin/uv"), "pip", "install", "--quiet", "--target", str(directory)]
    command += ["--python-version", PYTHON, "--constraint", str(constraints), "--override", str(without_torch)]
    subprocess.run([*command, *packages], check=True)


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


def apply(k: Kubectl, name: str, namespace: str, image: str, *arguments: str) -> None:
    """Apply a sample's script and its job, whose command gets further arguments."""
    script = SAMPLES / f"{name}_train.py"
    metadata = {"name": f"{name}-script", "namespace": namespace}
    k.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {script.name: script.read_text()}})
    job = sample(name, namespace, image)
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    trainer["args"] += arguments
    k.apply(job)


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
    containers = {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in job.pods()}
    faults.kill_trainer(job.pod(1)["metadata"]["uid"])
    job.wait(240, "the Trainer ends", state="Succeeded")
    ended = columns()
    assert (ended["PROGRESS"], ended["RESTARTS"]) == ("100%", "1")
    after = {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in job.pods()}
    assert after == containers, "the kill cost a pod or a container"
    log = job.logs(job.pod(0)["metadata"]["name"])
    begins = [int(line.split()[-1]) for line in log.splitlines() if " begins at step " in line]
    assert (len(begins), begins[0]) == (2, 0), log
    assert begins[1] >= EVERY, "it went on from its checkpoint"


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
