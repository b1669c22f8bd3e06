"""Models whose weights lie in memory in another order than usual, summed over real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import finish, run_alone, start
from tests.trainer.zygote import Zygote


@pytest.fixture
def job(tmp_path: Path, zygote: Zygote) -> Iterator[AgentDouble]:
    """Workers whose convolutions lie in memory as TEST_FORMAT says."""
    double = AgentDouble(tmp_path, zygote, Path(__file__).parent / "strides_job.py", {})
    yield double
    double.close()


def test_channels_last_and_a_fused_optimizer_train_on_two_ranks_as_one_contiguous_rank_does(job: AgentDouble) -> None:
    start(job, 2, TEST_FORMAT="channels_last")
    ends = finish(job, [0, 1])
    alone = run_alone(job, TEST_FORMAT="contiguous_format")
    assert [end["strides"] for end in (*ends, alone)] == [[27, 1, 9, 3]] * 2 + [[27, 9, 3, 1]]
    assert ends[0]["losses"] == ends[1]["losses"]
    assert ends[0]["losses"] == pytest.approx(alone["losses"], rel=1e-2)
    assert alone["losses"][-1] < 0.5 * alone["losses"][0]


def test_ranks_whose_parameters_lie_in_different_orders_are_refused(job: AgentDouble) -> None:
    job.start(0, TEST_FORMAT="channels_last")
    job.start(1, TEST_FORMAT="contiguous_format")
    job.wait_attached(0, 1)
    job.announce(range(2))
    job.wait_exit(0, 1)
    for worker in job.everyone:
        assert "The parameters of rank 0 and of rank 1 lie in memory in different orders" in worker.log, worker.log
