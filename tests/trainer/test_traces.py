"""Traces of docs/design/protocol.md that need real processes: torn copies, witnesses, finished ranks, lost disks."""

from pathlib import Path
from typing import Any

import pytest

from harness.processes import alive
from regroup.protocol import env, local
from regroup.protocol.document import PLANNED, CheckpointRef
from regroup.protocol.state import StatePair
from tests.long import only_long
from tests.trainer.agent_double import AgentDouble, seal_of
from tests.trainer.elastic_kit import STEPS, assert_one_state, finish, run_alone, start


def last_step(double: AgentDouble, slot: int, generation: int) -> int:
    last: int = max(m.step for m in double.workers[slot].messages(local.Committed, generation))
    return last


def test_torn_copy_is_never_offered_when_the_source_dies_in_mid_copy(job: AgentDouble) -> None:
    """H3 TORN."""
    start(job, 3, TEST_HIDDEN="256", TEST_FAULT="source-dies-in-transfer:3")
    job.wait_step(1, 5, range(3))
    job.announce([0, 1])  # forced: 2 is left out, with the state of generation 1
    job.wait_step(2, 0, [0, 1])
    kept = job.wait(lambda: job.workers[2].messages(local.Left), "2 says what it keeps")[-1].state
    assert kept.generation == 1
    job.announce([0, 1, 2], PLANNED)
    job.wait(lambda: not alive(job.workers[0].pid), "the source dies")
    left = job.wait(
        lambda: len(job.workers[2].messages(local.Left)) > 1 and job.workers[2].messages(local.Left), "2 breaks"
    )[-1]
    assert (left.cause, left.state) == ("collective", kept)
    job.announce([1, 2], lost=[job.workers[0].pod_uid], older=[2, 3])
    job.wait_step(4, 0, [1, 2])
    adopted = job.workers[2].messages(local.AdoptedLocally, 4)[0]
    assert adopted.source == job.workers[1].pod_uid
    assert adopted.state.generation == 2
    assert_one_state(finish(job, [1, 2]))


def test_same_step_of_an_older_generation_is_replaced(job: AgentDouble, tmp_path: Path) -> None:
    """H2 STATE: 0 commits step 8, 1 does not; 1 does it again alone; then both are at step 9, and are not the same."""
    go = tmp_path / "fault"
    environment = {"TEST_FAULT": "breaks-before-apply:8", "TEST_FAULT_GO": str(go), "TEST_STEP_WAIT": "2:9"}
    job.start(0)
    job.start(1, **environment)
    job.wait_attached(0, 1)
    job.announce(range(2))
    job.wait_step(1, 9, [0])
    go.touch()
    left = [job.wait_left(slot)[-1] for slot in (0, 1)]
    assert [m.state for m in left] == [StatePair(1, 9), StatePair(1, 8)]
    job.announce([1])
    job.wait_step(2, 9, [1])
    (redone,) = job.workers[1].messages(local.Committed, 2)
    assert (redone.step, redone.steps_redone) == (9, 1)
    job.announce(range(2))
    job.wait_step(3, 0, range(2))
    adopted = job.workers[0].messages(local.AdoptedLocally, 3)[0]
    assert (adopted.source, adopted.state) == (job.workers[1].pod_uid, StatePair(2, 9))
    assert_one_state(finish(job, [0, 1]))


def test_step_that_was_reduced_but_not_applied_by_the_one_that_died_is_kept_by_the_others(
    job: AgentDouble, tmp_path: Path
) -> None:
    go = tmp_path / "fault"
    job.start(0)
    job.start(1)
    job.start(2, TEST_FAULT="dies-before-apply:8", TEST_FAULT_GO=str(go))
    job.wait_attached(0, 1, 2)
    job.announce(range(3))
    job.wait_step(1, 9, range(2))
    go.touch()
    job.wait_exit(2)
    job.announce([0, 1], lost=[job.workers[2].pod_uid])
    job.wait_step(2, 0, [0, 1])
    assert {job.workers[slot].messages(local.AdoptedLocally, 2)[0].start_step for slot in (0, 1)} == {9}
    assert_one_state(finish(job, [0, 1]))


def test_joiner_without_a_witness_refuses_until_the_holder_is_proven_gone(job: AgentDouble) -> None:
    """H4 WITNESS, H5 LOST."""
    start(job, 1)
    job.wait_step(1, 5, [0])
    holder = job.workers[0]
    job.start(1)
    job.wait_attached(1)
    job.announce([1], to=[1])  # 0 is cut off and trains on
    joiner = job.workers[1]
    left = job.wait(lambda: [m for m in joiner.messages(local.Left) if m.cause], "a refusal")[-1]
    assert left.cause == "witness"
    assert holder.pod_uid in left.message
    assert joiner.messages(local.AdoptedLocally) == []
    job.kill(0)
    job.announce([1], lost=[holder.pod_uid], older=[1, 2], seals=[seal_of(joiner)], to=[1])
    job.wait_step(3, 0, [1])
    adopted = joiner.messages(local.AdoptedLocally, 3)[0]
    assert (adopted.source, adopted.start_step, adopted.rolled_back) == ("nothing", 0, True)


@pytest.mark.parametrize("environment", [{}, {"TEST_FORK": "1"}], ids=["plain", "with a forked child left behind"])
def test_survivors_say_at_once_that_a_collective_failed_and_keep_their_state(
    job: AgentDouble, environment: dict[str, str]
) -> None:
    start(job, 3, **environment)
    job.wait_step(1, 5, range(3))
    job.kill(1)
    for slot in (0, 2):
        left = job.wait_left(slot, timeout_s=10)[-1]
        assert (left.cause, left.left_up_to, left.state_adopted) == ("collective", 1, 1)
        assert left.state == StatePair(1, last_step(job, slot, 1))
    job.announce([0, 2], lost=[job.workers[1].pod_uid])
    job.wait_step(2, 0, [0, 2])


def test_planned_change_that_one_rank_has_not_heard_stops_nobody(job: AgentDouble) -> None:
    """H11 CUTALL."""
    start(job, 2)
    job.wait_step(1, 5, range(2))
    document = job.announce([0], PLANNED, to=[0])
    step = last_step(job, 0, 1)
    job.wait_step(1, step + 10, range(2))
    assert job.workers[0].messages(local.Entering, 2) == []
    job.tell(job.workers[1], document)
    job.wait_step(2, 0, [0])
    state = job.wait(lambda: job.workers[1].messages(local.Left), "1 leaves at the cut")[-1].state
    assert state == job.workers[0].messages(local.AdoptedLocally, 2)[0].state


def test_finished_rank_is_a_source_for_a_replacement(job: AgentDouble) -> None:
    """H10 FINISH."""
    start(job, 2)
    job.go()
    job.wait_finished(0, 1)
    job.kill(1)
    gone = job.workers[1].pod_uid
    job.start(1)
    job.wait_attached(1)
    job.announce(range(2), lost=[gone])
    ends = finish(job, [0, 1])
    assert_one_state(ends)
    assert job.workers[1].messages(local.AdoptedLocally)[0].start_step == STEPS
    assert [end["generation"] for end in ends] == [2, 2]


def test_job_continues_from_disk_when_every_process_is_gone(job: AgentDouble, tmp_path: Path) -> None:
    """And from the one before, if the newest is damaged."""
    directory = tmp_path / "ckpt"
    settings = {env.CHECKPOINT_DIR: str(directory), env.CHECKPOINT_EVERY_SECONDS: "0.3"}
    directory.mkdir()
    start(job, 2, **settings)
    first = [job.workers[0], job.workers[1]]
    older, saved = two_checkpoints(job)
    for slot in (0, 1):
        job.kill(slot)
        job.wait_exit(slot)
    damaged = max(directory.glob("step-*"), key=lambda path: int(path.name[5:].partition(".")[0]))
    data = max(damaged.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    for slot in (0, 1):
        job.start(slot, **settings)
    job.wait_attached(0, 1)
    job.announce(range(2), lost=[worker.pod_uid for worker in first])
    job.first_commit(2, range(2))
    adopted = job.workers[0].messages(local.AdoptedLocally)[0]
    assert (adopted.source, adopted.rolled_back) == ("disk", True)
    assert older["step"] <= adopted.start_step < int(damaged.name[5:].partition(".")[0])
    assert f"Skipped {damaged.name}: {data.name} has" in job.workers[0].log
    assert saved["step"] > older["step"]
    report = next(m for m in job.workers[0].messages(local.Committed) if m.generation == 2)
    assert report.checkpoint is None  # nothing is written again before the first step
    assert_one_state(finish(job, [0, 1]))


def test_job_whose_volume_cannot_be_read_waits_instead_of_beginning_anew(job: AgentDouble, tmp_path: Path) -> None:
    """And begins no history that would make the old one prunable."""
    settings = {env.CHECKPOINT_DIR: str(tmp_path / "ckpt"), env.CHECKPOINT_EVERY_SECONDS: "0.3"}
    (tmp_path / "ckpt").mkdir()
    start(job, 2, **settings)
    first = [job.workers[0], job.workers[1]]
    _, saved = two_checkpoints(job)
    named = CheckpointRef(saved["generation"], saved["step"], saved["directory"])
    for slot in (0, 1):
        job.kill(slot)
        job.wait_exit(slot)
    (tmp_path / "ckpt").rename(tmp_path / "away")
    for slot in (0, 1):
        job.start(slot, **settings)
    job.wait_attached(0, 1)
    gone = [worker.pod_uid for worker in first]
    job.announce(range(2), lost=gone, checkpoint=named)
    for slot in (0, 1):
        messages = job.workers[slot].messages
        left = job.wait_left(slot, cause=True)[-1]
        assert (left.cause, left.state, messages(local.AdoptedLocally)) == ("checkpoint", None, [])
        assert f"names checkpoint {saved['directory']}" in left.message
        assert str(tmp_path / "ckpt") in left.message
    (tmp_path / "away").rename(tmp_path / "ckpt")
    job.announce(range(2), lost=gone, checkpoint=named, older=[1, 2], seals=[seal_of(w) for w in job.workers.values()])
    job.first_commit(3, range(2))
    assert job.workers[0].messages(local.AdoptedLocally)[0].source == "disk"


def two_checkpoints(job: AgentDouble) -> list[dict[str, Any]]:
    """The first and the newest checkpoint that worker 0 reported, once there are two."""

    def reported() -> list[dict[str, Any]]:
        found = [m.checkpoint for m in job.workers[0].messages(local.Committed) if m.checkpoint]
        return [found[0], found[-1]] if found and found[0] != found[-1] else []

    found: list[dict[str, Any]] = job.wait(reported, "two checkpoints are durable")
    return found


def test_batchnorm_statistics_are_one_state_after_a_redo(job: AgentDouble) -> None:
    start(job, 3, TEST_LAYER="batchnorm")
    job.wait_step(1, 5, range(3))
    job.kill(2)
    job.announce([0, 1], lost=[job.workers[2].pod_uid])
    job.wait_step(2, 0, [0, 1])
    assert_one_state(finish(job, [0, 1]))


@pytest.mark.parametrize(
    "data", [pytest.param("tensors", marks=only_long("as of a loader, which reads ahead")), "loader"]
)
def test_exact_mode_with_kill_growth_and_shrink_equals_a_run_of_one(job: AgentDouble, data: str) -> None:
    exact = {"TEST_REDUCTION": "exact", "TEST_LAYER": "dropout", "TEST_DATA": data}
    start(job, 3, **exact)
    job.wait_step(1, 5, range(3))
    job.kill(0)
    gone = job.workers[0].pod_uid
    job.announce([1, 2], lost=[gone])
    job.wait_step(2, 0, [1, 2])
    for slot in (0, 3):
        job.start(slot, TEST_INIT=str(10 + slot), **exact)
    job.wait_attached(0, 3)
    job.announce(range(4), PLANNED)
    job.wait_step(3, 0, range(4))
    job.announce([0, 3], PLANNED)
    job.wait_step(4, 0, [0, 3])
    elastic = finish(job, [0, 3])
    assert_one_state(elastic)
    reference = run_alone(job, TEST_STEPS=str(STEPS), **exact)
    assert elastic[0]["hash"] == reference["hash"]
    losses = [{int(k): v for k, v in end["losses"].items()} for end in (elastic[0], reference)]
    assert all(losses[1][step] == loss for step, loss in losses[0].items())
