"""`kubectl regroup logs` of what kubelets keep: merged by time, with the rank in front, and without what could steer a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from cluster import paths
from cluster.kubectl import Kubectl, wait_until
from harness import faults
from harness.job import JobView
from regroup_client import Client, creation, submission
from regroup_client.access import Target, connect
from tests.e2e.kit import kubectl_regroup, with_kubectl
from tests.long import only_long

NAME = "talks"
LONG = 40_000
SCRIPT = f"""
import os, sys, time
rank = int(os.environ["RANK"])
print("begins", rank, flush=True)
print("\\x1b[31mred\\x1b[0m and \\x1b]0;a title\\x07plain", flush=True)
for percent in range(101):
    sys.stdout.write(f"\\rloading {{percent}}%")
    sys.stdout.flush()
    time.sleep(0.005)
print("\\n" + "x" * {LONG}, flush=True)
for number in range(6000):
    print("step", number, flush=True)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def job(operator: Kubectl, shared_namespace: str, torch_image: str) -> Iterator[JobView]:
    """A job of two workers with two processes each, which have begun to print their steps."""
    choices = submission.Choices(
        name=NAME, image=torch_image, script="talk.py", workers=2, cpu="50m", memory="512Mi", user=23456
    )
    made = submission.objects(choices, {"talk.py": SCRIPT.encode()})
    made.job["spec"]["processesPerWorker"] = 2
    with with_kubectl(), connect(Target(shared_namespace, kubeconfig=str(paths.kubeconfig()))) as api:
        creation.create(api, made)
    view = JobView(operator, shared_namespace, NAME)

    def talks() -> bool:
        return all(" step 15" in view.logs(pod["metadata"]["name"]) for pod in view.pods()) and len(view.pods()) == 2

    wait_until(talks, "all workers print their steps", timeout_s=120)
    yield view
    view.kubectl.run("delete", "dtj", NAME, f"--namespace={shared_namespace}", "--wait=false")


def logs(job: JobView, *options: str) -> list[str]:
    return kubectl_regroup(job.namespace, "logs", NAME, *options).splitlines()


def test_lines_of_all_ranks_come_by_time_and_can_be_chosen(job: JobView) -> None:
    whole = logs(job, "--since=1h", "--timestamps")
    times = [line[:12] for line in whole]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", one) for one in times)
    assert times == sorted(times) or times[0] > times[-1], "unless midnight is between them"
    labels = {line.split()[1] for line in whole if " begins " in line}
    assert labels == {f"[{rank // 2}.{rank}]" for rank in range(4)}
    for rank in range(4):
        label = f"[{rank // 2}.{rank}]"
        of_it = [line[13:] for line in whole if line[13:].startswith(f"{label} ")]
        assert f"{label} begins {rank}" in of_it
        assert f"{label} red and plain" in of_it
        bar = [line for line in of_it if "loading" in line]
        assert bar[-1] == f"{label} loading 100%"
        assert len(bar) <= 10, (
            "a bar is one line for each line of the worker's other process, and not one for each state"
        )
        (long,) = [line for line in of_it if "xxx" in line]
        assert long == f"{label} {'x' * 4000} … ({LONG - 4000} more characters)"
    assert "\x1b" not in "".join(whole)
    assert {line.split()[0] for line in logs(job, "--rank=3")} == {"[1.3]"}
    assert set(logs(job, "--grep=^begins [02]$")) == {"[0.0] begins 0", "[1.2] begins 2"}
    last = logs(job, "--rank=0", "--since=2s")
    assert 1 <= len(last) <= 40, last
    assert all(line.startswith("[0.0] step ") for line in last)
    assert len(logs(job)) == 40, "the last 20 lines of each worker"


@only_long("what is chosen and how it is shown; here containers and pods are replaced meanwhile")
def test_logs_of_what_was_killed(job: JobView) -> None:
    with with_kubectl(), Client(job.namespace, kubeconfig=str(paths.kubeconfig())) as client:
        followed = client.job(NAME).logs(follow=True, tail=0, slot=0, grep="begins")
        pod = job.pod(0)
        faults.kill_main(pod["metadata"]["uid"], "agent")
        again = next(followed)  # of the container that starts in the same pod
        assert (again.worker.slot, again.worker.attempt) == (0, 0)
        before = logs(job, "--slot=0", "--previous")
        assert sum(" begins " in line for line in before) == 2
        assert sum(" begins " in line for line in logs(job, "--slot=0", "--all-attempts")) >= 3
        gone = job.pod(1)["metadata"]["name"]
        of_next = client.job(NAME).logs(follow=True, tail=0, slot=1, grep="begins")
        job.delete_pod(gone, grace_s=0)
        assert next(of_next).worker.attempt == 1, "a worker that starts later is followed, too"
        of_next.close()
        followed.close()
    kept = logs(job, "--slot=1", "--all-attempts", "--grep=^begins")
    assert len(kept) == 2, "a kubelet deletes a log with its pod"


def test_stacks_of_a_job_that_never_hung_are_one_sentence(job: JobView) -> None:
    said = kubectl_regroup(job.namespace, "stacks", NAME, code=1)
    assert (
        said
        == f"kubectl regroup: No hang of the job {NAME} is among its last incidents. `why` says what it waits for.\n"
    )
