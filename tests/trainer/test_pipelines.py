"""Models whose layers are split over a pipeline, with real processes over gloo: equal to one process, through kills and resizes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from harness.polling import until
from regroup.protocol import local
from tests.long import LONG, only_long
from tests.trainer.split_kit import SplitJob
from tests.trainer.test_model_groups import STEPS, Whole, alone, assert_close, assert_equal
from tests.trainer.zygote import Zygote

__all__ = ["alone"]
KILLS = 40 if LONG else 3
WALK_STEPS = str(15 * KILLS)
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
ORDERS = only_long("one split stands before the pipeline above, and the other one after it")


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


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"] if LONG else ["sgd"])  # AdamW would hide a factor
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


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [("", 2), ("pipeline=1", 2), ("shard=2", 2), pytest.param("tensor=2", 4, marks=only_long("as FSDP2"))],
)
def test_one_script_trains_without_a_pipeline(
    make: Callable[..., SplitJob], alone: Callable[[str], tuple[list[float], Whole]], mesh: str, ranks: int
) -> None:
    job = make(mesh, "1f1b", TEST_RUN="1", TEST_PARTLY="1", TEST_PACE="0")
    job.start(range(ranks))
    job.agents.announce(range(ranks))
    _, whole = job.finish(range(ranks))
    assert_close(whole, alone("adamw")[1])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"] if LONG else ["1f1b"])
@pytest.mark.parametrize(
    "mesh",
    [
        "pipeline=2 tensor=2",
        "shard=2 pipeline=2",
        *(pytest.param(mesh, marks=ORDERS) for mesh in ("tensor=2 pipeline=2", "pipeline=2 shard=2")),
    ],
)
def test_a_pipeline_of_split_layers_learns_what_one_process_does(
    make: Callable[..., SplitJob], alone: Callable[[str], tuple[list[float], Whole]], mesh: str, schedule: str
) -> None:
    losses, reference = alone("sgd")  # AdamW would hide a factor
    job = make(mesh, schedule, TEST_OPTIMIZER="sgd", TEST_PACE="0")
    job.start(range(4))
    job.agents.announce(range(4))
    ends, whole = job.finish(range(4))
    assert list(ends[0]["losses"].values()) == pytest.approx(losses, abs=1e-6)
    assert whole.keys() == reference.keys()
    assert_close(whole, reference)


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ("pipeline=2", 2),
        ("tensor=2", 1),
        *(
            pytest.param(*one, marks=only_long("each mesh and each number is there"))
            for one in (("pipeline=2", 1), ("tensor=2", 2))
        ),
    ],
)
def test_running_statistics_of_one_stage(make: Callable[..., SplitJob], mesh: str, groups: int) -> None:
    values = {"TEST_OPTIMIZER": "sgd", "TEST_MODEL": "batchnorm", "TEST_PACE": "0"}
    found = []
    for one, ranks in (("", 1), (mesh, 2 * groups)):
        job = make(one, "1f1b", **values)
        job.start(range(ranks))
        job.agents.announce(range(ranks))
        found.append(job.finish(range(ranks))[1])
    # One process goes through all microbatches in turn; of two groups the statistics are averaged.
    wanted = {name: held for name, held in found[0].items() if groups == 1 or "buffer" not in held}
    assert wanted
    assert_close(found[1], wanted)


def test_a_loop_over_microbatches_is_refused(make: Callable[..., SplitJob]) -> None:
    assert "Call step.run(loss) in place of the loop over step.microbatches()." in first_words(make, TEST_LOOP="1")


def test_a_loss_without_a_weight_is_refused_where_the_last_stage_is(make: Callable[..., SplitJob]) -> None:
    said = first_words(make, TEST_ONE_VALUE="1")
    assert "returned a Tensor; it must return the loss summed over samples and its weight" in said


def first_words(make: Callable[..., SplitJob], **environment: str) -> str:
    """Return what rank 1 of a pipeline writes before it ends by an error."""
    job = make("pipeline=2", "1f1b", **environment)
    job.start(range(2))
    job.agents.announce(range(2))
    job.agents.wait_exit(1)
    return job.agents.workers[1].log


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Callable[..., Whole]:
    """The state after 20 steps of two model groups that nothing happens to, by schedule."""

    @cache
    def run(schedule: str, steps: str = STEPS, mesh: str = "pipeline=2") -> Whole:
        values = {"TEST_STEPS": steps, "TEST_SCHEDULE": schedule, "TEST_PACE": "0"}
        job = SplitJob(tmp_path_factory.mktemp("undisturbed"), zygote, mesh, **values)
        ranks = range(2 * job.size)
        try:
            job.start(ranks)
            job.agents.announce(ranks)
            return job.finish(ranks)[1]
        finally:
            job.close()

    return run


def assert_nothing_is_lost(job: SplitJob, generation: int, survivors: list[int]) -> None:
    for slot in survivors:
        (adopted,) = job.agents.workers[slot].messages(local.AdoptedLocally, generation)
        assert not adopted.rolled_back


MOMENTS = only_long("each schedule is there, each process, and the begin, the middle and the end of a schedule")


@pytest.mark.parametrize(
    ("schedule", "victim", "actions"),
    [
        pytest.param("1f1b", 0, 0, id="1f1b, A0 before its first action", marks=MOMENTS),
        pytest.param("1f1b", 0, 2, id="1f1b, A0 in the middle"),
        pytest.param("1f1b", 1, 1, id="1f1b, A1 after its first forward"),
        pytest.param("1f1b", 2, 11, id="1f1b, B0 before its last action", marks=MOMENTS),
        pytest.param("1f1b", 3, 11, id="1f1b, B1 before its last action"),
        pytest.param("gpipe", 3, 7, id="gpipe, B1 in the middle of backward"),
        pytest.param("gpipe", 0, 5, id="gpipe, A0 before its last forward", marks=MOMENTS),
        pytest.param("interleaved", 1, 9, id="interleaved, A1", marks=MOMENTS),
        pytest.param("interleaved", 2, 14, id="interleaved, B0"),
        pytest.param("zero_bubble", 0, 8, id="zero bubble, A0", marks=MOMENTS),
        pytest.param("zero_bubble", 3, 16, id="zero bubble, B1"),
    ],
)
def test_a_process_that_dies_in_a_schedule_is_replaced_and_nothing_changes(
    make: Callable[..., SplitJob], undisturbed: Callable[..., Whole], schedule: str, victim: int, actions: int
) -> None:
    job = make("pipeline=2", schedule)
    agents = job.agents
    survivors = [slot for slot in range(4) if slot != victim]
    job.start(survivors)
    job.start([victim], TEST_FAULT=f"dies-in-schedule:5:{actions}")
    agents.announce(range(4))
    agents.wait_exit(victim)
    for slot in survivors:  # all waits have ended, those of the other group, too
        agents.wait_left(slot)
    job.restart(victim)
    agents.announce(range(4))
    agents.wait_step(2, 0, range(4))
    assert_nothing_is_lost(job, 2, survivors)
    ends, whole = job.finish(range(4))
    assert all(end["same_model"] for end in ends)
    assert_equal(whole, undisturbed(schedule))


@pytest.mark.parametrize(
    ("mesh", "victim"),
    [
        ("pipeline=2 shard=2", 6),
        *(
            pytest.param(*one, marks=only_long("as with FSDP2 inside the stages"))
            for one in (("pipeline=2 tensor=2", 1), ("pipeline=2 tensor=2", 6), ("pipeline=2 shard=2", 1))
        ),
    ],
)
@pytest.mark.slow
def test_a_process_of_split_layers_that_dies_in_a_schedule_is_replaced_and_nothing_changes(
    make: Callable[..., SplitJob], undisturbed: Callable[..., Whole], mesh: str, victim: int
) -> None:
    job = make(mesh, "1f1b")
    agents, slots = job.agents, list(range(8))
    survivors = [slot for slot in slots if slot != victim]
    job.start(survivors)
    job.start([victim], TEST_FAULT="dies-in-schedule:5:4")
    agents.announce(slots)
    agents.wait_exit(victim)
    job.restart(victim)
    agents.announce(slots)
    agents.wait_step(2, 0, slots)
    assert_nothing_is_lost(job, 2, survivors)
    _, whole = job.finish(slots)
    assert_equal(whole, undisturbed("1f1b", STEPS, mesh))


@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        "interleaved",
        *(pytest.param(one, marks=only_long("it is evaluated as 1f1b is")) for one in ("gpipe", "zero_bubble")),
    ],
)
def test_a_pipeline_is_evaluated_as_one_process_is(make: Callable[..., SplitJob], schedule: str) -> None:
    rights = []
    for mesh, ranks in (("", 1), ("pipeline=2", 4)):
        job = make(mesh, schedule, TEST_EVAL="1", TEST_OPTIMIZER="sgd", TEST_PACE="0", TEST_STEPS="8")
        job.start(range(ranks))
        job.agents.announce(range(ranks))
        ends, _ = job.finish(range(ranks))
        assert all(end["rights"] == ends[0]["rights"] for end in ends)
        rights.append(ends[0]["rights"])
    assert len(rights[0]) == 8
    assert rights[0] == rights[1]


@pytest.mark.parametrize(
    ("victim", "dies"),
    [
        (0, True),
        (3, False),
        *(pytest.param(*one, marks=only_long("each stage and each fault is there")) for one in ((0, False), (3, True))),
    ],
)
def test_an_evaluation_of_a_pipeline_that_is_cut_off_is_repeated_by_whole_groups(
    make: Callable[..., SplitJob], victim: int, dies: bool
) -> None:
    """The partner of a process that dies waits for its activations, or has sent its own. It leaves the evaluation without a result,
    because the new process goes on to the next step."""
    undisturbed = make("pipeline=2", "1f1b", TEST_EVAL="1", TEST_STEPS="8", TEST_PACE="0")
    undisturbed.start(range(4))
    undisturbed.agents.announce(range(4))
    wanted, state = undisturbed.finish(range(4))
    job = make("pipeline=2", "1f1b", TEST_EVAL="1", TEST_STEPS="8")
    job.start([slot for slot in range(4) if slot != victim])
    job.start([victim], TEST_FAULT="dies-in-eval:2" if dies else "breaks-in-eval:2")  # after step 4: it has one block
    job.agents.announce(range(4))
    for slot in range(4):
        if slot != victim or not dies:
            job.agents.wait_left(slot)
    if dies:
        job.restart(victim)
    job.agents.announce(range(4))
    ends, whole = job.finish(range(4))
    rights = wanted[0]["rights"]
    for slot in {0, 1, 2, 3} - {victim}:
        missing = "4" if dies and slot == victim ^ 1 else None
        assert ends[slot]["rights"] == {step: right for step, right in rights.items() if step != missing}
    assert_equal(whole, state)


@pytest.mark.parametrize(
    "lose",
    [
        [1, 2],
        *(pytest.param(one, marks=only_long("test_model_groups.py has it for FSDP2")) for one in ([2], [1, 2, 3])),
    ],
    ids=str,
)
def test_stages_without_the_rows_follow_with_what_they_have_reduced(
    make: Callable[..., SplitJob], undisturbed: Callable[..., Whole], lose: list[int]
) -> None:
    job = make("pipeline=2", "1f1b")
    agents = job.agents
    job.start([slot for slot in range(4) if slot not in lose])
    job.start(lose, TEST_FAULT="rows-lost:4")
    agents.announce(range(4))
    for slot in range(4):
        agents.wait_left(slot)
    agents.announce(range(4))
    agents.wait_step(2, 0, range(4))
    for slot in range(4):
        (adopted,) = agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert (adopted.state.step, adopted.source) == (5, "self")
    _, whole = job.finish(range(4))
    assert_equal(whole, undisturbed("1f1b"))


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=only_long("as interleaved")), "interleaved"])
def test_a_pipeline_shrinks_and_grows_by_whole_groups(
    make: Callable[..., SplitJob], alone: Callable[[str], tuple[list[float], Whole]], schedule: str
) -> None:
    """Other numbers of groups add up in another order, so the state is equal but for rounding."""
    job = make("pipeline=2", schedule)
    agents = job.agents
    job.start(range(4))
    agents.announce(range(4))
    agents.wait_step(1, 4, range(4))
    agents.announce([2, 3])
    agents.wait_step(2, 0, [2, 3])
    agents.announce(range(4))
    agents.wait_step(3, 0, range(4))
    assert_nothing_is_lost(job, 3, [2, 3])
    _, whole = job.finish(range(4))
    assert_close(whole, alone("adamw")[1])


@pytest.mark.parametrize("schedule", SCHEDULES if LONG else ["1f1b"])
def test_kills_at_any_moment_change_nothing(
    make: Callable[..., SplitJob], undisturbed: Callable[..., Whole], schedule: str
) -> None:
    job = make("pipeline=2", schedule, TEST_STEPS=WALK_STEPS, TEST_PACE="0.02")
    agents, chance = job.agents, random.Random(7)
    job.start(range(4))
    agents.announce(range(4))
    for generation in range(1, KILLS + 1):
        agents.wait_step(generation, 0, range(4))
        moment_s = agents.first_commit(generation, range(4)) + chance.random() * 0.06
        until(partial(past, moment_s), "a moment in a step")
        victim = chance.randrange(4)
        agents.kill(victim)
        agents.wait_exit(victim)
        job.restart(victim)
        agents.announce(range(4))
        agents.wait_step(generation + 1, 0, range(4))
        assert_nothing_is_lost(job, generation + 1, [slot for slot in range(4) if slot != victim])
    _, whole = job.finish(range(4))
    assert_equal(whole, undisturbed(schedule, WALK_STEPS))


def past(moment_s: float) -> bool:
    return time.monotonic() > moment_s
