"""The two samples in the cluster, through kills and resizes: begun together, beside whatever else runs there.

The session ends as good as by plain `python`, and bitwise the same. The unmodified init_process_group script, which saves with
torch.save, starts again in the same pods and containers from its own checkpoint.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait

import yaml

from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation, traced_job
from harness.job import JobView
from harness.traced_job import TracedJob

ACCURACY = 0.97
ENDS_S = 600.0
SAMPLE = traced_job.SAMPLE.with_suffix(".py")
_STARTED = re.compile(r"^rank (\d+) of (\d+) starts at step (\d+)$", re.MULTILINE)
_PRINTED = re.compile(r"held-out accuracy ([\d.]+)\s+parameters sha256 ([0-9a-f]{64})$", re.MULTILINE)


class Samples:
    """Both runs, begun when this is made, and the run in plain `python` that the session is compared with.

    `session` and `script` have a line to print once their claims have held, or the error.
    """

    def __init__(self, k: Kubectl) -> None:
        self._kubectl = k
        self._namespace = f"train-{uuid.uuid4().hex[:8]}"
        installation.namespace(k, self._namespace)
        plain = _begin(_plain_python)
        self.session = _begin(lambda: session(k, self._namespace, plain))
        self.script = _begin(lambda: script(k, self._namespace))
        self._runs = [plain, self.session, self.script]

    def end(self) -> None:
        """Wait until nothing of them runs any more, then remove it: the tests that follow break what they need."""
        wait(self._runs, timeout=ENDS_S)
        self.remove()

    def remove(self) -> None:
        """Remove what there is of them in the cluster, whether they have ended or not."""
        installation.remove_namespace(self._kubectl, self._namespace)


def _begin(work: Callable[[], str]) -> Future[str]:
    """Have a thread do the work. Whoever interrupts the tests does not wait for it."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def session(k: Kubectl, namespace: str, plain: Future[str]) -> str:
    """Run the session's sample through two kills and two resizes; return what was compared. Fails where it was not equal."""
    job, hurry = traced_job.sample(k, namespace)
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
    accuracy, parameters = _wait_printed(job)
    expected = _printed(plain.result())
    compared = (
        f"held-out accuracy {accuracy}, parameters {parameters[:12]}; without faults {expected[0]}, {expected[1][:12]}"
    )
    assert accuracy >= ACCURACY, compared
    assert (accuracy, parameters) == expected, compared
    return compared


def script(k: Kubectl, namespace: str) -> str:
    """Run the script by its torchrun command through a kill and two resizes; return its starts. Fails where one lost its work."""
    command = ["torchrun", "--nnodes=1:3", "--nproc-per-node=1", "/regroup-samples/script.py"]
    command += ["--checkpoint", "/trace/script.pt", "--steps", "1200"]
    job = traced_job.start(k, namespace, "script", replicas=2, elastic=(1, 3), command=command)
    job.wait(90, "the script runs", state="Running", ready="2/2")
    assert job.status()["tier"] == "Script"
    containers = job.containers()
    wait_until(lambda: (job.directory / "script.pt").exists(), timeout_s=60, what="the script's own checkpoint")

    pod = job.pod(1)
    trainer = max(faults.processes(pod["metadata"]["uid"]), key=lambda p: p.inner_pid)
    faults.kill_inner(pod["metadata"]["uid"], trainer.inner_pid)
    _wait_starts(job, 2, 2)
    _wait_starts(job, 2, 2, slot=1)
    assert job.containers() == containers, "the kill cost a pod or a container"

    job.scale(3)
    _wait_starts(job, 3, 3)
    assert job.containers().items() > containers.items(), "growth cost a pod or a container"
    job.scale(1)
    _wait_starts(job, 4, 1)

    job.wait(120, "the script finishes", state="Succeeded")
    first_steps = [step for _, _, step in _starts(job, 0)]
    assert first_steps[0] == 0
    assert first_steps == sorted(first_steps), "a start went back behind an earlier one"
    assert all(step > 0 for step in first_steps[1:]), "a start did not use the script's own checkpoint"
    survivor = "script-worker-0-0"
    assert job.containers()[survivor] == containers[survivor], "shrinking cost the survivor its pod or container"
    return f"first steps of the script's starts: {first_steps}"


def _starts(job: TracedJob, slot: int) -> list[tuple[int, int, int]]:
    """Return (rank, world size, first step) of every start in a slot's pod, oldest first."""
    return [(int(r), int(w), int(s)) for r, w, s in _STARTED.findall(job.logs(job.pod(slot)["metadata"]["name"]))]


def _wait_starts(job: TracedJob, number: int, world_size: int, slot: int = 0) -> None:
    """Wait until a slot's newest start is at least its pod's `number`-th and of this world size."""

    def there() -> bool:
        starts = _starts(job, slot)
        return len(starts) >= number and starts[-1][1] == world_size

    wait_until(there, timeout_s=120, what=f"start {number} with world size {world_size}")


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
    command = ["nice", "-n", "10", sys.executable, SAMPLE, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _wait_printed(job: JobView) -> tuple[float, str]:
    """Return what a job's trainers printed, once they have: their work after the last step goes on while it is Succeeded."""

    def text() -> str:
        return "".join(job.logs(pod["metadata"]["name"]) for pod in job.pods())

    wait_until(lambda: _PRINTED.search(text()), timeout_s=60, what="the sample prints its accuracy")
    return _printed(text())


def _printed(text: str) -> tuple[float, str]:
    """Return the held-out accuracy and the hash of the parameters that a run printed: one line of one process."""
    ((accuracy, digest),) = _PRINTED.findall(text)
    return float(accuracy), digest
