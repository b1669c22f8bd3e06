"""Jobs that the pictures of the documentation and tests of the page show: nothing runs them, and their numbers are made up.

They are made as objects of the API, and go the way of real ones from there, so the page cannot tell the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from regroup_client import views
from regroup_client.errors import JobError
from regroup_client.jobs import Verb, Wanted
from regroup_client.log_lines import Worker
from regroup_client.log_streams import Log, Opened
from regroup_client.views import Object

NAMESPACE = "team-vision"
START = datetime(2026, 11, 28, 9, 0, tzinfo=UTC)
_SCRIPT = "step {step:>6}  loss {loss:.4f}  lr 3.0e-04  {speed:.0f} images/s"


def at(seconds: float) -> str:
    """Return a time of the API, in seconds after the start of the sample."""
    return (START + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def curve(seconds: int, pauses: Sequence[tuple[int, int]] = (), pace: float = 6.0) -> list[str]:
    """Return 64 points of a run that stands still in each pause, from a time to another one."""
    out, step = [], 0.0
    for index in range(64):
        now = round(seconds * index / 63)
        before = round(seconds * max(0, index - 1) / 63)
        lost = sum(max(0, min(now, end) - max(before, begin)) for begin, end in pauses)
        step += pace * (1 + 0.03 * math.sin(index * 1.7)) * (now - before - lost)
        loss = 0.31 + 2.0 * math.exp(-step / 5200) + 0.035 * math.sin(index * 2.3) * math.exp(-step / 16000)
        out.append(f"{int(step)} {now} {loss:.4g}")
    return out


def incident(generation: int, seconds: float, cause: str, decision: str, sizes: tuple[int, int], **more: Any) -> Object:
    """Return an entry of status.incidents."""
    before, now = sizes
    return {
        "generation": generation,
        "at": at(seconds),
        "cause": cause,
        "decision": decision,
        "workersBefore": before,
        "workers": now,
        **more,
    }


def membership(generation: int, workers: int, members: str) -> Object:
    """Return status.membership of a job whose workers have one process each."""
    identity = {"uid": f"u{generation}", "kind": "planned", "digest": f"d{generation}"}
    return {"generation": generation, "worldSize": workers, "members": members, **identity}


def job(name: str, state: str = "Running", *, namespace: str = NAMESPACE, replicas: int = 4, **status: Any) -> Object:
    """Return a job in a state."""
    ended = state in views.ENDED
    condition = "Complete" if state == views.SUCCEEDED else state
    base = {
        "phase": state,
        "startTime": at(0),
        "observedAt": at(5400),
        "tier": "Session",
        "summary": {"state": state, "ready": f"{0 if ended else replicas}/{replicas}"},
        "membership": membership(1, replicas, f"0-{replicas - 1}"),
        "restarts": {"total": 0},
        "conditions": [
            {
                "type": condition,
                "status": "True",
                "reason": state,
                "message": f"The job is {state}.",
                "lastTransitionTime": at(0),
            }
        ]
        if ended
        else [
            {
                "type": "Training",
                "status": "True",
                "reason": "Stepping",
                "message": "Steps are committed.",
                "lastTransitionTime": at(0),
            }
        ],
        **({"completionTime": at(5400)} if ended else {}),
    }
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1", "generation": 1},
        "spec": {"replicas": replicas},
        "status": {**base, **status},
    }


def resnet() -> Object:
    """Return a job that has lost a worker, went on with fewer, and grew again."""
    points = curve(5400, [(1520, 1531), (3010, 3052)])
    step, _, loss = points[-1].split()
    incidents = [
        incident(2, 1520, "ProcessExited", "Worker 5 exited with code 139 (signal 11); the other 7 go on with their state, and "
                 "worker 5 joins again.", (8, 7), culprit="5", detectMs=4.1, formMs=310.0, transferMs=0.0, firstStepMs=420.0),
        incident(3, 1531, "Resized", "Worker 5 has joined: 8 workers train.", (7, 8), formMs=280.0, transferMs=940.0),
        incident(4, 3010, "PodDeleted", "Node gpu-b lost power: workers 3, 4 and 5 are gone; the other 5 go on from step 18,031.",
                 (8, 5), culprit="3-5", detectMs=5020.0, formMs=355.0, transferMs=0.0, firstStepMs=460.0),
        incident(5, 3052, "Resized", "Workers 3, 4 and 5 have joined on other nodes: 8 workers train.", (5, 8), formMs=402.0,
                 transferMs=1130.0, firstStepMs=390.0),
        incident(6, 4300, "Resized", "spec.replicas was raised from 8 to 12: 12 workers train.", (8, 12), formMs=512.0,
                 transferMs=1090.0, firstStepMs=401.0),
    ]  # fmt: skip
    return job(
        "resnet50",
        replicas=12,
        summary={
            "state": "Running",
            "ready": "12/12",
            "step": step,
            "progress": "71%",
            "loss": f"{float(loss):.3g}",
            "eta": "36m",
        },
        membership=membership(6, 12, "0-2,3.1,4.1,5.2,6-11"),
        restarts={"total": 4},
        goodput={"percent": 98, "productiveSeconds": 5292.0, "step": int(step)},
        progress={
            "step": int(step),
            "totalSteps": 45000,
            "samplesPerSecond": 12288.0,
            "at": at(5400),
            "curve": points,
            "stepTime": "0.17 s: backward 52 %, forward 24 %, waits 13 % (worker 9 is slowest: fetching data 0.03 s)",
        },
        checkpoint={"generation": 6, "step": 31500, "directory": "g6-s31500"},
        incidents=incidents,
    )


def many(count: int, workers: int) -> list[Object]:
    """Return that many jobs with that many workers each, in different states."""
    states = ("Running", "Running", "Running", "Recovering", "Pending", "Succeeded", "Failed")
    out = []
    for index in range(count):
        state = states[index % len(states)]
        one = job(f"sweep-{index:03}", state, replicas=workers)
        one["status"]["progress"] = {"step": 10 * index, "totalSteps": 10 * count, "curve": curve(5400)}
        one["status"]["summary"] |= {"step": str(10 * index), "progress": f"{100 * index // count}%", "loss": "0.42"}
        out.append(one)
    return out


def pods_of(one: Object, nodes: Sequence[str] = ("gpu-a", "gpu-b", "gpu-c")) -> list[Object]:
    """Return the pods of a job's members."""
    name = one["metadata"]["name"]
    return [
        {
            "metadata": {
                "name": f"{name}-worker-{member.slot}-{member.attempt}",
                "namespace": one["metadata"]["namespace"],
            },
            "spec": {"nodeName": nodes[index * len(nodes) // 12 % len(nodes)]},
            "status": {"phase": "Running"},
        }
        for index, member in enumerate(views.members(one["status"]["membership"]["members"]))
    ]


def event(seconds: float, kind: str, reason: str, text: str, count: int = 1) -> Object:
    """Return an event of a job."""
    return {"type": kind, "reason": reason, "note": text, "eventTime": at(seconds), "count": count}


def lines(worker: int, count: int = 40) -> bytes:
    """Return the log of a worker, with the kubelet's times."""
    out = []
    for index in range(count):
        seconds, step = 5400 - 3 * (count - index) + worker / 13, 31_700 + 18 * index
        stamp = (START + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        loss = 0.31 + 2.0 * math.exp(-step / 5200) + 0.02 * math.sin(index + worker)
        out.append(f"{stamp} " + _SCRIPT.format(step=step, loss=loss, speed=1015 + 6 * worker))
    return "".join(f"{one}\n" for one in out).encode()


@dataclass
class SampleJobs:
    """Implements Jobs with given objects. `asked` counts the requests by method, `trouble` is raised by each of them."""

    objects: list[Object]
    pods: Mapping[str, Sequence[Object]] = field(default_factory=dict)
    events: Mapping[str, Sequence[Object]] = field(default_factory=dict)
    output: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    """Logs of each job, by slot."""
    asked: list[str] = field(default_factory=list)
    trouble: Exception | None = None

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.trouble is not None:
            raise self.trouble

    def all(self) -> list[views.JobView]:
        self._ask("all")
        return [views.job_view(one) for one in self.objects]

    def look(self, job: str) -> views.JobView:
        return views.job_view(self.read(job), self.pods.get(job, ()), self.events.get(job, ()))

    def read(self, job: str) -> Object:
        self._ask(f"read {job}")
        for one in self.objects:
            if one["metadata"]["name"] == job:
                return one
        raise JobError(f"There is no job {job}.")

    def changes(self, job: str) -> Iterator[Object]:
        yield self.read(job)

    def change(self, job: str, verb: Verb, patch: Mapping[str, Any]) -> None:
        raise JobError(f"A sample changes nothing: {job}, {verb}, {patch}.")

    def delete(self, job: str) -> str:
        raise JobError(f"A sample deletes nothing: {job}.")

    def logs(self, job: str, wanted: Wanted, since_s: int | None = None) -> SampleLogs:  # noqa: ARG002 (all is shown)
        self._ask(f"logs {job}")
        return SampleLogs(self.output.get(job, ()), wanted.slot)


@dataclass(frozen=True)
class SampleLogs:
    """Implements Reader with given output."""

    output: Sequence[bytes]
    slot: int | None

    def logs(self) -> tuple[list[Log], bool]:
        chosen = range(len(self.output)) if self.slot is None else [self.slot]
        return [Log(str(slot), Worker(slot), slot) for slot in chosen if slot < len(self.output)], True

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Opened:  # noqa: ARG002
        kept = self.output[log.worker.slot].splitlines(keepends=True)
        return SampleLog(b"".join(kept if tail is None else kept[-tail:]))


@dataclass(frozen=True)
class SampleLog:
    """Implements Opened."""

    data: bytes

    def start(self) -> None:
        """Do nothing: the output is there."""

    def chunks(self) -> Iterator[bytes]:
        yield self.data

    def close(self) -> None:
        """Do nothing: nothing is open."""


def sample() -> SampleJobs:
    """Return the jobs of the pictures."""
    big = resnet()
    failed = job("bert-tiny", views.FAILED, replicas=4, exitCode=1, restarts={"total": 11})
    failed["status"]["conditions"] = [
        {"type": "Failed", "status": "True", "reason": "ScriptFailed", "message": "Worker 2 exited with code 1: "
         "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."}
    ]  # fmt: skip
    failed["status"]["summary"] |= {"step": "1200", "progress": "12%", "loss": "2.41"}
    failed["status"]["incidents"] = [incident(2, 900, "ProcessExited", "Worker 2 exited with code 1: torch.OutOfMemoryError: "
                                              "CUDA out of memory. Tried to allocate 2.00 GiB.", (4, 3))]  # fmt: skip
    small = job("digits", views.SUCCEEDED, replicas=2)
    small["status"]["summary"] |= {"step": "600", "progress": "100%", "loss": "0.0213"}
    small["status"]["progress"] = {"step": 600, "totalSteps": 600, "curve": curve(600, pace=1.0)}
    waiting = job("vit-large", "Pending", replicas=16)
    waiting["status"]["summary"] |= {"ready": "9/16"}
    waiting["status"]["conditions"] = [
        {"type": "PodsReady", "status": "False", "reason": "TooFewReady", "message": "9 workers ready, 16 needed (16 created, 7 "
         "pending)."}
    ]  # fmt: skip
    events = [
        event(0, "Normal", "Started", "Generation 1: 8 workers train."),
        event(1520, "Warning", "ProcessExited", "Worker 5 exited with code 139 (signal 11)."),
        event(3010, "Warning", "NodeLost", "Node gpu-b does not answer: workers 3, 4 and 5 are gone.", 3),
        event(4300, "Normal", "Resized", "Generation 6: 12 workers train."),
    ]
    return SampleJobs(
        [big, failed, small, waiting],
        {"resnet50": pods_of(big)},
        {"resnet50": events},
        {"resnet50": [lines(slot) for slot in range(12)]},
    )
