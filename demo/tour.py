"""The tour: one job trained to its end while a process, a pod, a node and the operator die and the job is resized.

This module does everything before and after the acts (acts.py).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from cluster import lifecycle, paths, progress
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from demo import times
from demo.acts import END_S, LOG_S, Acts
from demo.claims import Claims, incident_table
from demo.follow import Followed
from demo.live import LiveTable
from harness import installation
from harness.job import JobView

NAMESPACE = "tour"
SAMPLE = paths.REPOSITORY / "manifests" / "samples" / "digits.yaml"
ACCURACY = 0.97
HURRY = "hurry"


def apply_sample(k: Kubectl, name: str, change: Callable[[dict[str, Any]], None]) -> tuple[JobView, Path]:
    """Apply the sample job, changed, under a name. Return it and the directory of its checkpoint volume."""
    claim, job = yaml.safe_load_all(SAMPLE.read_text())
    claim_name = claim["metadata"]["name"].replace("digits", name)
    directory = installation.volume(k, NAMESPACE, claim_name)
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    job["spec"]["checkpoint"]["volumeClaim"] = claim_name
    change(job)
    k.apply(job)
    return JobView(k, NAMESPACE, name), directory


def outcome(job: JobView, *, timeout_s: float = LOG_S, every_s: float = 1.0) -> tuple[float, str]:
    """Return (held-out accuracy, hash of the parameters) as rank 0 printed them before its script returned.

    The container runtime writes the log. On a busy machine the line may come after the job has succeeded.
    """

    def printed() -> tuple[float, str] | None:
        for pod in job.pods():
            with suppress(ClusterError):  # a log that cannot be read now; another pod's may have the line
                log = job.logs(pod["metadata"]["name"])
                if found := re.search(r"held-out accuracy ([\d.]+)\s+parameters sha256 (\w+)", log):
                    return float(found[1]), found[2]
        return None

    what = f"a pod of {job.name} has the accuracy in its log: kubectl -n {NAMESPACE} logs shows what they printed"
    found = wait_until(printed, what, timeout_s=timeout_s, every_s=every_s)
    assert found is not None
    return found


def run(console: Console, *, keep: bool) -> int:
    """Run the tour. Return 0 if every claim held."""
    began_s = float(os.environ.get("MAKE_BEGAN") or time.time())
    existing = lifecycle.context()
    if existing:
        console.print(f"REGROUP_CONTEXT={existing}: the tour powers nodes off and signals processes on this machine. "
                      "It needs its own cluster: unset REGROUP_CONTEXT.")  # fmt: skip
        return 2
    was_up = lifecycle.is_up()
    try:
        code = _run(console)
    finally:
        if keep:
            _how_to_go_on(console)
        elif not was_up:
            lifecycle.down()
    total_s = time.time() - began_s
    for sentence in times.sentences(total_s, progress.recorded_since(total_s).values()):
        console.print(f"\n{sentence}", highlight=False)
    return code


def _run(console: Console) -> int:
    k = installation.cluster_up()
    installation.install(k)
    installation.remove_namespace(k, NAMESPACE)
    wait_until(
        lambda: NAMESPACE not in k.run("get", "namespaces", "--output=name"),
        "the last tour's namespace is gone",
        timeout_s=90,
    )
    installation.namespace(k, NAMESPACE)
    console.print(f"\n[bold]$ kubectl apply -f {SAMPLE.relative_to(paths.REPOSITORY)}[/]")
    console.print("[dim]state, ready, generation, members: the job's status; step, loss: the trainers' log[/]")
    (job, directory), claims = apply_sample(k, "digits", _watched), Claims()
    try:
        with Followed(job) as steps, LiveTable(console, job, steps) as live:
            acts = Acts(k, job, steps, claims, live)
            acts.start(3)
            acts.kill_process()
            acts.delete_pod()
            acts.power_off()
            acts.kill_operator()
            acts.resize()
            (directory / HURRY).touch()
            reference, _ = apply_sample(k, "reference", _without_faults)
            status = acts.finish(_num_steps(job.get()))
    except ClusterError:
        claims.show(console)
        raise
    accuracy, parameters = outcome(job)
    claims.check(f"held-out accuracy >= {ACCURACY}", accuracy >= ACCURACY, f"{accuracy:.4f}")
    with progress.step("The same job, one worker, no faults", "start", expected_s=40):
        reference.wait(END_S, "the reference run ends", state="Succeeded")
    _, expected = outcome(reference)
    claims.check("parameters bitwise equal to the run without faults", parameters == expected, parameters[:12])
    console.print()
    console.print(
        k.run("--namespace", NAMESPACE, "get", "trainingjobs", "-o", "wide").rstrip(), soft_wrap=True, highlight=False
    )
    console.print()
    console.print(incident_table(status.get("incidents") or []))
    console.print()
    claims.show(console)
    for claim in claims.failed:
        console.print(f"[bold red]FAILED[/] {claim.what}: {claim.seen}")
    return 1 if claims.failed else 0


def _watched(job: dict[str, Any]) -> None:
    """Print every step, and pause in each step until the acts are over, however long they take here."""
    _arguments(job).extend(["--print-every", "1", "--every-rank", "--hurry", f"/regroup/checkpoint/{HURRY}"])


def _without_faults(job: dict[str, Any]) -> None:
    """Give the job a fixed size of one and no pause in its steps. The mathematics stays the same."""
    job["spec"]["replicas"] = 1
    del job["spec"]["elasticPolicy"]
    arguments = _arguments(job)
    arguments[arguments.index("--pace") + 1] = "0"


def _num_steps(job: dict[str, Any]) -> int:
    arguments = _arguments(job)
    return int(arguments[arguments.index("--steps") + 1])


def _arguments(job: dict[str, Any]) -> list[str]:
    arguments: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


def _how_to_go_on(console: Console) -> None:
    python = (paths.REPOSITORY / ".venv" / "bin" / "python").relative_to(paths.REPOSITORY)
    sample = SAMPLE.relative_to(paths.REPOSITORY)
    find = "grep -l ^trainer-0 /proc/[0-9]*/comm"
    console.print(
        "\nThe cluster stays up. These lines start the job anew, for an hour, and break it by hand:\n"
        f"  export KUBECONFIG={Path(paths.kubeconfig())} PATH={paths.bin_dir()}:$PATH\n"
        f"  kubectl config set-context --current --namespace={NAMESPACE}\n"
        "  kubectl delete trainingjob digits\n"
        f'  sed \'s/"1600"/"60000"/\' {sample} | kubectl apply -f -\n'
        "  kubectl get trainingjobs -o wide --watch\n"
        "  kubectl scale trainingjob digits --replicas=5\n"
        """  kubectl patch trainingjob digits --type=merge --patch='{"spec": {"replicas": 3}}'\n"""
        f"  kubectl exec digits-worker-0-0 -- sh -c 'kill -9 $({find} | cut -d/ -f3)'\n"
        "  kubectl delete pod digits-worker-1-0 --grace-period=0 --force\n"
        f"  {python} -m cluster power-off n2; {python} -m cluster power-on n2\n"
        "  kubectl describe trainingjob digits     # conditions, incidents, events\n"
        "  make cluster-down                       # when you are done",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
