"""A fault that comes after the end of a job under `regroup run` hits nothing; it is no error of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.job import JobError, NothingToHitError
from chaos.kinds import SESSION
from chaos.local import LocalJob
from chaos.plan import Scenario


@pytest.mark.parametrize(
    ("phase", "error"), [("Succeeded", NothingToHitError), ("Failed", NothingToHitError), (None, JobError)]
)
def test_resize_of_a_job_that_has_ended(tmp_path: Path, phase: str | None, error: type[Exception]) -> None:
    job = LocalJob(Scenario(SESSION, 1, 2, 1), tmp_path, 10, needs_disk=False)
    if phase:
        job.state.mkdir()
        (job.state / "job.json").write_text(json.dumps({"spec": {"replicas": 2}, "status": {"phase": phase}}))
    with pytest.raises(error, match=phase or "holds no job"):
        job.scale(1)
