"""The job's Service and ConfigMap."""

from __future__ import annotations

from regroup_operator.api import parse_job
from regroup_operator.api.names import worker_labels
from regroup_operator.render import config_map, service
from tests.builders.jobs import stored_job


def test_service_is_headless_and_names_workers_before_they_are_ready() -> None:
    made = service(parse_job(stored_job()))
    assert made is not None
    assert made["metadata"]["name"] == "digits"
    assert made["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": worker_labels("digits"),
    }


def test_job_that_wants_no_names_has_no_service() -> None:
    assert service(parse_job(stored_job(network={"podNames": False}))) is None


def test_config_map_carries_the_ca_bundle_and_goes_with_the_job() -> None:
    made = config_map(parse_job(stored_job()), "PEM")
    assert (made["metadata"]["name"], made["data"]) == ("digits-regroup", {"ca.crt": "PEM"})
    assert made["metadata"]["ownerReferences"][0]["uid"] == "1f4a-uid"
