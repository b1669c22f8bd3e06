"""Orders of a pipeline: nobody waits for ever, everything is computed once, and they are torch's."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from regroup.parallel.schedules import SCHEDULES, Action, balanced, order

SHAPES = [
    (schedule, ranks, chunks, microbatches)
    for schedule, ranks, chunks, microbatches in product(SCHEDULES, (2, 3, 4), (1, 2, 3), (0, 1, 2, 3, 5, 8))
    if chunks == 1 or schedule in ("interleaved", "zero_bubble")
]


def needed(action: Action, num_stages: int) -> list[Action]:
    """Return what has to be done before an action."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [Action("I", stage, microbatch)]
    before = [Action("F", stage, microbatch)]
    return before if stage == num_stages - 1 else [*before, Action(kind, stage + 1, microbatch)]


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "microbatches"), SHAPES)
def test_every_pass_comes_once_and_nobody_waits_for_ever(
    schedule: str, ranks: int, chunks: int, microbatches: int
) -> None:
    left = {rank: list(order(schedule, rank, ranks, chunks, microbatches)) for rank in range(ranks)}
    kinds = "FIW" if schedule == "zero_bubble" else "FB"
    wanted = Counter(product(kinds, range(ranks * chunks), range(microbatches)))
    assert Counter(tuple(one) for actions in left.values() for one in actions) == wanted
    for actions in left.values():
        for stage, kind in product(range(ranks * chunks), kinds):
            numbers = [one.microbatch for one in actions if (one.stage, one.kind) == (stage, kind)]
            assert numbers == sorted(numbers), "an edge gives out in the order in which it takes in"
        assert all(one.stage % ranks == rank for rank, actions in left.items() for one in actions)
    done: set[Action] = set()
    while any(left.values()):
        ready = [a for a in left.values() if a and all(one in done for one in needed(a[0], ranks * chunks))]
        assert ready, f"everybody waits: {[actions[:1] for actions in left.values()]}"
        done |= {actions.pop(0) for actions in ready}


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_orders_are_those_of_torch(schedule: str) -> None:
    from torch.distributed.pipelining import schedules

    kind: Any = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    }[schedule]
    for ranks, chunks, rounds in product((2, 3, 4), (1, 2, 3) if schedule == "zero_bubble" else (2, 3), (1, 2, 4)):
        stages = [
            SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=0, submod=None)
            for _ in range(chunks)
        ]
        theirs = kind(stages, ranks * rounds).pipeline_order
        for rank in range(ranks):
            expected = [(str(a.computation_type.value), a.stage_index, a.microbatch_index) for a in theirs[rank] if a]
            assert [tuple(one) for one in order(schedule, rank, ranks, chunks, ranks * rounds)] == expected


def test_one_forward_one_backward_holds_no_more_than_it_has_stages_behind_it() -> None:
    for rank in range(4):
        held = most = 0
        for kind, _, _ in order("1f1b", rank, 4, 1, 20):
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == 4 - rank


@pytest.mark.parametrize(
    ("weights", "parts", "want"),
    [
        ([1, 1, 1, 1], 2, [0, 2]),
        ([5, 1, 1, 5, 9, 1], 3, [0, 2, 4]),
        ([9, 1, 1, 1], 2, [0, 1]),
        ([1, 1, 1], 3, [0, 1, 2]),
        ([7], 1, [0]),
    ],
)
def test_balanced(weights: list[int], parts: int, want: list[int]) -> None:
    assert balanced(weights, parts) == want
