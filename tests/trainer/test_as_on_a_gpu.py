"""Models that are split, with real processes whose tensors go the way of those on a GPU: gloo stands for NCCL (gloo_for_nccl.py).

The tests are those of gloo. `make test` runs a few of them here, `make test-all` most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.long import LONG, only_long
from tests.trainer import split_kit
from tests.trainer import test_context_and_experts as sequences
from tests.trainer import test_model_groups as groups
from tests.trainer import test_pipelines as pipelines
from tests.trainer.split_kit import SplitJob

Make = Callable[..., SplitJob]
OTHERS = only_long("another mesh, or another fault, takes this way, too")

make_split, alone, undisturbed, evaluated = groups.make, groups.alone, groups.undisturbed, groups.evaluated
make_pipeline, undisturbed_pipeline = pipelines.make, pipelines.undisturbed
make_sequences, sequences_alone, two_groups = sequences.make, sequences.alone, sequences.two_groups


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """All jobs of this module, those to compare with, too: the optimizer of a GPU rounds otherwise."""
    split_kit.ALWAYS["TEST_NCCL"] = "1"
    yield
    del split_kit.ALWAYS["TEST_NCCL"]


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ("shard=2 tensor=2", 4),
        pytest.param("shard=2", 4, marks=OTHERS),
        pytest.param("tensor=2", 2, marks=OTHERS),
        pytest.param("shard=1", 2, marks=OTHERS),
        pytest.param("shard=2", 2, marks=OTHERS),
        pytest.param("shard=3", 3, marks=OTHERS),
        pytest.param("tensor=2", 4, marks=OTHERS),
    ],
)
def test_split_model(make_split: Make, alone: Any, mesh: str, ranks: int) -> None:
    groups.test_a_split_model_learns_what_one_process_does(make_split, alone, mesh, ranks, "sgd")


@OTHERS
@pytest.mark.parametrize(
    ("mesh", "ranks", "words"),
    [
        ("shard=2", 4, "unused uneven two checkpointed"),
        ("shard=3", 3, "unused uneven tied compiled"),
        ("shard=2 tensor=2", 4, "unused"),
        ("tensor=2", 4, "compiled"),
        ("pipeline=2", 4, "compiled"),
    ],
)
def test_odd_model(make_split: Make, alone: Any, mesh: str, ranks: int, words: str) -> None:
    groups.test_an_odd_model_learns_what_one_process_does(make_split, alone, mesh, ranks, words)


@pytest.mark.parametrize(
    ("mesh", "victim"),
    [
        ("tensor=2", 3),
        pytest.param("tensor=2", 0, marks=OTHERS),
        *(pytest.param("shard=2", i, marks=OTHERS) for i in (0, 3)),
    ],
)
def test_killed_rank_gets_its_state_from_another_copy(make_split: Make, alone: Any, mesh: str, victim: int) -> None:
    groups.test_a_killed_rank_is_replaced_and_nothing_is_lost(make_split, alone, mesh, victim)


@pytest.mark.parametrize(
    ("lose", "victim"), [([1, 2], 0), *(pytest.param([1, 2, 3], i, marks=OTHERS) for i in (None, 0, 1))]
)
def test_ranks_without_the_rows(make_split: Make, undisturbed: Any, lose: list[int], victim: int | None) -> None:
    """The model has the mesh shard=2."""
    groups.test_ranks_without_the_rows_follow_with_what_they_have_reduced(make_split, undisturbed, lose, victim)


@OTHERS
@pytest.mark.parametrize("mesh", ["shard=2", "tensor=2"])
@pytest.mark.parametrize("number", [3, 4])
def test_backward_that_is_cut_off(make_split: Make, alone: Any, mesh: str, number: int) -> None:
    groups.test_a_backward_that_is_cut_off_leaves_nothing_behind(make_split, alone, mesh, number)


@pytest.mark.parametrize("victim", [3, pytest.param(0, marks=OTHERS)])
def test_evaluation_that_is_cut_off(make_split: Make, evaluated: Any, victim: int) -> None:
    """The model has the mesh shard=2."""
    groups.test_an_evaluation_that_is_cut_off_is_repeated_by_all(make_split, evaluated, victim)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("interleaved", 2), *(pytest.param(one, 4, marks=OTHERS) for one in pipelines.SCHEDULES)],
)
def test_pipeline(make_pipeline: Make, alone: Any, schedule: str, ranks: int) -> None:
    pipelines.test_a_pipeline_learns_what_one_process_does(make_pipeline, alone, schedule, ranks, "sgd")


@pytest.mark.parametrize(
    ("schedule", "victim", "actions"),
    [
        ("1f1b", 1, 1),
        ("interleaved", 0, 9),
        *(pytest.param(one, 3, 7, marks=OTHERS) for one in pipelines.SCHEDULES),
    ],
)
def test_process_that_dies_in_a_schedule(
    make_pipeline: Make, undisturbed_pipeline: Any, schedule: str, victim: int, actions: int
) -> None:
    pipelines.test_a_process_that_dies_in_a_schedule_is_replaced_and_nothing_changes(
        make_pipeline, undisturbed_pipeline, schedule, victim, actions
    )


def test_planned_resize(make_pipeline: Make, alone: Any) -> None:
    pipelines.test_a_pipeline_shrinks_and_grows_by_whole_groups(make_pipeline, alone, "1f1b")


@pytest.mark.parametrize("mesh", ["context=2", *(pytest.param(one, marks=OTHERS) for one in sequences.PAIRS)])
def test_sequences_and_experts(make_sequences: Make, sequences_alone: Any, mesh: str) -> None:
    asked = {**sequences.ALL[mesh], "TEST_OPTIMIZER": "sgd"}
    ranks = sequences.in_two_groups(mesh) // 2
    sequences.learns_as_alone(make_sequences(mesh, TEST_PACE="0", **asked), ranks, *sequences_alone(**asked))


@pytest.mark.parametrize("mesh", ["expert=2", pytest.param("context=2", marks=OTHERS)])
@pytest.mark.parametrize("phase", ["forward", "backward", "sum"])
def test_rank_that_is_killed_inside_its_group(make_sequences: Make, two_groups: Any, mesh: str, phase: str) -> None:
    sequences.test_a_killed_rank_is_replaced_and_no_bit_differs(make_sequences, two_groups, mesh, -1, phase)


@pytest.mark.parametrize("mesh", sequences.OF if LONG else ["context=2"])
def test_rank_that_hangs_inside_its_group(make_sequences: Make, two_groups: Any, mesh: str) -> None:
    sequences.test_a_rank_that_hangs_in_an_exchange_holds_nobody(make_sequences, two_groups, mesh)
