"""Which refusals of the API server are verdicts on the job, and what the user reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from regroup_operator.api import Job, parse_job
from regroup_operator.kube.client import ApiConflict, ApiNotFound, Resource, error_of
from regroup_operator.kube.cluster_workers import ClusterWorkers, contains, refusal_of
from regroup_operator.kube.pods import PodStore
from regroup_operator.render import Renderer, RenderSettings
from tests.builders.jobs import stored_job


def status(code: int, reason: str, message: str) -> bytes:
    return json.dumps({"kind": "Status", "code": code, "reason": reason, "message": message}).encode()


@pytest.mark.parametrize(
    ("code", "reason", "message", "want"),
    [
        pytest.param(
            400,
            "BadRequest",
            'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field '
            '"spec.containers[0].imagePulPolicy"',
            'spec.template is not a pod: unknown field "spec.template.spec.containers[0].imagePulPolicy". Correct it.',
            id="a typo names the field where the user finds it",
        ),
        pytest.param(
            422,
            "Invalid",
            'Pod "d-dry-run-x" is invalid: spec.containers[0].image: Required value',
            "spec.template is refused: spec.template.spec.containers[0].image: Required value. Correct it.",
            id="an invalid value names the field and the rule",
        ),
        pytest.param(
            403,
            "Forbidden",
            'pods "d" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true (pod must set it)',
            "spec.template breaks Pod Security restricted:latest of namespace team: runAsNonRoot != true (pod must set it). "
            "Set these fields in spec.template, or use another namespace.",
            id="Pod Security says what to set",
        ),
    ],
)
def test_verdict_on_the_template_is_one_sentence(code: int, reason: str, message: str, want: str) -> None:
    refusal = refusal_of(error_of(code, status(code, reason, message)), "team")
    assert str(refusal) == want


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        pytest.param(403, "Forbidden", 'pods "d" is forbidden: exceeded quota: gpus', id="a quota is no verdict"),
        pytest.param(403, "Forbidden", 'pods is forbidden: User "x" cannot create', id="missing rights are no verdict"),
        pytest.param(
            400,
            "BadRequest",
            'admission webhook "a.b" does not support dry run',
            id="a webhook without dry run is none",
        ),
        pytest.param(500, "InternalError", "failed calling webhook", id="a failing webhook is none"),
        pytest.param(504, "Timeout", "request did not complete", id="a time-out is none"),
        pytest.param(429, "TooManyRequests", "slow down", id="being asked to slow down is none"),
    ],
)
def test_everything_else_is_no_verdict(code: int, reason: str, message: str) -> None:
    assert refusal_of(error_of(code, status(code, reason, message)), "team") is None


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": {"x": 1, "default": True}}, {"a": {"x": 1}}, True),
        ({"a": [{"x": 1, "default": True}]}, {"a": [{"x": 1}]}, True),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": None}, {"a": {}}, False),
    ],
)
def test_contains_ignores_what_the_api_server_added(found: Any, wanted: Any, same: bool) -> None:
    assert contains(found, wanted) is same


class Requests:
    """The verbs that prepare a job, on objects by plural."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any]:  # noqa: ARG002
        self.calls.append(f"get {resource.plural}")
        if resource.plural not in self.objects:
            raise ApiNotFound(404, "NotFound", "")
        return self.objects[resource.plural]

    async def create(self, resource: Resource, namespace: str, body: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        self.calls.append(f"create {resource.plural}")
        if resource.plural in self.objects:
            raise ApiConflict(409, "AlreadyExists", "")
        self.objects[resource.plural] = body
        return body


def test_what_a_new_job_has_once_is_not_looked_for_before_it_is_made() -> None:
    """Of each of hundreds of jobs that are created at once it would be two requests; one that has started has it already."""
    requests = Requests()
    rendering = Renderer(RenderSettings("https://regroup:8443", "agent:1"), lambda: "CA")

    def prepare(job: Job) -> list[str]:
        """Prepare it as an operator that has just begun to lead."""
        requests.calls.clear()
        client: Any = requests
        asyncio.run(ClusterWorkers(client, PodStore(client), rendering).prepare(job))
        return requests.calls

    assert prepare(parse_job(stored_job())) == ["create services", "create configmaps"]
    assert prepare(parse_job(stored_job())) == [
        *("create services", "get services"),
        *("create configmaps", "get configmaps"),
    ]
    started = parse_job({**stored_job(), "status": {"startTime": "2026-01-01T00:00:00Z"}})
    assert prepare(started) == ["get services", "get configmaps"]
    assert prepare(parse_job(stored_job(network={"podNames": False}))) == ["create configmaps", "get configmaps"]
