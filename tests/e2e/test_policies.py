"""Fields of the resource that no other test here uses, on real pods: deadlines, expiry, what is left after the end, rules for
failures, managedBy, growth, room, groups of workers, goodput; and a sample that has most of them.

The jobs of JOBS take their course by themselves, so that they do it all at once.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chaos.cluster_job import SCRIPTS
from cluster.kubectl import Kubectl, wait_until
from harness import faults, installation, judge, traced_job
from harness.job import RESOURCE, JobView
from harness.traced_job import TracedJob
from regroup.checkpoint import store
from tests.e2e.kit import SERVES, pods_of, role
from tests.long import only_long

COOLDOWN_S = 20
_SMALL = {"resources": {"requests": {"cpu": "50m", "memory": "200Mi"}}}
_WAITS = ["python", "-c", "import time; time.sleep(600)"]
_ASKS = """
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=2)
        break
    except OSError:
        time.sleep(0.2)
print("served")
"""


def _ends(name: str, policy: str) -> dict[str, Any]:
    """Return a job that ends once all its pods have run: a worker, a role that goes on, and one that succeeds."""
    return {
        "replicas": 1,
        "elastic": None,
        "command": ["python", "-c", _ASKS, f"http://{name}-board-0.{name}:8080/"],
        "roles": [role("board", SERVES), role("eval", "print('evaluated')") | {"requiredForCompletion": True}],
        "runPolicy": {"cleanPodPolicy": policy},
    }


def _one_a_node(name: str) -> dict[str, Any]:
    selector = {"matchLabels": {"regroup.dev/job-name": name}}
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


_FAILS_ONCE = """
import os, sys
if not os.path.exists("/kept/tried"):
    open("/kept/tried", "w").close()
    sys.exit(3)
print("done")
"""
_FAILS_APART = """
import os, sys, time
tried = len([name for name in os.listdir("/tmp") if name.startswith("tried-")])
open(f"/tmp/tried-{tried}", "w").close()
time.sleep(4)
sys.exit(40 + tried if tried < 3 else 0)
"""
"""Fails three times, each time more than four seconds after the last, then ends."""


def _two_that_fail_once() -> dict[str, Any]:
    """Return a role of two pods whose containers fail once."""
    spec = role("eval", _FAILS_ONCE, volumes=[{"name": "kept", "emptyDir": {}}])["template"]["spec"]
    spec["containers"][0]["volumeMounts"] = [{"name": "kept", "mountPath": "/kept"}]
    return {"name": "eval", "replicas": 2, "requiredForCompletion": True, "template": {"spec": spec}}


JOBS: Mapping[str, dict[str, Any]] = {
    "deadline": {"replicas": 2, "command": _WAITS, "runPolicy": {"activeDeadlineSeconds": 5}},
    "expires": {
        "replicas": 1,
        "elastic": None,
        "command": ["python", "-c", "print('done')"],
        "runPolicy": {"ttlSecondsAfterFinished": 2, "cleanPodPolicy": "None"},
    },
    "late": {"replicas": 2, "command": _WAITS, "runPolicy": {"startDeadlineSeconds": 5}},
    "foreign": {"replicas": 1, "elastic": None, "command": _WAITS, "runPolicy": {"managedBy": "example.com/another"}},
    "crowded": {
        "replicas": 2,
        "elastic": None,
        "environment": {"STEPS": 100_000},
        "elasticPolicy": {"minReplicas": 1, "maxReplicas": 2, "pendingTimeoutSeconds": 3},
    },
    "all-go": _ends("all-go", "All"),
    "some-stay": _ends("some-stay", "None"),
    "role-fails": {
        "replicas": 1,
        "elastic": None,
        "command": _WAITS,
        "roles": [role("eval", "import sys; print('no such checkpoint'); sys.exit(3)", restartPolicy="Never")],
    },
    "ignores": {
        "replicas": 2,
        "elastic": (1, 2),
        "environment": {"STEPS": 100_000},
        "recovery": {"maxRestarts": 0, "onExit": [{"action": "Ignore", "signals": ["SIGKILL"]}]},
    },
    "eats": {
        "replicas": 1,
        "elastic": None,
        "command": ["python", "-c", "held = []\nwhile True: held.append(bytearray(1 << 24))"],
        "container": {"resources": {**_SMALL["resources"], "limits": {"memory": "512Mi"}}},
        "recovery": {"maxRestarts": 100, "onExit": [{"action": "Fail", "reasons": ["OOMKilled"]}]},
    },
    "no-room": {
        "replicas": 1,
        "elastic": None,
        "command": _WAITS,
        "recovery": {"onExit": [{"action": "Fail", "reasons": ["Unschedulable"]}]},
    },
    "no-map": {
        "replicas": 1,
        "elastic": None,
        "command": _WAITS,
        "container": {**_SMALL, "envFrom": [{"configMapRef": {"name": "no-such-map"}}]},
        "recovery": {"onExit": [{"action": "Fail", "reasons": ["CreateContainerError"]}]},
    },
    "tries-again": {
        "replicas": 1,
        "elastic": None,
        "command": ["python", "-c", "print('done')"],
        "roles": [_two_that_fail_once()],
    },
    "fails-apart": {
        "replicas": 1,
        "elastic": None,
        "command": ["python", "-c", _FAILS_APART],
        "recovery": {
            "maxRestarts": 1,
            "windowSeconds": 4,
            "onExit": [{"action": "Fail", "exitCodes": {"operator": "NotIn", "values": [0, 40, 41, 42]}}],
        },
    },
}
_NOWHERE = {"nodeSelector": {"example.com/no-such-node": "yes"}}
_PODS: Mapping[str, dict[str, Any]] = {
    "late": _NOWHERE,
    "no-room": _NOWHERE,
    "crowded": {"nodeSelector": {"kubernetes.io/hostname": "n1"}, "affinity": _one_a_node("crowded")},
}
"""What is added to the pods' templates: where they may run."""


@pytest.fixture(scope="module")
def started(operator: Kubectl, shared_namespace: str) -> dict[str, TracedJob]:
    """The jobs of JOBS, started together."""
    return {
        name: traced_job.start(
            operator, shared_namespace, name, pod=_PODS.get(name), **({"container": _SMALL} | options)
        )
        for name, options in JOBS.items()
    }


@pytest.fixture(scope="module", autouse=True)
def sample(operator: Kubectl, shared_namespace: str, started: dict[str, TracedJob]) -> tuple[JobView, Path]:  # noqa: ARG001
    """The sample, and the file that ends its pauses. It starts with the others."""
    return traced_job.sample(operator, shared_namespace, traced_job.SAMPLES / "policies.yaml")


def _condition(job: JobView, kind: str) -> dict[str, Any]:
    return next((c for c in job.status().get("conditions", ()) if c["type"] == kind), {})


def _exists(job: TracedJob) -> bool:
    found = job.kubectl.run("--namespace", job.namespace, "get", RESOURCE, "--output=name")
    return f"{RESOURCE}/{job.name}" in found.split()


def _pods(job: JobView) -> set[str]:
    """Return the names of all pods of a job, its roles' too."""
    selector = f"--selector=regroup.dev/job-name={job.name}"
    found = job.kubectl.run("--namespace", job.namespace, "get", "pods", selector, "--output=name")
    return {name.removeprefix("pod/") for name in found.split()}


def _failed(job: TracedJob, reason: str) -> dict[str, Any]:
    """Wait until the job has failed for this reason and its pods have ended; return the condition."""
    wait_until(lambda: _condition(job, "Failed").get("reason") == reason, f"{job.name} ends: {reason}", timeout_s=90)
    wait_until(lambda: not _holding(job), f"the pods of {job.name} have ended", timeout_s=60)
    return _condition(job, "Failed")


def _holding(job: TracedJob) -> list[str]:
    """Return the pods that hold resources. One that has ended stays for its log."""
    return [p["metadata"]["name"] for p in job.pods() if p["status"].get("phase") not in ("Succeeded", "Failed")]


def test_job_that_runs_past_its_deadline_fails_and_gives_its_pods_back(started: dict[str, TracedJob]) -> None:
    job = started["deadline"]
    failed = _failed(job, "DeadlineExceeded")
    assert "spec.runPolicy.activeDeadlineSeconds (5)" in failed["message"]
    status = job.status()
    ran_s = (_time(status["completionTime"]) - _time(status["startTime"])).total_seconds()
    assert 5 <= ran_s <= 15, f"it ran {ran_s:.0f} s"


def test_job_that_does_not_start_in_time_fails_and_gives_its_pods_back(started: dict[str, TracedJob]) -> None:
    message = _failed(started["late"], "StartDeadlineExceeded")["message"]
    assert "0 of the 2 workers" in message
    assert "spec.runPolicy.startDeadlineSeconds (5)" in message


def test_job_and_its_pods_are_deleted_some_time_after_its_end(started: dict[str, TracedJob]) -> None:
    job = started["expires"]
    wait_until(lambda: not _exists(job), "the job that has ended is deleted", timeout_s=90)
    wait_until(lambda: not job.pods(), "its pods go with it", timeout_s=60)
    said = json.loads(job.kubectl.run("--namespace", job.namespace, "get", "events.events.k8s.io", "-o", "json"))
    reasons = {event["reason"] for event in said["items"] if event["regarding"].get("name") == job.name}
    assert "Succeeded" in reasons, f"it was deleted before it had ended: {reasons}"


def test_no_pod_stays_after_the_end_where_all_are_to_be_deleted(started: dict[str, TracedJob]) -> None:
    job = started["all-go"]
    job.wait(90, "the worker has been served by one role, and the other has succeeded", state="Succeeded")
    wait_until(lambda: not _pods(job), "no pod is left, of roles neither", timeout_s=60)


def test_pods_that_have_ended_stay_for_their_logs_where_none_is_to_be_deleted(started: dict[str, TracedJob]) -> None:
    """The role that would go on is deleted in any case. Then the others have been looked at, too."""
    job = started["some-stay"]
    job.wait(90, "the worker has been served by one role, and the other has succeeded", state="Succeeded")
    wait_until(lambda: not pods_of(job, "board"), "the role that goes on is deleted", timeout_s=60)
    assert _pods(job) == {"some-stay-worker-0-0", "some-stay-eval-0-0"}
    assert "served" in job.logs("some-stay-worker-0-0").splitlines()


def test_role_that_is_not_to_be_restarted_fails_the_job(started: dict[str, TracedJob]) -> None:
    job = started["role-fails"]
    message = _failed(job, "RoleFailed")["message"]
    assert message.startswith("Pod role-fails-eval-0-0 of role eval ended with exit code 3"), message
    command = shlex.split(message.split("Log: ")[1])
    assert "no such checkpoint" in job.kubectl.run(*command[1:]), "the command shows the log"
    assert [pod["metadata"]["name"] for pod in pods_of(job, "eval")] == ["role-fails-eval-0-0"], "it was tried again"


@pytest.mark.slow
def test_memory_that_a_rule_names_fails_the_job_at_once(started: dict[str, TracedJob]) -> None:
    job = started["eats"]
    message = _failed(job, "ExitRule")["message"]
    assert re.search(r"OOMKilled: limit 512 ?Mi", message), message
    assert "spec.recovery.onExit[0] (Fail, reasons OOMKilled)" in message
    assert (job.status().get("restarts") or {}).get("processes", 0) <= 1, "it was tried again"


@pytest.mark.parametrize(("name", "reason"), [("no-room", "Unschedulable"), ("no-map", "CreateContainerError")])
def test_pods_that_cannot_start_for_a_reason_that_a_rule_names_fail_the_job(
    started: dict[str, TracedJob], name: str, reason: str
) -> None:
    message = _failed(started[name], "ExitRule")["message"]
    assert f"spec.recovery.onExit[0] (Fail, reasons {reason})" in message


def test_containers_of_a_role_are_restarted_in_their_pods(started: dict[str, TracedJob]) -> None:
    job = started["tries-again"]
    job.wait(90, "the worker and both pods of the role have ended", state="Succeeded")
    pods = {pod["metadata"]["name"]: pod["status"] for pod in pods_of(job, "eval")}
    assert sorted(pods) == ["tries-again-eval-0-0", "tries-again-eval-1-0"]
    assert all(status["phase"] == "Succeeded" for status in pods.values())
    assert all(status["containerStatuses"][0]["restartCount"] >= 1 for status in pods.values())


def test_failures_that_are_further_apart_than_the_window_do_not_add_up(started: dict[str, TracedJob]) -> None:
    job = started["fails-apart"]
    status = job.wait(90, "the fourth try succeeds", state="Succeeded")
    restarts = status["restarts"]
    assert (restarts["processes"], len(restarts.get("recent", ())) <= 1) == (3, True), restarts


def test_sample_trains_and_has_a_spare(sample: tuple[JobView, Path]) -> None:
    job, hurry = sample
    job.wait(120, "the sample trains", state="Running", adopted=True, world_size=2)
    said = "2 of 2 worker pods run, 1 of 1 spares"
    wait_until(lambda: said in _condition(job, "PodsReady").get("message", ""), "the spare waits", timeout_s=60)
    hurry.touch()  # it ends beside the tests that follow


def test_goodput_is_the_time_that_went_into_steps(started: dict[str, TracedJob]) -> None:
    job = started["ignores"]
    job.training(workers=2)
    wait_until(lambda: _goodput(job)["percent"] > 0, "goodput is more than nothing", timeout_s=60)
    said, trace = _goodput(job), job.trace()
    steps_s = trace.intervals_s(until=next(c.t for c in trace.commits if c.step >= said["step"]))
    print(f"goodput {said}, steps up to there {sum(steps_s):.1f} s")
    assert said["percent"] <= 100
    assert sum(steps_s) / 2 <= said["productiveSeconds"] <= sum(steps_s) * 2


def _goodput(job: JobView) -> dict[str, Any]:
    return job.status().get("goodput") or {"percent": 0}


def test_process_whose_signal_a_rule_ignores_costs_nothing(started: dict[str, TracedJob]) -> None:
    job = started["ignores"]
    before = job.training(workers=2)
    pod, pid = job.victim(1)
    lost = (pod["metadata"]["name"], pid)
    job.kill_rank(1)
    job.changed(before, lambda process: process == lost, workers=2, survivors=1, generations=(1, 2))
    status = job.status()
    restarts = status["restarts"]
    assert (restarts["ignored"], restarts.get("total", 0), restarts.get("recent", [])) == (1, 0, []), restarts
    rules = {incident.get("rule") for incident in status["incidents"]}
    assert "spec.recovery.onExit[0] (Ignore, signals SIGKILL)" in rules, status["incidents"]
    assert _condition(job, "Failed").get("status") != "True", "maxRestarts is 0"
    job.patch(runPolicy={"suspend": True})  # it would train beside the tests that follow


def test_pod_that_no_node_has_room_for_is_given_back_and_the_job_trains_without_it(
    started: dict[str, TracedJob],
) -> None:
    job = started["crowded"]
    wait_until(lambda: _condition(job, "PodsReady").get("reason") == "HeldBack", "a pod is given back", timeout_s=90)
    wait_until(lambda: len(job.pods()) == 1, "one pod is left", timeout_s=60)
    job.wait(90, "it trains with one worker", state="Running", adopted=True, world_size=1)
    assert not (job.status().get("restarts") or {}).get("total")


def test_sample_leaves_no_pod_after_its_end(sample: tuple[JobView, Path]) -> None:
    job, hurry = sample
    hurry.touch()
    job.wait(120, "the sample ends", state="Succeeded")
    wait_until(lambda: not _pods(job), "no pod is left", timeout_s=60)
    assert not (job.status().get("restarts") or {}).get("total")


def test_job_of_another_controller_is_left_alone(started: dict[str, TracedJob]) -> None:
    """By now the operator has brought the jobs that were made with it to their ends."""
    assert _condition(started["deadline"], "Failed"), "the operator has not looked at the others yet"
    job = started["foreign"]
    assert job.status().get("conditions") is None
    assert job.pods() == []


@pytest.fixture(scope="module")
def patient(operator: Kubectl, shared_namespace: str) -> TracedJob:
    """A job that waits longer than others before it goes on without a worker, and saves where its template has a volume."""
    job = traced_job.start(
        operator,
        shared_namespace,
        "patient",
        replicas=2,
        elastic=(1, 2),
        container=_SMALL,
        environment={"STEPS": 100_000},
        recovery={"rejoinSeconds": 30, "disconnectSeconds": 30},
        checkpoint={"path": "/trace/saved", "everySeconds": 1, "keep": 2},
    )
    job.pace(0.05)
    return job


@only_long("as on a volume, which test_pods.py has; tests/unit/render has the path")
def test_checkpoints_are_written_to_a_path_as_often_and_as_many_as_the_spec_says(patient: TracedJob) -> None:
    def saved() -> int:
        return int((patient.status().get("checkpoint") or {}).get("step", -1))

    patient.training(workers=2)
    steps = {wait_until(lambda: saved() if saved() >= 0 else None, "a checkpoint in the status", timeout_s=60)}
    began = time.monotonic()
    while len(steps) < 4:
        wait_until(lambda: saved() not in steps, "the next one", timeout_s=30)
        steps.add(saved())
    print(f"three more checkpoints within {time.monotonic() - began:.1f} s")
    # Three are kept by default. One more is there until the oldest has been removed.
    wait_until(lambda: len(store.names(patient.directory / "saved")[0]) == 2, "two checkpoints are kept", timeout_s=30)


@only_long("tests/unit/controller/test_faults.py has it in memory")
def test_others_wait_for_a_process_that_may_rejoin(patient: TracedJob) -> None:
    """One generation, in which it is again, in place of two."""
    before = patient.training(workers=2)
    pod, pid = patient.victim(1)
    lost = (pod["metadata"]["name"], pid)
    patient.kill_rank(1)
    patient.changed(before, lambda process: process == lost, workers=2, survivors=1, generations=(1, 1))


@only_long("tests/unit/plan/test_standing.py has a table of it")
def test_worker_that_stands_still_for_less_than_disconnect_seconds_is_not_lost(patient: TracedJob) -> None:
    """Five seconds are the default. Its node answers for it, so that no observer takes it for dead."""
    before = patient.training(workers=2)
    pod, pid = patient.victim(1)
    uid = pod["metadata"]["uid"]
    faults.signal_main(uid, "agent.pyz", signal.SIGSTOP)
    stopped = faults.signal_inner(uid, pid, signal.SIGSTOP)
    try:
        wait_until(lambda: time.time() > stopped + 12, "twelve seconds pass", timeout_s=60)
    finally:
        faults.signal_main(uid, "agent.pyz", signal.SIGCONT)
        faults.signal_inner(uid, pid, signal.SIGCONT)
    trace = patient.wait_trace(lambda t: t.commits[-1].step > before.commits[-1].step + 30, 60, "both go on")
    assert trace.commits[-1].generation == before.commits[-1].generation, patient.status()["incidents"][-1]
    commits_s = sorted(c.t for c in trace.commits)
    assert max(b - a for a, b in pairwise(commits_s)) > 10, "they did not stand"
    patient.patch(runPolicy={"suspend": True})  # it would train beside the tests that follow


@only_long("tests/trainer/test_regroup_run.py resumes with another size")
def test_job_goes_on_where_the_deadline_of_another_has_ended_that_one(
    jobs: Callable[..., TracedJob], operator: Kubectl, train_namespace: str
) -> None:
    """With another number of workers, from the checkpoint that the condition of the first one names."""
    installation.volume(operator, train_namespace, "saved")
    saves = {"volumeClaim": "saved", "everySeconds": 1, "keep": 2}
    of_both: dict[str, Any] = {"elastic": None, "container": _SMALL, "environment": {"STEPS": 100_000}}
    first = jobs("first", replicas=1, checkpoint=saves, **of_both)
    first.pace(0.05)
    first.training(workers=1)
    wait_until(lambda: (first.status().get("checkpoint") or {}).get("step", 0) > 0, "a checkpoint", timeout_s=60)
    first.patch(runPolicy={"activeDeadlineSeconds": 1})
    message = _failed(first, "DeadlineExceeded")["message"]
    # A newer one may have become durable since then.
    (named,) = re.findall(r"A new job continues after step (\d+) with spec.checkpoint.resumeFrom: ([^;]+);", message)
    step, directory = int(named[0]), named[1]

    second = jobs("second", replicas=2, checkpoint=saves | {"resumeFrom": directory}, **of_both)
    second.pace(0.05)
    trace = second.training(workers=2)
    status = second.status()
    assert status["lineage"][0] == {"generation": 1, "startStep": step}
    assert status["resumedFrom"]["path"] == f"/regroup/checkpoint/{directory}"
    assert judge.whole(trace.judged(), first=step) == []


@pytest.mark.slow
def test_template_that_runs_as_root_starts(
    jobs: Callable[..., TracedJob], operator: Kubectl, train_namespace: str
) -> None:
    """The agent's init container does not: it inherits the pod's user otherwise, and would be refused."""
    operator.run("label", "namespace", train_namespace, f"{installation.RESTRICTED}-")
    job = jobs(
        replicas=1,
        elastic=None,
        command=["python", "-c", "import os; print('user', os.getuid())"],
        pod={"securityContext": {"runAsUser": 0}},
    )
    wait_until(lambda: _condition(job, "Complete").get("status") == "True", "it succeeds", timeout_s=90)
    (pod,) = job.pods()
    assert "user 0" in job.logs(pod["metadata"]["name"])


@only_long("the pause itself takes 20 s, and the plan has a table of it")
def test_growth_waits_for_the_pause_after_the_last_change(jobs: Callable[..., TracedJob]) -> None:
    policy = {"minReplicas": 1, "maxReplicas": 3, "growthCooldownSeconds": COOLDOWN_S}
    job = jobs(replicas=1, elastic=None, elasticPolicy=policy, container=_SMALL, environment={"STEPS": 100_000})
    job.training(workers=1)
    job.scale(2)
    wait_until(lambda: len(job.pods()) == 2, "the first growth has begun", timeout_s=COOLDOWN_S)
    job.scale(3)
    wait_until(lambda: _condition(job, "PodsReady").get("reason") == "HeldBack", "the next is held back", timeout_s=10)
    assert len(job.pods()) == 2, "a pod waits for the end of the pause"
    generation = job.training(workers=3).commits[-1].generation
    made = {p["metadata"]["labels"]["regroup.dev/slot"]: _time(p["metadata"]["creationTimestamp"]) for p in job.pods()}
    assert (made["2"] - made["1"]).total_seconds() >= COOLDOWN_S - 1, "creation times are whole seconds"
    job.scale(1)
    job.training(workers=1, after=generation, timeout_s=COOLDOWN_S)  # shrinking does not wait


@only_long("tests/trainer/test_model_groups.py has it under `regroup run`")
def test_model_that_is_split_over_two_workers_goes_on_after_a_kill(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(
        replicas=4,
        elastic=(2, 4),
        workersPerGroup=2,
        script="split.py",
        scripts=SCRIPTS,
        container=_SMALL,
        environment={"CHAOS_TRACE": "/trace", "CHAOS_STEPS": 100_000, "CHAOS_MESH": "shard=2"},
        recovery={"maxRestarts": 100},
    )
    before = job.training(workers=4)
    victim, pid = job.victim(3)
    lost = (victim["metadata"]["name"], pid)
    job.kill_rank(3)
    partner = job.pod(2)["metadata"]["name"]  # slots 2 and 3 hold one copy: it waits until the copy is whole again
    job.changed(
        before,
        lambda process: process == lost,
        workers=4,
        survivors=3,
        generations=(1, 2),
        pausing=lambda process: process[0] == partner,
    )


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
