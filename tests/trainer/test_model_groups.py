"""Models that are split over several ranks, with real processes over gloo: equal to one process, through kills and resizes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.local_run import LocalRun
from regroup.protocol import local
from regroup.protocol.document import PLANNED
from regroup.protocol.state import StatePair
from tests.long import LONG, only_long
from tests.trainer.agent_double import AgentDouble, Worker, seal_of
from tests.trainer.split_kit import SCRIPT, SplitJob
from tests.trainer.zygote import Zygote

Whole = dict[str, dict[str, torch.Tensor]]
STEPS = "20"
TOLERANCE = 1e-5
"""Largest difference of a parameter, or of an optimizer's state, after 20 steps: sums come in another order. Seen: 3e-6."""


@pytest.fixture
def make(tmp_path: Path, zygote: Zygote) -> Iterator[Callable[..., SplitJob]]:
    """Make a job by its mesh. It is ended after the test."""
    jobs: list[SplitJob] = []

    def made(mesh: str, **environment: str) -> SplitJob:
        jobs.append(SplitJob(tmp_path / str(len(jobs)), zygote, mesh, **{"TEST_STEPS": STEPS, **environment}))
        return jobs[-1]

    yield made
    for one in jobs:
        one.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Callable[..., tuple[list[float], Whole]]:
    """Losses and state after 20 steps of one process that has all of the model, by optimizer and by what is odd about the model."""
    found: dict[tuple[str, str], tuple[list[float], Whole]] = {}

    def run(optimizer: str, words: str = "") -> tuple[list[float], Whole]:
        if (optimizer, words) not in found:
            values = {"TEST_STEPS": STEPS, "TEST_OPTIMIZER": optimizer, "TEST_MODEL": words, "TEST_PACE": "0"}
            job = SplitJob(tmp_path_factory.mktemp("alone"), zygote, "", **values)
            try:
                job.start([0])
                job.agents.announce([0])
                ends, whole = job.finish([0])
            finally:
                job.close()
            found[optimizer, words] = list(ends[0]["losses"].values()), whole
        return found[optimizer, words]

    return run


def assert_close(whole: Whole, reference: Whole) -> None:
    for name, held in reference.items():
        for key, one in held.items():
            assert whole[name][key].shape == one.shape, (name, key)
            assert (whole[name][key] - one).abs().max() <= TOLERANCE, (name, key)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"] if LONG else ["sgd"])  # AdamW would hide a factor
@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ("shard=1", 2),
        ("shard=2", 4),
        ("shard=3", 3),
        ("tensor=2", 4),
        ("shard=2 tensor=2", 4),
        *(pytest.param(mesh, 2, marks=only_long("as with two groups")) for mesh in ("shard=2", "tensor=2")),
    ],
)
def test_a_split_model_learns_what_one_process_does(
    make: Callable[..., SplitJob],
    alone: Callable[[str], tuple[list[float], Whole]],
    mesh: str,
    ranks: int,
    optimizer: str,
) -> None:
    losses, reference = alone(optimizer)
    job = make(mesh, TEST_OPTIMIZER=optimizer, TEST_PACE="0")
    job.start(range(ranks))
    job.agents.announce(range(ranks))
    ends, whole = job.finish(range(ranks))
    for end in ends:
        assert end["same_model"]
        assert list(end["losses"].values()) == pytest.approx(losses, abs=1e-6)
        assert end["losses"] == ends[0]["losses"]
    assert_close(whole, reference)


@pytest.mark.parametrize(
    ("mesh", "ranks", "words"),
    [
        ("shard=2", 4, "unused uneven two checkpointed"),
        ("shard=3", 3, "unused uneven tied compiled"),
        ("shard=2 tensor=2", 4, "unused"),
        *(
            pytest.param(mesh, 4, "compiled", marks=only_long("a compiled model is split by FSDP2 and by layers here"))
            for mesh in ("tensor=2", "shard=2 tensor=2")
        ),
        ("pipeline=2", 4, "compiled"),
    ],
)
def test_an_odd_model_learns_what_one_process_does(
    make: Callable[..., SplitJob],
    alone: Callable[..., tuple[list[float], Whole]],
    mesh: str,
    ranks: int,
    words: str,
) -> None:
    losses, reference = alone("adamw", words)
    job = make(mesh, TEST_MODEL=words, TEST_PACE="0")
    job.start(range(ranks))
    job.agents.announce(range(ranks))
    ends, whole = job.finish(range(ranks))
    assert list(ends[0]["losses"].values()) == pytest.approx(losses, abs=1e-6)
    assert whole.keys() == reference.keys()
    assert_close(whole, reference)


def test_ranks_that_run_other_modules_are_told_so(make: Callable[..., SplitJob]) -> None:
    """They gather their parameters together: each would compute with those of the other's module, which have the same size."""
    job = make("shard=2", TEST_MODEL="turning", TEST_PACE="0")
    job.start(range(2))
    job.agents.announce(range(2))
    job.agents.wait_exit(0, 1)
    for slot in range(2):
        assert "rank 1 ran other split modules" in job.agents.workers[slot].log


def test_processes_that_build_different_models_are_told_so(make: Callable[..., SplitJob]) -> None:
    job = make("shard=2", TEST_SEEDLESS="1", TEST_PACE="0")
    job.start(range(2))
    job.agents.announce(range(2))
    job.agents.wait_exit(0, 1)
    for slot in range(2):
        assert "Rank 0 and rank 1 have built the model from different seeds" in job.agents.workers[slot].log


def test_layers_that_are_left_whole_are_summed_over_all_ranks(
    make: Callable[..., SplitJob], alone: Callable[[str], tuple[list[float], Whole]]
) -> None:
    job = make("shard=2", TEST_PARTLY="1", TEST_PACE="0")
    job.start(range(4))
    job.agents.announce(range(4))
    _, whole = job.finish(range(4))
    assert_close(whole, alone("adamw")[1])


@pytest.mark.parametrize(
    ("mesh", "victim"),
    [
        ("shard=2", 0),
        ("tensor=2", 3),
        *(
            pytest.param(*one, marks=only_long("each mesh and each victim is there"))
            for one in (("shard=2", 3), ("tensor=2", 0))
        ),
    ],
)
def test_a_killed_rank_is_replaced_and_nothing_is_lost(
    make: Callable[..., SplitJob],
    alone: Callable[[str], tuple[list[float], Whole]],
    mesh: str,
    victim: int,
) -> None:
    job = make(mesh)
    agents = job.agents
    job.start(range(4))
    agents.announce(range(4))
    agents.wait_step(1, 4, range(4))
    survivors = [slot for slot in range(4) if slot != victim]
    agents.kill(victim)
    job.restart(victim)
    agents.announce(range(4))
    agents.wait_step(2, 0, range(4))
    for slot in survivors:
        (adopted,) = agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert not adopted.rolled_back
    ends, whole = job.finish(range(4))
    assert all(end["same_model"] for end in ends)
    assert_close(whole, alone("adamw")[1])


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ("tensor=2", 4),
        *([("shard=2", 4), ("shard=2 tensor=2", 8), ("pipeline=2", 4)] if LONG else []),
    ],
)
@pytest.mark.slow
def test_a_compiled_model_survives_a_kill(
    make: Callable[..., SplitJob], alone: Callable[..., tuple[list[float], Whole]], mesh: str, ranks: int
) -> None:
    """What was compiled names process groups: it must find those of the new generation."""
    job = make(mesh, TEST_MODEL="compiled")
    agents = job.agents
    job.start(range(ranks))
    agents.announce(range(ranks))
    agents.wait_step(1, 4, range(ranks))
    agents.kill(1)
    for slot in set(range(ranks)) - {1}:
        agents.wait_left(slot)
    job.restart(1)
    agents.announce(range(ranks))
    agents.wait_step(2, 0, range(ranks))
    _, whole = job.finish(range(ranks))
    assert_close(whole, alone("adamw", "compiled")[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Whole:
    """The state after 20 steps of two model groups that nothing happens to."""
    job = SplitJob(tmp_path_factory.mktemp("undisturbed"), zygote, "shard=2", TEST_STEPS=STEPS, TEST_PACE="0")
    try:
        job.start(range(4))
        job.agents.announce(range(4))
        return job.finish(range(4))[1]
    finally:
        job.close()


def assert_equal(whole: Whole, reference: Whole) -> None:
    for name, held in reference.items():
        for key, one in held.items():
            assert torch.equal(whole[name][key], one), (name, key)


@pytest.mark.parametrize("victim", [None, 0, 1], ids=["nobody", "A0", "A1"])
@pytest.mark.parametrize("lose", [[2], [1, 2], [2, 3], [1, 2, 3]] if LONG else [[1, 2], [1, 2, 3]], ids=str)
def test_ranks_without_the_rows_follow_with_what_they_have_reduced(
    make: Callable[..., SplitJob], undisturbed: Whole, lose: list[int], victim: int | None
) -> None:
    """Rules KEEP, EXACT, SERVE, ROWS: some have applied step 4, the others have reduced it. Whoever dies, it is not redone."""
    job = make("shard=2")
    agents = job.agents
    job.start([slot for slot in range(4) if slot not in lose])
    job.start(lose, TEST_FAULT="rows-lost:4")
    agents.announce(range(4))
    for slot in range(4):
        agents.wait_left(slot)
    held = {slot: agents.workers[slot].messages(local.Left)[0].state.step for slot in range(4)}
    assert held == {slot: 4 if slot in lose else 5 for slot in range(4)}
    if victim is not None:
        agents.kill(victim)
        job.restart(victim)
    agents.announce(range(4))
    agents.wait_step(2, 0, range(4))
    applied = [slot for slot in range(4) if slot not in lose and slot != victim]
    for slot in range(4):
        (adopted,) = agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert adopted.state.step == (5 if applied else 4)
        assert (adopted.source == "self") == (slot != victim)
    _, whole = job.finish(range(4))
    assert_equal(whole, undisturbed)


@pytest.mark.parametrize("lose", [[], [2, 3, 4, 5]], ids=["all hold the state", "B and C roll forward first"])
def test_the_source_of_a_part_dies_in_the_copy(
    make: Callable[..., SplitJob], alone: Callable[..., tuple[list[float], Whole]], lose: list[int]
) -> None:
    """A1 died, and B1 dies while it serves A1 the part of inner index 1: C1 still has it. Nothing is lost."""
    job = make("shard=2", TEST_FAULT="small-chunks")
    agents = job.agents
    for slot in range(6):
        faults = ["rows-lost:4"] * (slot in lose) + ["source-dies-in-transfer:2"] * (slot == 3)
        job.start([slot], TEST_FAULT=",".join(["small-chunks", *faults]))
    agents.announce(range(6))
    if lose:
        for slot in range(6):
            agents.wait_left(slot)
    else:
        agents.wait_step(1, 4, range(6))
    agents.kill(1)
    job.restart(1)
    agents.announce(range(6))
    agents.wait_exit(3)
    agents.wait_left(1, cause=True)
    job.restart(3)
    agents.announce(range(6), older=[1, 2])
    agents.wait_step(3, 0, range(6))
    adopted = {slot: agents.workers[slot].messages(local.AdoptedLocally, 3)[0] for slot in range(6)}
    assert {slot for slot, one in adopted.items() if one.source != "self"} == {1, 3}
    assert (
        {one.state.step for one in adopted.values()} == {5}
        if lose
        else {one.rolled_back for one in adopted.values()} == {False}
    )
    _, whole = job.finish(range(6))
    assert_close(whole, alone("adamw")[1])


@pytest.mark.parametrize("victim", [None, 0, 1], ids=["nobody", "A0", "A1"])
def test_generations_that_break_in_their_first_step(
    make: Callable[..., SplitJob], undisturbed: Whole, victim: int | None
) -> None:
    """Rules KEEP and EXACT: nobody applies step 4 in generations 1 and 2, only A0 and A1 do in generation 3; what the others follow
    with is what generation 3 has reduced."""
    job = make("shard=2")
    agents = job.agents
    lost = "rows-lost:4,rows-lost-first:2"
    job.start([0, 1], TEST_FAULT=lost)
    job.start([2, 3], TEST_FAULT=f"{lost},rows-lost-first:3")
    for generation in (1, 2, 3):
        agents.announce(range(4), older=range(1, generation))
        for slot in range(4):
            agents.wait(partial(has_left, agents.workers[slot], generation), f"slot {slot} leaves {generation}")
    if victim is not None:
        agents.kill(victim)
        job.restart(victim)
    agents.announce(range(4), older=[1, 2, 3])
    agents.wait_step(4, 0, range(4))
    for slot in range(4):
        (adopted,) = agents.workers[slot].messages(local.AdoptedLocally, 4)
        assert adopted.state == StatePair(3, 5)
        assert (adopted.source == "self") == (slot != victim)
    _, whole = job.finish(range(4))
    assert_equal(whole, undisturbed)


@pytest.mark.parametrize(
    ("mesh", "number"),
    [
        ("shard=2", 3),
        ("tensor=2", 4),
        *(
            pytest.param(*one, marks=only_long("each mesh and each number is there"))
            for one in (("shard=2", 4), ("tensor=2", 3))
        ),
    ],
)
def test_a_backward_that_is_cut_off_leaves_nothing_behind(
    make: Callable[..., SplitJob], alone: Callable[..., tuple[list[float], Whole]], mesh: str, number: int
) -> None:
    """Gradients of the last layer are there, and their sum has not begun: they must not be added to those of the redone step."""
    job = make(mesh)
    job.start([0, 1, 2])
    job.start([3], TEST_FAULT=f"breaks-in-backward:{number}")
    job.agents.announce(range(4))
    for slot in range(4):
        job.agents.wait_left(slot)
    job.agents.announce(range(4))
    ends, whole = job.finish(range(4))
    assert all(end["same_model"] for end in ends)
    assert_close(whole, alone("adamw")[1])


def has_left(worker: Worker, generation: int) -> bool:
    """Return whether a worker's trainer has left a generation because something broke in it."""
    return any(left.left_up_to == generation and left.cause for left in worker.messages(local.Left))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> tuple[dict[str, int], Whole]:
    """Right answers by step, and the state, of two model groups that are evaluated after each step and that nothing happens to."""
    job = SplitJob(
        tmp_path_factory.mktemp("evaluated"), zygote, "shard=2", TEST_STEPS="10", TEST_PACE="0", TEST_EVAL="1"
    )
    try:
        job.start(range(4))
        job.agents.announce(range(4))
        ends, whole = job.finish(range(4))
    finally:
        job.close()
    return ends[0]["rights"], whole


@pytest.mark.parametrize("victim", [0, 3])
def test_an_evaluation_that_is_cut_off_is_repeated_by_all(
    make: Callable[..., SplitJob], evaluated: tuple[dict[str, int], Whole], victim: int
) -> None:
    """The group breaks in the first block on one rank, and its partner waits for the second one: each has gathered other parts."""
    job = make("shard=2", TEST_STEPS="10", TEST_EVAL="1")
    job.start([slot for slot in range(4) if slot != victim])
    job.start([victim], TEST_FAULT="breaks-in-eval:3")
    job.agents.announce(range(4))
    for slot in range(4):
        job.agents.wait_left(slot)
    job.agents.announce(range(4))
    ends, whole = job.finish(range(4))
    for end in ends:
        assert end["rights"] == evaluated[0]
    assert_equal(whole, evaluated[1])


@pytest.mark.parametrize("victim", [0, 3])
def test_a_group_that_lost_a_process_in_an_evaluation_leaves_it_to_the_others(
    make: Callable[..., SplitJob], evaluated: tuple[dict[str, int], Whole], victim: int
) -> None:
    """The new process goes on to the next step, where its partner has to meet it: it computes nothing else of the split model."""
    job = make("shard=2", TEST_STEPS="10", TEST_EVAL="1")
    job.start([slot for slot in range(4) if slot != victim])
    job.start([victim], TEST_FAULT="dies-in-eval:3")
    job.agents.announce(range(4))
    for slot in range(4):
        if slot != victim:
            job.agents.wait_left(slot)
    job.restart(victim)
    job.agents.announce(range(4))
    ends, whole = job.finish(range(4))
    partner = victim ^ 1
    for slot in {0, 1, 2, 3} - {victim, partner}:
        assert ends[slot]["rights"] == evaluated[0]
    assert ends[partner]["rights"] == {step: right for step, right in evaluated[0].items() if step != "3"}
    assert_equal(whole, evaluated[1])


def test_a_group_is_left_over_and_comes_back(
    make: Callable[..., SplitJob], alone: Callable[[str], tuple[list[float], Whole]]
) -> None:
    """A1's pod is lost: B trains alone, A0 waits with its part. A new A1 makes the group whole."""
    job = make("shard=2")
    agents = job.agents
    job.start(range(4))
    agents.announce(range(4))
    agents.wait_step(1, 3, range(4))
    agents.kill(1)
    lost = agents.workers[1].pod_uid
    agents.announce([2, 3], lost=[lost], older=[1])
    agents.wait_step(2, 0, [2, 3])
    job.start([1])
    agents.announce(range(4), PLANNED, lost=[lost], older=[2])
    agents.wait_step(3, 0, range(4))
    ends, whole = job.finish(range(4))
    assert ends[0]["losses"] != {}
    assert_close(whole, alone("adamw")[1])


def test_a_part_that_is_held_elsewhere_is_waited_for(make: Callable[..., SplitJob]) -> None:
    """A0 is well, and no member: B must not go on from less than A0 says that it has."""
    job = make("shard=2")
    agents = job.agents
    job.start(range(4))
    agents.announce(range(4))
    agents.wait_step(1, 3, range(4))
    agents.kill(1)
    agents.announce([0, 1], to=[])  # nobody hears it: a generation that never trained
    (left, *_) = agents.wait_left(0, cause=True)
    ahead = StatePair(left.state[0], left.state[1] + 5)
    seal = seal_of(agents.workers[0])
    newer = type(seal)(seal.pod_uid, seal.left_up_to, ahead, seal.adopted, seal.state_adopted)
    agents.announce([2, 3], seals=[newer], lost=[agents.workers[1].pod_uid], older=[1])
    agents.wait(lambda: refused(agents, (2, 3)), "a refusal")
    number = agents.documents[-1].number
    for slot in (2, 3):
        agents.wait(partial(left_for_good, agents.workers[slot], number), f"slot {slot} leaves generation {number}")


def refused(agents: AgentDouble, slots: Sequence[int]) -> bool:
    """Return whether a trainer has left the newest generation to wait for somebody.

    Where one has refused and closed its connections, another that is still connecting says that this failed.
    """
    left = [message for slot in slots for message in agents.workers[slot].messages(local.Left)]
    return any("A state that may be newer" in message.message for message in left)


def left_for_good(worker: Worker, number: int) -> bool:
    """Return whether a trainer has left a generation without a step of it."""
    left = any(message.left_up_to == number for message in worker.messages(local.Left))
    return left and not worker.messages(local.AdoptedLocally, number)


@pytest.mark.slow
def test_groups_of_workers_survive_a_kill_and_a_resize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real operator and agents: two workers hold one copy."""
    monkeypatch.setenv("TEST_MESH", "shard=2")
    monkeypatch.setenv("TEST_STEPS", "60")
    monkeypatch.setenv("TEST_PACE", "0.2")
    monkeypatch.setenv("TEST_GO", str(tmp_path / "go"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TEST_PARTS", raising=False)
    run = LocalRun(tmp_path, "--workers", "4", "--min", "2", "--max", "4", "--workers-per-group", "2", str(SCRIPT))
    try:
        first = run.trains(4)["membership"]["generation"]
        os.kill(run.trainers()["local-worker-1-0"], signal.SIGKILL)
        second = run.trains(4, after=first)["membership"]["generation"]
        run.scale(2)
        third = run.trains(2, after=second)["membership"]
        assert third["members"] == "0-1"
        run.scale(4)
        run.trains(4, after=third["generation"])
        (tmp_path / "go").touch()
        status = run.wait(lambda found: found.get("phase") == "Succeeded", "the end")
        assert status["progress"]["step"] == 60
        assert status["restarts"]["processes"] == 1
    finally:
        run.close()
