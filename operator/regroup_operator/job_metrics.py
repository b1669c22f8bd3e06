"""Metrics of the jobs, read from their statuses when Prometheus asks. So a job that is gone leaves no series.

The counts by phase are of all jobs together. Each job has series of its own only with `perJobMetrics`, since Prometheus
keeps the series of every job that ever was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from regroup_operator.api import is_ours
from regroup_operator.api.conditions import ACCEPTED, CHECKPOINTS_SAVED, SNAPSHOTS_TAKEN

Jobs = Callable[[], Iterable[Mapping[str, Any]]]
"""Returns the objects of all jobs, as last known."""

PHASES = (
    "Pending",
    "Starting",
    "Running",
    "Recovering",
    "Waiting",
    "Finishing",
    "Completing",
    "Suspending",
    "Suspended",
    "Succeeded",
    "Failed",
)
"""Phases with a series at all times. A phase without jobs is 0, so that an alert on it can be written before its first job."""


class JobMetrics(Collector):
    """Reads the jobs when Prometheus asks, in O(jobs)."""

    def __init__(self, jobs: Jobs, *, per_job: bool) -> None:
        self._jobs, self._per_job = jobs, per_job

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families."""
        jobs = [job for job in self._jobs() if is_ours(job)]
        by_phase = GaugeMetricFamily("regroup_jobs", "Jobs by phase.", labels=["phase"])
        counts = Counter(one_of(PHASES, (job.get("status") or {}).get("phase") or "Pending") for job in jobs)
        for phase in (*PHASES, *sorted(counts.keys() - set(PHASES))):
            by_phase.add_metric([phase], counts[phase])
        yield by_phase
        in_trouble = GaugeMetricFamily(
            "regroup_jobs_in_trouble",
            "Jobs that have not ended and are not Accepted, or whose workers save no checkpoints or snapshots, by reason.",
            labels=["condition", "reason"],
        )
        for (kind, reason), count in sorted(Counter(found for job in jobs for found in _false_conditions(job)).items()):
            in_trouble.add_metric([kind, reason], count)
        yield in_trouble
        known = [status["goodput"]["percent"] for job in jobs if "goodput" in (status := running_status(job))]
        if known:
            text = "Mean over running jobs of the share of their time that went into steps that count."
            yield GaugeMetricFamily("regroup_goodput_ratio", text, value=sum(known) / len(known) / 100)
        if self._per_job:
            yield from _each(jobs)


REASONS = (
    "InvalidSpec", "InvalidTemplate", "PodSecurity", "NameTaken", "CreateFailed", "NotSaved", "Waiting", "NotTaken"
)  # fmt: skip
"""Reasons of the conditions that `regroup_jobs_in_trouble` counts while they are False."""


def running_status(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of a job that is running or recovering, else an empty one."""
    status: Mapping[str, Any] = job.get("status") or {}
    return status if status.get("phase") in ("Running", "Recovering") else {}


def _false_conditions(job: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield type and reason of each condition that reports a fault beside the training."""
    status = job.get("status") or {}
    phase = status.get("phase")
    if phase in ("Succeeded", "Failed"):
        return
    has_workers = phase in ("Starting", "Running", "Recovering", "Waiting")
    judged = (ACCEPTED, CHECKPOINTS_SAVED, SNAPSHOTS_TAKEN) if has_workers else (ACCEPTED,)
    for one in status.get("conditions") or ():
        if one["type"] in judged and one["status"] == "False":
            yield one["type"], one_of(REASONS, one["reason"])


def one_of(known: Collection[str], word: str) -> str:
    """Return the label for a word of a status: the word itself, or `Unknown`.

    Prometheus keeps a series for each value that it ever saw. A client that may write statuses could make any number of
    them.
    """
    return word if word in known else "Unknown"


_OF_A_JOB: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Any]], ...] = (
    ("step", "Last committed step.", lambda status: (status.get("progress") or {}).get("step")),
    ("loss", "Loss of that step.", lambda status: (status.get("progress") or {}).get("loss")),
    (
        "samples_per_second",
        "Committed samples per second.",
        lambda status: _rate(status),
    ),
    ("ready_workers", "Workers that are ready.", lambda status: status.get("readyReplicas")),
    ("generation", "Newest generation.", lambda status: (status.get("membership") or {}).get("generation")),
    (
        "restarts",
        "Processes and pods that had to start again.",
        lambda status: (status.get("restarts") or {}).get("total"),
    ),
    ("goodput_ratio", "Share of the job's time that went into steps that count.", lambda status: _ratio(status)),
)


def _rate(status: Mapping[str, Any]) -> float | None:
    """Return the samples per second; 0 if the job does not run any more, None if it has not reported any."""
    rate: float | None = (status.get("progress") or {}).get("samplesPerSecond")
    return rate if rate is None or running_status({"status": status}) else 0.0


def _ratio(status: Mapping[str, Any]) -> float | None:
    goodput = status.get("goodput")
    return None if goodput is None else goodput["percent"] / 100


def _each(jobs: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
    jobs = list(jobs)
    for name, text, value_of in _OF_A_JOB:
        family = GaugeMetricFamily(f"regroup_job_{name}", text, labels=["namespace", "job"])
        for job in jobs:
            value = value_of(job.get("status") or {})
            if value is not None:
                family.add_metric([job["metadata"]["namespace"], job["metadata"]["name"]], float(value))
        yield family
