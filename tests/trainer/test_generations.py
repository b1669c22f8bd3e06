"""Generations with real processes over gloo: form, break, redo, grow, shrink. The agent is a double, the trainers are real."""

import pytest

from regroup.protocol import local
from regroup.protocol.document import PLANNED
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import assert_one_state, finish, job, start, zygote

__all__ = ["job", "zygote"]  # fixtures


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_group_forms_and_finishes_with_one_state(job: AgentDouble, world_size: int) -> None:
    start(job, world_size)
    job.go()
    ends = finish(job, list(range(world_size)))
    assert_one_state(ends)
    for worker in job.workers.values():
        steps = [m.step for m in worker.messages(local.Committed) if m.loss is not None]
        assert steps == list(range(1, 601))
        assert worker.messages(local.Committed)[-1].reportable_step == 600
        assert worker.messages(local.AdoptedLocally)[0].source == "nothing"


@pytest.mark.parametrize("victim", [0, 1, 3], ids=["the store's host, rank 0", "a middle rank", "the last rank"])
def test_survivors_redo_at_most_one_step_after_sigkill(job: AgentDouble, victim: int) -> None:
    start(job, 4)
    job.wait_step(1, 10, range(4))
    job.kill(victim)
    survivors = [slot for slot in range(4) if slot != victim]
    job.announce(survivors, lost=[job.workers[victim].pod_uid])
    job.first_commit(2, survivors)
    job.start(victim)
    job.wait_attached(victim)
    job.announce(range(4), PLANNED)
    job.first_commit(3, range(4))
    assert_one_state(finish(job, [0, 1, 2, 3]))
    for slot in survivors:
        commits = [m for m in job.workers[slot].messages(local.Committed) if m.loss is not None]
        assert [m.step for m in commits ] == sorted({m.step for m in commits})
        assert all(m.steps_redone <= 1 for m in commits)


def test_planned_growth_and_shrink_leave_at_a_cut(job: AgentDouble) -> None:
    start(job, 2)
    job.wait_step(1, 10, range(2))
    job.start(2)
    job.wait_attached(2)
    job.announce(range(3), PLANNED)
    job.wait_step(2, 0, range(3))
    job.announce([0, 2], PLANNED)
    job.wait_step(3, 0, [0, 2])
    ends = finish(job, [0, 2])
    assert_one_state(ends)
    assert [m.steps_redone for m in job.workers[0].messages(local.Committed) if m.steps_redone] == []
    left = job.workers[1].messages(local.Left)
    assert [m.cause for m in left] == [None]
    assert left[-1].state is not None
    assert job.workers[0].messages(local.Left) == []
