"""The jobs that end-to-end tests share: a job that no longer trains fails the next test, unless its last test failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster import paths
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl
from tests.e2e.shared import SharedJobs

KIND = "script"
"""Its trace alone says that it trains."""


class Edge(Kubectl):
    """The API server's answers: a job that is applied trains at once, until it is `stuck`."""

    def __init__(self) -> None:
        super().__init__(None)
        self.deleted: list[str] = []
        self.stuck = False

    def apply(self, *documents: dict[str, Any]) -> None:
        for document in documents:
            if document["kind"] == "DistributedTrainingJob":
                _train(document["metadata"]["namespace"], document["metadata"]["name"])

    def run(self, *arguments: str, text: str | None = None, timeout_s: float = 60) -> str:  # noqa: ARG002
        if "delete" in arguments and "pods" not in arguments:
            self.deleted.append(arguments[-2])
        return ""

    def read(self, path: str, **query: str) -> str:  # noqa: ARG002
        if self.stuck:
            raise ClusterError("it does not train")
        return json.dumps({"spec": {"replicas": 3}})


def _train(namespace: str, name: str) -> None:
    directory = paths.cache() / "volumes" / namespace / f"{name}-trace"
    for rank, pod in enumerate("abc"):
        commits = [
            {"event": "commit", "t": step, "pod": pod, "pid": 7, "rank": rank, "generation": 1, "step": step}
            for step in range(12)
        ]
        (directory / f"{pod}.jsonl").write_text("".join(json.dumps(c) + "\n" for c in commits))


@pytest.fixture
def edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edge:
    monkeypatch.setenv("REGROUP_CLUSTER_DIR", str(tmp_path / "cluster"))
    return Edge()


def took(jobs: SharedJobs, test: str) -> str:
    """Return the name of the job that a test gets."""
    jobs.test = test
    (job,) = jobs.take(KIND)
    return job.name


def test_job_is_shared_as_long_as_its_tests_pass(edge: Edge) -> None:
    jobs = SharedJobs(edge, "ours", failed=set())
    assert took(jobs, "first") == took(jobs, "second") == took(jobs, "third")
    assert edge.deleted == []


def test_job_of_a_failed_test_is_replaced_and_only_that_one(edge: Edge) -> None:
    failed: set[str] = set()
    jobs = SharedJobs(edge, "ours", failed)
    first = took(jobs, "first")
    failed.add("first")
    second = took(jobs, "second")
    assert (edge.deleted, second != first) == ([first], True)
    assert took(jobs, "third") == second
    assert edge.deleted == [first]


def test_job_that_does_not_train_after_a_test_that_passed_fails_the_next_and_stays(edge: Edge) -> None:
    failed: set[str] = set()
    jobs = SharedJobs(edge, "ours", failed)
    first = took(jobs, "first")
    edge.stuck = True
    with pytest.raises(
        ClusterError, match="The script job does not train with all its workers after first, which passed"
    ):
        took(jobs, "second")
    assert edge.deleted == []
    edge.stuck = False
    failed.add("second")
    assert took(jobs, "third") != first, "the second test failed, so that the third gets another job"


def test_job_that_does_not_train_after_its_start_fails_its_test(edge: Edge) -> None:
    edge.stuck = True
    with pytest.raises(ClusterError, match="after its start: it does not train"):
        took(SharedJobs(edge, "ours", failed=set()), "first")
