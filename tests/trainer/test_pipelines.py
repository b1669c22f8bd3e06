"""Models whose layers are split over a pipeline, with real processes over gloo: equal to one process, through kills and resizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.split_kit import SplitJob
from tests.trainer.test_model_groups import STEPS, Whole, alone, assert_close
from tests.trainer.zygote import Zygote

__all__ = ["alone"]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]


@pytest.fixture
def make(tmp_path: Path, zygote: Zygote) -> Iterator[Callable[..., SplitJob]]:
    """Make a job by its mesh and schedule. It is ended after the test."""
    jobs: list[SplitJob] = []

    def made(mesh: str, schedule: str, **environment: str) -> SplitJob:
        values = {"TEST_STEPS": STEPS, "TEST_SCHEDULE": schedule, **environment}
        jobs.append(SplitJob(tmp_path / str(len(jobs)), zygote, mesh, **values))
        return jobs[-1]

    yield made
    for one in jobs:
        one.close()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_learns_what_one_process_does(
    make: Callable[..., SplitJob],
    alone: Callable[[str], tuple[list[float], Whole]],
    schedule: str,
    ranks: int,
    optimizer: str,
) -> None:
    losses, reference = alone(optimizer)
    job = make("pipeline=2", schedule, TEST_OPTIMIZER=optimizer, TEST_PACE="0")
    job.start(range(ranks))
    job.agents.announce(range(ranks))
    ends, whole = job.finish(range(ranks))
    for end in ends:
        assert end["same_model"]
        assert list(end["losses"].values()) == pytest.approx(losses, abs=1e-6)
        assert end["losses"] == ends[0]["losses"]
    assert whole.keys() == reference.keys()
    assert_close(whole, reference)
