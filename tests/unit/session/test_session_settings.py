"""What a script passes to `regroup.session`: each value that cannot work has one sentence, before anything is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from regroup import strategies
from regroup.errors import UsageError
from regroup.session_settings import SessionSettings, check

GOOD = SessionSettings(
    model=torch.nn.Linear(2, 2),
    optimizer=None,
    data=None,
    global_batch=16,
    microbatch=4,
    state={},
    seed=0,
    shuffle=None,
    reduction="fast",
    scaler=None,
    rehearse=None,
    strategy=strategies.DataParallel(),
    batch_per_rank=None,
    rate_scaling=None,
    noise_scale=False,
)
PER_RANK: dict[str, Any] = {"global_batch": None, "batch_per_rank": 8}
ROUNDS = strategies.LocalSGD(inner_steps=2)
POWER = strategies.DataParallel(hook=strategies.PowerSGD())
SCALER = object()

ALONE: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model is a int; it must be a torch.nn.Module."),
    ({"state": [1]}, 'state is a list; it must be a dict: state={"schedule": schedule}.'),
    ({"seed": 1.5}, "seed is 1.5; it must be a whole number."),
    ({"seed": True}, "seed is True; it must be a whole number."),
    ({"shuffle": "yes"}, "shuffle is 'yes'; it must be True or False."),
    ({"reduction": "slow"}, 'reduction is \'slow\'; it must be "fast" or "exact".'),
    ({"rehearse": "no"}, "rehearse is 'no'; it must be True, False, or None"),
    ({"noise_scale": "yes"}, "noise_scale is 'yes'; it must be True or False."),
    ({"strategy": "ddp"}, "strategy is a str; it must be one of regroup.strategies"),
    ({"rate_scaling": "linear"}, "rate_scaling is a str; it must be None or one of regroup.strategies"),
    ({"batch_per_rank": 8}, "global_batch is 16 and batch_per_rank is 8; exactly one of them must be given."),
    ({"global_batch": None}, "global_batch is None and batch_per_rank is None; exactly one of them must be given."),
    ({"rate_scaling": strategies.RateScaling(16)}, "rate_scaling is set, and global_batch never changes."),
    ({**PER_RANK, "batch_per_rank": 0}, "batch_per_rank is 0; it must be a whole number of at least 1."),
    ({**PER_RANK, "batch_per_rank": True}, "batch_per_rank is True; it must be a whole number of at least 1."),
    ({**PER_RANK, "batch_per_rank": 6}, "batch_per_rank (6) is not a multiple of microbatch (4)."),
    ({**PER_RANK, "reduction": "exact"}, 'reduction is "exact" and batch_per_rank is set'),
    ({**PER_RANK, "strategy": ROUNDS}, "batch_per_rank does not work with strategy LocalSGD so far."),
    ({**PER_RANK, "strategy": strategies.DataParallel(uneven=True)}, "strategy is DataParallel(uneven=True)."),
    ({"reduction": "exact", "strategy": ROUNDS}, 'reduction is "exact" and strategy is LocalSGD('),
    ({"noise_scale": True, "reduction": "exact"}, 'noise_scale=True does not work with reduction="exact".'),
    ({"noise_scale": True, "strategy": ROUNDS}, "noise_scale=True does not work with strategy LocalSGD."),
    ({"noise_scale": True, "strategy": POWER}, "noise_scale=True does not work with a PowerSGD hook."),
    ({"noise_scale": True, "scaler": SCALER}, "noise_scale=True does not work with scaler."),
]
IN_A_GROUP: list[tuple[dict[str, Any], str]] = [
    ({"reduction": "exact"}, 'reduction="exact" does not work with regroup.mesh() so far.'),
    ({"scaler": SCALER}, "scaler does not work with regroup.mesh() so far."),
    (PER_RANK, "batch_per_rank does not work with regroup.mesh() so far."),
    ({"noise_scale": True}, "noise_scale=True does not work with regroup.mesh()."),
]


@pytest.mark.parametrize(
    ("group_size", "changes", "sentence"),
    [
        *(pytest.param(1, changes, sentence, id=sentence) for changes, sentence in ALONE),
        *(pytest.param(2, changes, sentence, id=sentence) for changes, sentence in IN_A_GROUP),
    ],
)
def test_setting_that_cannot_work_has_a_sentence(group_size: int, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(replace(GOOD, **changes), group_size)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    check(GOOD, group_size)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reduction": "exact"},
        {"scaler": SCALER, "strategy": ROUNDS},  # of no concern here: `make_strategy` refuses it
        {"noise_scale": True, "shuffle": False, "rehearse": True},
        {**PER_RANK, "rate_scaling": strategies.RateScaling(16)},
    ],
)
def test_settings_that_work_pass(changes: dict[str, Any]) -> None:
    check(replace(GOOD, **changes), 1)


def test_largest_batch_follows_the_number_of_ranks_only_where_it_is_per_rank() -> None:
    assert GOOD.largest_batch(4) == 16
    assert replace(GOOD, **PER_RANK).largest_batch(4) == 32
