"""Names: what one function builds, its partner reads back."""

from __future__ import annotations

import pytest

from regroup_operator.api import names


@pytest.mark.parametrize(("job", "slot", "attempt"), [("digits", 0, 0), ("a-worker-1-2", 12, 3), ("x", 4999, 10)])
def test_worker_pod_name_is_read_back(job: str, slot: int, attempt: int) -> None:
    assert names.parse_worker_pod_name(names.worker_pod_name(job, slot, attempt)) == (job, slot, attempt)


@pytest.mark.parametrize(
    "other", ["digits", "digits-worker-0", "digits-worker-a-0", "digits-worker-00-1", "worker-0-0"]
)
def test_other_pod_names_are_not_workers(other: str) -> None:
    assert names.parse_worker_pod_name(other) is None


def test_longest_names_fit_a_label() -> None:
    assert len(names.worker_pod_name("a" * names.MAX_JOB_NAME, 4999, 9999)) <= 63
    assert names.selector("digits") == "regroup.dev/job-name=digits,regroup.dev/role=worker"


def test_name_of_a_roles_pod_is_read_back_and_is_no_workers() -> None:
    name = names.role_pod_name("my-digits", "ps", 3, 12)
    assert name == "my-digits-ps-3-12"
    assert names.parse_role_pod_name(name) == ("my-digits", "ps", 3, 12)
    assert names.parse_worker_pod_name(name) is None
    assert names.parse_role_pod_name(names.worker_pod_name("digits", 0, 1)) is None
    assert names.parse_role_pod_name("digits-ps-0") is None
    assert len(names.role_host_name("a" * 45, "b" * 12, 63)) <= 63
