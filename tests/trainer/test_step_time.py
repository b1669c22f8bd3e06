"""A job says which worker the others wait for, and what it does meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.local_run import LocalRun

SCRIPT = Path(__file__).parent / "lopsided_job.py"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    one = LocalRun(tmp_path, "--workers", "2", str(SCRIPT))
    yield one
    one.close()


def test_status_names_the_worker_that_fetches_slowly(run: LocalRun) -> None:
    def said(status: dict[str, object]) -> bool:
        progress = status.get("progress")
        return isinstance(progress, dict) and "slowest" in progress.get("stepTime", "")

    step_time = run.wait(said, "the slowest worker")["progress"]["stepTime"]
    assert re.fullmatch(
        r"\d+ ms: .*waits \d+ %.* \(worker 1 is slowest: fetching data (5|6|7|8|9)\d ms\)", step_time
    ), step_time
