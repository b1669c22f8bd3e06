"""Hugging Face's Trainer as it is on pods: `kubectl get trainingjobs` shows its Step, Loss and Progress.

The image has Python and torch, and nothing of ours. A volume has what the Trainer needs beside torch.
"""

from __future__ import annotations

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
LOCKED = Path(__file__).parents[1] / "trainer" / "torch-frameworks.txt"
PYTHON = "3.11"
"""Python of the image."""
EVERY = 50


def put_packages(directory: Path, scratch: Path) -> None:
    """Install the Trainer into a directory. The files are hard links to uv's cache where the file system allows it."""
    without_torch = scratch / "overrides.txt"
    without_torch.write_text("torch ; python_version < '3'\n")
    command = [str(paths.REPOSITORY / ".uv/bin/uv"), "pip", "install", "--quiet", "--target", str(directory)]
    command += ["--python-version", PYTHON, "--constraint", str(LOCKED), "--override", str(without_torch)]
    subprocess.run([*command, "transformers", "accelerate"], check=True)


def sample(namespace: str, image: str) -> dict[str, Any]:
    """Return the job of the sample's manifest, with this image and the volume of packages."""
    documents = yaml.safe_load_all((SAMPLES / "huggingface.yaml").read_text())
    job: dict[str, Any] = next(one for one in documents if one["kind"] == "DistributedTrainingJob")
    job["metadata"]["namespace"] = namespace
    pod = job["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "packages", "persistentVolumeClaim": {"claimName": "packages", "readOnly": True}})
    (trainer,) = pod["containers"]
    trainer["image"] = image
    trainer["env"].append({"name": "PYTHONPATH", "value": "/packages"})
    trainer["volumeMounts"].append({"name": "packages", "mountPath": "/packages"})
    trainer["resources"]["requests"] = {"cpu": "100m", "memory": "500Mi"}
    return job


@only_long("tests/trainer/test_torch_frameworks.py runs it under `regroup run`")
def test_trainer_as_it_is_shows_step_loss_and_progress_and_survives_a_kill(
    operator: Kubectl, train_namespace: str, torch_image: str, tmp_path: Path
) -> None:
    put_packages(installation.volume(operator, train_namespace, "packages"), tmp_path)
    saved = installation.volume(operator, train_namespace, "huggingface-data") / "checkpoints"
    code = {"apiVersion": "v1", "kind": "ConfigMap"}
    metadata = {"name": "huggingface-script", "namespace": train_namespace}
    script = SAMPLES / "huggingface_train.py"
    operator.apply({**code, "metadata": metadata, "data": {script.name: script.read_text()}})
    operator.apply(sample(train_namespace, torch_image))
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
