"""Unmodified scripts on real pods: sizes, one that the script refuses, growth at a checkpoint, a signal before a change, progress.

Two jobs start together. One is as nanoGPT, whose lines a pattern reads. The other one wants to be told of a change, and reports its
progress by Kubeflow's protocol.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.kubectl import Kubectl, wait_until
from harness import traced_job
from harness.job import JobView
from harness.traced_job import TracedJob
from tests.e2e.columns import cells

SCRIPTS = Path(__file__).parent / "scripts"
_SMALL = {"resources": {"requests": {"cpu": "50m", "memory": "200Mi"}}}
pytestmark = pytest.mark.usefixtures("beside_samples")
MOST_LOST = 150
"""Iterations of 0.1 s between a checkpoint and the change of size, on a busy machine. Files settle for a second."""
_STARTS = re.compile(r"^rank 0 of (\d+) starts at (?:iter|step) (\d+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def started(operator: Kubectl, shared_namespace: str) -> dict[str, TracedJob]:
    """Both jobs, started together with two workers each."""
    options: dict[str, dict[str, Any]] = {
        "accumulates": {
            "elasticPolicy": {"minReplicas": 1, "maxReplicas": 6, "growAt": "Checkpoint"},
            "checkpoint": {"path": "/trace"},
            "progress": {"log": r"iter (?P<step>\d+)/(?P<total>\d+): loss (?P<loss>\S+),"},
        },
        "is-told": {
            "elasticPolicy": {"minReplicas": 2, "maxReplicas": 6, "sizeMultipleOf": 2},
            "recovery": {"gracefulStop": {"signal": "SIGUSR1", "seconds": 30}},
        },
    }
    return {
        name: traced_job.start(
            operator,
            shared_namespace,
            name,
            replicas=2,
            elastic=None,
            scripts=SCRIPTS,
            script=f"{name.replace('-', '_')}.py",
            container=_SMALL,
            **fields,
        )
        for name, fields in options.items()
    }


def _condition(job: JobView, kind: str) -> dict[str, Any]:
    return next((c for c in job.status().get("conditions", ()) if c["type"] == kind), {})


def _columns(job: JobView) -> dict[str, str]:
    return cells(job.kubectl.run("--namespace", job.namespace, "get", "trainingjobs", job.name))


def _step(job: JobView) -> int:
    return int(_columns(job)["STEP"] or 0)


def _starts(job: TracedJob) -> list[tuple[int, int]]:
    """Return (world size, first step) of each start of rank 0."""
    return [(int(world), int(step)) for world, step in _STARTS.findall(job.logs(f"{job.name}-worker-0-0"))]


def _trains(job: TracedJob, workers: int, after: int) -> int:
    """Wait until so many workers train in a generation above `after`; return its number."""
    ready = f"{workers}/{workers}"
    status = job.wait(
        120, f"{workers} train", state="Running", adopted=True, ready=ready, world_size=workers, generation=after + 1
    )
    return int(status["membership"]["generation"])


def _shows_progress(job: TracedJob, total: int) -> None:
    """Fail unless kubectl's columns show step, share and loss of the program, and they fit each other."""
    shown = wait_until(
        lambda: found if (found := _columns(job))["PROGRESS"] not in ("", "0%") else None, "progress", timeout_s=90
    )
    assert shown is not None
    step = int(shown["STEP"])
    assert int(shown["PROGRESS"].removesuffix("%")) == 100 * step // total, shown
    assert float(shown["LOSS"]) > 0, shown


def _grows_at_checkpoint(job: TracedJob) -> int:
    """Check that growth waits while training goes on, then have the script save. Return the iteration that was saved."""
    wait_until(lambda: _condition(job, "Degraded").get("reason") == "WaitingForCheckpoint", "it waits", timeout_s=90)
    generation, step = job.status()["membership"]["generation"], _step(job)
    wait_until(lambda: _step(job) >= step + 30, "training goes on", timeout_s=60)
    assert job.status()["membership"]["generation"] == generation, "it did not wait for a checkpoint"
    num_saved = len(_saved(job))
    (job.directory / "save").touch()
    wait_until(lambda: len(_saved(job)) > num_saved, "the script saves", timeout_s=30)
    return _saved(job)[-1]


def _saved(job: TracedJob) -> list[int]:
    return [int(step) for step in re.findall(r"^saved iter (\d+)$", job.logs(f"{job.name}-worker-0-0"), re.MULTILINE)]


def test_progress_is_shown_of_a_pattern_and_of_kubeflows_protocol(started: dict[str, TracedJob]) -> None:
    for name, (total, source) in {"accumulates": (5000, "Logged"), "is-told": (4000, "Reported")}.items():
        _shows_progress(started[name], total)
        assert started[name].status()["progress"]["source"] == source


def test_script_is_told_before_a_planned_change_and_grows_by_multiples(started: dict[str, TracedJob]) -> None:
    """It saves in place for two seconds after the signal. No step is lost, and no start finds half of a file."""
    job = started["is-told"]
    generation = _trains(job, 2, after=0)
    job.scale(5)
    _trains(job, 4, after=generation)
    wait_until(lambda: len(_starts(job)) == 2, "four have started", timeout_s=60)
    (told,) = re.findall(r"^told, saved step (\d+)$", job.logs("is-told-worker-0-0"), re.MULTILINE)
    assert _starts(job) == [(2, 0), (4, int(told))]
    assert len(job.pods()) == 4, "a pod is there for nothing"
    assert _condition(job, "Training")["message"].endswith(
        "4 is the largest size of spec.elasticPolicy.sizeMultipleOf up to spec.replicas (5)."
    )
    assert not (job.status().get("restarts") or {}).get("total")
    (job.directory / "end").touch()


def test_script_that_refuses_a_size_trains_on_with_the_size_before(started: dict[str, TracedJob]) -> None:
    job = started["accumulates"]
    job.wait(60, "two have trained", state="Running", ready="2/2")
    wait_until(lambda: job.status().get("lastGoodSize") == 2, "two have trained", timeout_s=60)
    job.scale(3)
    first = _grows_at_checkpoint(job)
    refused = wait_until(lambda: job.status().get("refusedSize"), "three workers are refused", timeout_s=90)
    assert refused is not None
    assert (refused["workers"], refused["backTo"]) == (3, 2)
    generation = _trains(job, 2, after=refused["generation"])
    said = _condition(job, "Degraded")
    assert (said["status"], said["reason"]) == ("True", "SizeRefused")
    assert "The script refuses 3 workers: it failed in every one of them" in said["message"]
    assert "AssertionError" in said["message"]
    step = _step(job)
    wait_until(lambda: _step(job) > max(step, first), "two train on", timeout_s=60)
    assert not (job.status().get("restarts") or {}).get("total"), "a refused size is no failure"

    job.patch(replicas=5, elasticPolicy={"sizes": [1, 2, 4]})
    second = _grows_at_checkpoint(job)
    _trains(job, 4, after=generation)
    wait_until(lambda: _starts(job)[-1][0] == 4, "four have started", timeout_s=60)
    assert _starts(job) == [(2, 0), (2, first), (4, second)]
    iterations = [int(step) for step in re.findall(r"^iter (\d+)/", job.logs("accumulates-worker-0-0"), re.MULTILINE)]
    lost = [one + 1 - other for one, other in pairwise(iterations) if other <= one]
    assert max(lost) <= MOST_LOST, f"iterations that were done again: {lost}"
    (job.directory / "end").touch()


def test_both_end(started: dict[str, TracedJob]) -> None:
    for job in started.values():
        job.wait(60, "the script ends", state="Succeeded")
