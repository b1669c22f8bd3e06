"""A batch that follows the number of ranks: no sample twice or never, through a kill and a growth."""

import pytest

from regroup.data import SamplePlan
from regroup.protocol import env, local
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import assert_one_state, finish, start

PER_RANK = 8


@pytest.mark.parametrize("data", ["tensors", "loader"])
def test_samples_are_used_in_turn_while_ranks_come_and_go(job: AgentDouble, data: str) -> None:
    settings = {"TEST_PER_RANK": str(PER_RANK), "TEST_DATA": data, env.MAX_WORLD_SIZE: "3"}
    start(job, 3, **settings)
    job.wait_step(1, 10, range(3))
    job.kill(1)
    job.announce([0, 2], lost=[job.workers[1].pod_uid])
    job.wait_step(2, 20, [0, 2])
    job.start(3, TEST_INIT="13", **settings)
    job.wait_attached(3)
    job.announce([0, 2, 3])
    job.wait_step(3, 30, [0, 2, 3])
    assert_one_state(finish(job, [0, 2, 3]))
    reports = [message for worker in job.everyone for message in worker.messages(local.Committed)]
    assert {report.generation for report in reports} == {1, 2, 3}
    sizes = {1: 3 * PER_RANK, 2: 2 * PER_RANK, 3: 3 * PER_RANK}
    starts = {g: job.workers[0].messages(local.AdoptedLocally, g)[0].start_step for g in sizes}
    first = {1: 0, 2: starts[2] * sizes[1]}
    first[3] = first[2] + (starts[3] - starts[2]) * sizes[2]
    # The same samples in turn, four at a time. The loader does not shuffle.
    plan = SamplePlan(0, 1000, 4, 4, shuffles=data == "tensors")
    for report in reports:
        generation = report.generation
        assert report.samples == first[generation] + (report.reportable_step - starts[generation]) * sizes[generation]
        assert report.digest == plan.digest(report.samples // 4)
