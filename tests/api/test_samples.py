"""The sample manifests: taken whole, accepted by the operator's own rules, and within Pod Security "restricted"."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from regroup_operator.api import parse_job
from regroup_operator.render import dry_run_pod
from regroup_operator.render.role import role_pod
from tests.api.conftest import ROOT, Api
from tests.api.test_rendered import SETTINGS, STRICT, restrict

SAMPLES = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))


@pytest.mark.parametrize("sample", SAMPLES, ids=[path.stem for path in SAMPLES])
def test_sample_is_accepted_in_a_restricted_namespace(api: Api, namespace: str, sample: Path) -> None:
    restrict(api, namespace)
    api.done("apply", f"--namespace={namespace}", "--validate=strict", f"--filename={sample}")
    (raw,) = api.get("dtj", f"--namespace={namespace}")["items"]
    job = parse_job(raw)
    pods = [dry_run_pod(job, settings=SETTINGS), *(role_pod(job, role.name, 0, 0) for role in job.spec.roles)]
    for pod in pods:
        api.done(*STRICT, "--dry-run=server", document=pod)


def test_there_is_a_sample_for_each_tier() -> None:
    names = {d["metadata"]["name"] for path in SAMPLES for d in yaml.safe_load_all(path.read_text())}
    assert {"digits", "script"} <= names
