"""The status on a real API server: what we write comes back, and the columns show it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from regroup_operator.api import JobStatus, parse_job
from regroup_operator.api.conditions import TRAINING, set_condition
from regroup_operator.api.status import (
    CheckpointStatus,
    Incident,
    LineageEntry,
    Membership,
    OlderGeneration,
    Progress,
    Restarts,
    Samples,
    Store,
    Summary,
)
from tests.api.conftest import Api
from tests.builders.jobs import make_job

AT = "2026-01-01T00:00:00.250000Z"

FULL = JobStatus(
    observed_generation=1,
    observed_at=AT,
    phase="Running",
    start_time=AT,
    tier="Session",
    replicas=3,
    ready_replicas=3,
    selector="regroup.dev/job-name=digits",
    membership=Membership(
        generation=7,
        uid="9c",
        kind="forced",
        digest="ab",
        start_step=412,
        world_size=6,
        members="0-1,2.3",
        store=Store(host="10.98.1.4", port=41000, slot=0),
        older=[OlderGeneration(generation=6, uid="9b", members="0-2")],
        lost=["pod-uid"],
    ),
    released=["gone-uid"],
    lineage=[LineageEntry(generation=6, start_step=0), LineageEntry(generation=7, start_step=412)],
    progress=Progress(step=430, total_steps=1000, loss=0.25, samples_per_second=812.5, at=AT),
    checkpoint=CheckpointStatus(generation=6, step=400, directory="step-400.g6-9b", at=AT),
    restarts=Restarts(total=3, processes=2, pods=1, generations=6, recent=[AT]),
    samples=Samples(committed=110080, digest="77"),
    incidents=[Incident(generation=7, at=AT, decision="forced", cause="ProcessExited", detect_ms=3.5, steps_redone=1)],
    agent_image="example/operator:1",
    conditions=set_condition([], TRAINING, "True", "Training", "3.", AT, 1),
    summary=Summary(state="Running", ready="3/3", step="430", progress="43%", loss="0.250", eta="2m"),
)


@pytest.fixture
def job(api: Api, namespace: str) -> list[str]:
    """A stored job; the arguments that name it."""
    manifest = make_job()
    manifest["metadata"]["namespace"] = namespace
    api.done("create", "--filename=-", document=manifest)
    return ["trainingjobs", "digits", f"--namespace={namespace}"]


def write(job: list[str], status: dict[str, Any]) -> list[str]:
    return ["patch", *job, "--subresource=status", "--type=merge", f"--patch={json.dumps({'status': status})}"]


def test_whole_status_comes_back_as_it_was_written(api: Api, job: list[str]) -> None:
    api.done(*write(job, FULL.to_dict()))
    raw = api.get(*job)
    assert raw["status"] == FULL.to_dict()
    assert parse_job(raw).status == FULL


def test_what_a_newer_operator_writes_is_not_pruned(api: Api, job: list[str]) -> None:
    api.done(*write(job, {"membership": {**FULL.to_dict()["membership"], "later": {"a": [1]}}}))
    assert api.get(*job)["status"]["membership"]["later"] == {"a": [1]}


def test_status_is_not_written_with_the_spec(api: Api, job: list[str]) -> None:
    api.done("patch", *job, "--type=merge", f"--patch={json.dumps({'status': {'phase': 'Failed'}})}")
    assert "phase" not in api.get(*job)["status"]


def test_job_that_no_operator_has_seen_says_so(api: Api, job: list[str]) -> None:
    """There is no operator on this server: the column is the API server's own."""
    head, row = api.done("get", *job).splitlines()
    assert head.split()[:2] == ["NAME", "STATE"]
    assert row.split()[:2] == ["digits", "AwaitingOperator"]
    unseen = parse_job(api.get(*job)).status
    assert (unseen.phase, unseen.conditions, unseen.membership) == (None, [], None)
    api.done(*write(job, {"phase": "Pending", "summary": {"state": "Pending"}}))
    assert api.done("get", *job).splitlines()[1].split()[:2] == ["digits", "Pending"]


def test_unknown_phase_is_refused(api: Api, job: list[str]) -> None:
    said = api.refused(*write(job, {"phase": "Odd"}))
    assert 'status.phase: Unsupported value: "Odd"' in said


def test_wide_columns_show_the_status(api: Api, job: list[str]) -> None:
    api.done(*write(job, FULL.to_dict()))
    head, row = api.done("get", *job, "--output=wide").splitlines()
    names = "NAME STATE READY STEP PROGRESS LOSS RESTARTS ETA AGE SEEN GENERATION SAMPLES/S"
    assert head.split() == names.split()
    shown = dict(zip(names.split(), row.split(), strict=True))
    del shown["AGE"]
    assert re.fullmatch(r"\d+y\d*d?|\d+d", shown.pop("SEEN")), "observedAt is shown as its age"
    assert shown == {
        "NAME": "digits",
        "STATE": "Running",
        "READY": "3/3",
        "STEP": "430",
        "PROGRESS": "43%",
        "LOSS": "0.250",
        "RESTARTS": "3",
        "ETA": "2m",
        "GENERATION": "7",
        "SAMPLES/S": "812.5",
    }


def test_narrow_columns_are_those_that_fit(api: Api, job: list[str]) -> None:
    head = api.done("get", *job).splitlines()[0]
    assert head.split() == ["NAME", "STATE", "READY", "STEP", "PROGRESS", "LOSS", "RESTARTS", "ETA", "AGE", "SEEN"]
