"""What the start of a job costs the API server, counted on the wire between it and the operator."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from regroup_operator.plan.report.urgency import STARTING_S
from tests.api.conftest import Api
from tests.api.edge import Passed
from tests.api.trained import is_status, trained

START_S = 2.0
"""From a pod's being called running to its process at most, which is not seen here."""


@pytest.mark.parametrize("replicas", [1, 8])
def test_start_costs_three_writes_and_one_request_a_pod(api: Api, tmp_path: Path, replicas: int) -> None:
    namespace = f"requests-{replicas}"
    with trained(api, tmp_path, namespace, replicas) as (world, kubelet):
        world.trains(replicas)
        # The test is the kubelet, and starts one pod after the other.
        waited_s = time.monotonic() - min(float(note["at"]) for note in kubelet.noted("started"))
        writes = sum(is_status(p) for p in world.wire.passed)
        counted = Counter(_name(p) for p in world.wire.passed if namespace in p.path and not is_status(p))
        reviews = sum("tokenreviews" in p.path for p in world.wire.passed)
        print(f"{replicas} workers in {waited_s:.1f} s: {writes} writes, {reviews} reviews, {dict(counted)}")
        assert 3 <= writes <= 3 + (waited_s + START_S) / STARTING_S
        assert reviews == 0
        assert counted == {
            "POST pods": replicas + 1,  # one of them is the dry run that judges the template
            "POST services": 1,
            "POST configmaps": 1,
            "POST events": 1,
        }


def _name(request: Passed) -> str:
    parts = request.path.partition("?")[0].split("/")
    return f"{request.method} {parts[parts.index('namespaces') + 2]}"
