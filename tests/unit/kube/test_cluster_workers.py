"""Which refusals of the API server are verdicts on the job, and what the user reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from regroup_operator.kube.client import error_of
from regroup_operator.kube.cluster_workers import contains, refusal_of


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
