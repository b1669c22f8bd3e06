"""Which logs the tour reads, and until when it waits for a line of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from cluster.errors import ClusterError
from cluster.kubectl import NotYetError
from demo.follow import to_read
from demo.tour import outcome
from harness.job import JobView

LINE = "held-out accuracy 0.9778  parameters sha256 be2e611b2326\n"


@pytest.mark.parametrize(
    ("phase", "read", "wanted"),
    [
        pytest.param("Pending", {}, [], id="nothing is printed before the container runs"),
        pytest.param("Running", {}, ["a"], id="a pod that runs is read"),
        pytest.param("Running", {"a": None}, [], id="once at a time"),
        pytest.param("Running", {"a": 1}, ["a"], id="again after the node was without power"),
        pytest.param("Running", {"a": 0}, ["a"], id="again after its container has started again"),
        pytest.param("Succeeded", {}, ["a"], id="one that has ended between two looks is read, too"),
        pytest.param("Succeeded", {"a": 1}, ["a"], id="one that has ended while its log could not be read"),
        pytest.param("Succeeded", {"a": 0}, [], id="one that has ended is read once"),
    ],
)
def test_logs_that_are_read(phase: str, read: dict[str, int | None], wanted: list[str]) -> None:
    assert to_read([{"metadata": {"name": "a"}, "status": {"phase": phase}}], read) == wanted


@dataclass
class Logs:
    """A job that has succeeded; `answers`: what the API server says of each pod's log, one after the other. None: nothing yet."""

    answers: dict[str, list[str | None]]
    name: str = "digits"
    asked: list[str] = field(default_factory=list)

    def pods(self) -> list[dict[str, Any]]:
        return [{"metadata": {"name": name}} for name in self.answers]

    def logs(self, pod: str) -> str:
        self.asked.append(pod)
        answers = self.answers[pod]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            raise NotYetError(f"GET log of {pod}: 502")
        return answer


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param({"w0": ["step 1600\n", "step 1600\n" + LINE]}, id="the runtime writes the line later"),
        pytest.param({"w0": [None, LINE]}, id="the log cannot be read at first"),
        pytest.param({"w0": [None], "w1": [LINE]}, id="a log that cannot be read hides no other"),
    ],
)
def test_accuracy_is_waited_for(answers: dict[str, list[str | None]]) -> None:
    assert outcome(cast(JobView, Logs(answers)), every_s=0.0) == (0.9778, "be2e611b2326")


def test_accuracy_that_never_comes_is_named() -> None:
    with pytest.raises(ClusterError, match="a pod of digits has the accuracy in its log: kubectl -n tour logs"):
        outcome(cast(JobView, Logs({"w0": ["step 1600\n"]})), timeout_s=0.0, every_s=0.0)
