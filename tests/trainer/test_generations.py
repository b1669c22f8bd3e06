"""Generations with real processes over gloo: form, break, redo, grow, shrink. The agent is a double, the trainers are real."""

import socket

import pytest

from harness.processes import alive
from regroup.protocol import local
from regroup.protocol.document import PLANNED
from tests.trainer.agent_double import AgentDouble, Worker
from tests.trainer.elastic_kit import STEPS, assert_one_state, finish, start


def commits_of(worker: Worker) -> list[local.Committed]:
    """Return what was said at each commit. Who adopts says no loss; the end says the last step again, as certain."""
    said: list[local.Committed] = worker.messages(local.Committed)
    return [m for m in said if m.loss is not None and m.reportable_step < m.step]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_group_forms_and_finishes_with_one_state(job: AgentDouble, world_size: int) -> None:
    start(job, world_size)
    job.go()
    ends = finish(job, list(range(world_size)))
    assert_one_state(ends)
    for worker in job.workers.values():
        commits = commits_of(worker)
        # Not each commit is said (generation/outbox.py): the first, the last, and the newest every 50 ms.
        said = [m.step for m in commits]
        assert said == sorted(set(said))
        assert (said[0], said[-1]) == (1, STEPS)
        # Rule ACK: a commit is certain once the next one is; before that, a rank may be without it.
        assert [m.reportable_step for m in commits] == [step - 1 for step in said]
        assert worker.messages(local.Committed)[-1].reportable_step == STEPS
        assert worker.messages(local.AdoptedLocally)[0].source == "nothing"


@pytest.mark.parametrize("victim", [0, 1, 3], ids=["rank 0", "the store's host", "the last rank"])
def test_survivors_redo_at_most_one_step_after_sigkill(job: AgentDouble, victim: int) -> None:
    start(job, 4)
    job.wait_step(1, 10, range(4))
    assert job.documents[0].store.pod_uid == job.workers[1].pod_uid, "the store's host is not rank 0"
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
        commits = commits_of(job.workers[slot])
        assert [m.step for m in commits] == sorted({m.step for m in commits})
        assert next(m.steps_redone for m in commits if m.generation == 2) <= 1
        assert all(m.steps_redone == 0 for m in commits if m.generation != 2)


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


def test_collective_block_is_repeated_by_those_that_were_in_it(job: AgentDouble) -> None:
    """Killed in mid-evaluation; then a joiner comes in while the others evaluate: it takes no part in that."""
    settings = {"TEST_EVAL": "1", "TEST_STEPS": "200"}
    start(job, 3, **settings)
    job.wait_step(1, 6, range(3))  # step 5 is committed, its evaluation has begun
    job.kill(1)
    job.start(3, **settings)
    job.announce([0, 2], lost=[job.workers[1].pod_uid])
    job.wait_step(2, 12, [0, 2])
    job.wait_attached(3)
    step = max(m.step for m in job.workers[0].messages(local.Committed))
    job.wait_step(2, (step // 5 + 1) * 5 + 1, [0, 2])
    job.announce([0, 2, 3])  # forced, so that it does not wait for the end of the evaluation
    job.first_commit(3, [0, 2, 3])
    ends = finish(job, [0, 2, 3])
    assert_one_state(ends)
    for end in ends:
        assert [index for index, _, _ in end["evaluations"]] == sorted({index for index, _, _ in end["evaluations"]})
        assert all(total == 2 * size for _, size, total in end["evaluations"])
    assert ends[0]["evaluations"] == ends[1]["evaluations"]
    assert [size for _, size, _ in ends[0]["evaluations"]][-1] == 3


def test_generation_that_interrupts_an_evaluation_after_the_cut_is_the_one_to_train_in(job: AgentDouble) -> None:
    """All ranks know of a planned generation, so they leave after step 5; but a forced one comes before they are gone."""
    start(job, 2, TEST_EVAL="1", TEST_STEP_WAIT="1:5", TEST_EVAL_WAIT="1:5", TEST_STEPS="60")
    job.wait_step(1, 5, range(2))
    job.announce(range(2), PLANNED)
    job.wait_step(1, 6, range(2))
    job.announce(range(2), older=[1])
    job.first_commit(3, range(2))
    ends = finish(job, [0, 1])
    assert_one_state(ends)
    assert [end["evaluations"][1] for end in ends] == [[5, 2, 4.0]] * 2


def test_blocks_before_the_loop_and_in_it_are_not_one(job: AgentDouble) -> None:
    """A process that is restarted in place repeats the block before its loop, while the others repeat an evaluation."""
    settings = {"TEST_BEFORE": "1", "TEST_EVAL": "1", "TEST_EVAL_WAIT": "1:5", "TEST_STEPS": "60"}
    start(job, 3, **settings)
    job.wait_step(1, 6, range(3))
    job.kill(1)
    job.wait_exit(1)
    job.run(1, **settings)
    job.wait_attached(1)
    job.announce(range(3))
    job.first_commit(2, range(3))
    ends = finish(job, [0, 1, 2])
    assert_one_state(ends)
    assert [end["before"] for end in ends] == [[3, 300.0], [1, 100.0], [3, 300.0]]
    assert ends[0]["evaluations"][:3] == [[0, 3, 6.0], [5, 2, 4.0], [10, 3, 6.0]]


def test_replacement_joins_a_job_whose_script_broke_out_of_its_loop(job: AgentDouble) -> None:
    start(job, 2, TEST_BREAK="20")
    job.wait_finished(0, 1)
    job.kill(1)
    gone = job.workers[1].pod_uid
    job.start(1, TEST_BREAK="20")
    job.wait_attached(1)
    job.announce(range(2), lost=[gone])
    ends = finish(job, [0, 1])
    assert_one_state(ends)
    assert [worker.messages(local.FinishedLocally)[-1].step for worker in job.workers.values()] == [21, 21]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("session", "regroup.session() was called a second time in this process"),
        ("block", 'job.collective("final") comes after the loop'),
    ],
)
def test_script_that_asks_for_too_much_is_told_so(job: AgentDouble, what: str, sentence: str) -> None:
    start(job, 1, TEST_SECOND=what, TEST_STEPS="3")
    if what == "block":
        job.wait_finished(0)
        job.finish()
    job.wait_exit(0)
    assert sentence in job.workers[0].log


def test_trainer_ends_with_its_agent(job: AgentDouble) -> None:
    start(job, 2)
    job.wait_step(1, 5, range(2))
    connection = job.workers[0].connection
    assert connection is not None
    connection.shutdown(socket.SHUT_RDWR)
    job.wait_exit(0)
    job.wait(lambda: job.workers[1].messages(local.Left), "the other one's collective fails")
    assert alive(job.workers[1].pid)


def test_released_worker_exits_without_running_the_code_after_the_loop(job: AgentDouble) -> None:
    start(job, 2)
    job.wait_step(1, 5, range(2))
    job.announce([0], PLANNED)
    job.wait_step(2, 0, [0])
    job.stop("Released", [1])
    job.wait_exit(1)
    assert job.workers[1].log == ""
    assert_one_state(finish(job, [0]))


def test_newer_generation_ends_forming_at_once(job: AgentDouble) -> None:
    """Rule CLIQUE: the set that waits for a rank that never comes is told of the next one, and does not wait on."""
    start(job, 3)
    job.wait_step(1, 5, range(3))
    job.workers[2].answers_entering = False
    job.announce(range(3))
    job.wait(lambda: len(job.workers[2].messages(local.Entering)) > 1, "2 wants to enter, and is not answered")
    job.announce([0, 1], lost=[job.workers[2].pod_uid], older=[1, 2], hosts=1)
    job.wait_step(3, 0, [0, 1])
    assert job.workers[0].messages(local.FormedLocally, 2) == []
    assert [m.cause for m in job.workers[0].messages(local.Left)] == []


def test_only_one_that_is_left_serves_its_store_where_it_served_the_last_one(job: AgentDouble) -> None:
    """Two drains in a row: it has its socket for a generation that is given up while it forms, and the operator does not know."""
    start(job, 2)
    job.wait_step(1, 5, range(2))
    job.workers[1].answers_entering = False
    given_up = job.announce(range(2), hosts=0)
    job.wait(lambda: 2 not in job.workers[0].stores, "the socket is given away")
    job.wait(lambda: job.workers[0].messages(local.Arrived, 2), "its process serves, and waits for the other")
    job.announce([0], older=[1, 2], port=given_up.store.port)
    job.wait_step(3, 0, [0])
    assert [m.cause for m in job.workers[0].messages(local.Left)] == []


def test_only_one_that_is_left_serves_its_store_beside_the_last_one(job: AgentDouble) -> None:
    """The first of two drains is over when the second comes, and the operator does not know: its groups stand until the next do."""
    start(job, 3)
    job.wait_step(1, 5, range(3))
    first = job.announce(range(2), PLANNED, hosts=0)
    job.wait_step(2, 0, range(2))
    job.announce([0], PLANNED, older=[1, 2], port=first.store.port)
    job.wait_step(3, 0, [0])
    job.announce([0, 1], PLANNED)
    job.wait_step(4, 0, [0, 1])
    assert [m.cause for m in job.workers[0].messages(local.Left) if m.cause] == []


def test_script_with_another_number_of_steps_is_told_so(job: AgentDouble) -> None:
    job.start(0)
    job.start(1, TEST_STEPS="50")
    job.wait_attached(0, 1)
    job.announce(range(2))
    job.wait_exit(0, 1)
    assert f"Ranks ask for different numbers of steps (50, {STEPS})" in job.workers[0].log
