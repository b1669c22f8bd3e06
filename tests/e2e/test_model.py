"""The sample, trained in the cluster through kills and resizes: as good, and bitwise the same, as by plain `python`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import yaml

from cluster.kubectl import Kubectl
from harness import faults, traced_job
from harness.job import JobView

ACCURACY = 0.97
MAX_LINES = 60
SCRIPT = traced_job.SAMPLE.with_suffix(".py")


def test_exact_run_with_faults_equals_a_fixed_size_run_without(operator: Kubectl, train_namespace: str) -> None:
    job, hurry = traced_job.sample(operator, train_namespace)
    generation = _trains(job, 3)
    _kill(job, slot=0)
    generation = _trains(job, 3, after=generation)
    job.scale(5)
    generation = _trains(job, 5, after=generation)
    _kill(job, slot=3)
    generation = _trains(job, 5, after=generation)
    job.patch_replicas(2)
    _trains(job, 2, after=generation)
    hurry.touch()
    status = job.wait(300, "the sample ends", state="Succeeded")
    assert len(status["incidents"]) >= 5
    accuracy, parameters = _printed("".join(job.logs(pod["metadata"]["name"]) for pod in job.pods()))
    expected = _printed(_plain_python())
    print(
        f"held-out accuracy {accuracy}, parameters {parameters[:12]}; without faults {expected[0]}, {expected[1][:12]}"
    )
    assert accuracy >= ACCURACY
    assert (accuracy, parameters) == expected


def test_sample_script_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < MAX_LINES


def _trains(job: JobView, workers: int, after: int = 0) -> int:
    """Wait until so many workers train in a generation above `after`; return its number."""
    status = job.wait(120, f"the sample trains with {workers} workers", state="Running", adopted=True,
                      ready=f"{workers}/{workers}", world_size=workers, generation=after + 1)  # fmt: skip
    return int(status["membership"]["generation"])


def _kill(job: JobView, slot: int) -> None:
    (trainer,) = faults.trainers(job.pod(slot)["metadata"]["uid"])
    os.kill(trainer, signal.SIGKILL)


def _plain_python() -> str:
    """Run the sample as the manifest does, but for the pause between steps, on this machine; return what it printed."""
    _, job = yaml.safe_load_all(traced_job.SAMPLE.read_text())
    trainer = job["spec"]["template"]["spec"]["containers"][0]
    arguments = trainer["args"]
    arguments[arguments.index("--pace") + 1] = "0"
    environment = {**os.environ, **{variable["name"]: variable["value"] for variable in trainer["env"]}}
    command = [sys.executable, SCRIPT, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _printed(text: str) -> tuple[float, str]:
    """Return the held-out accuracy and the hash of the parameters that a run printed: one line of one process."""
    ((accuracy, digest),) = re.findall(r"held-out accuracy ([\d.]+)\s+parameters sha256 (\w+)", text)
    return float(accuracy), digest
