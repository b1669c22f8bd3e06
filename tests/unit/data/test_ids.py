"""Sample plans: every sample exactly once an epoch, whatever the world does."""

from typing import Any

import numpy as np
import pytest
import torch

from regroup.data import DataError, SamplePlan, share_of, shares_of
from regroup.data.ids import permute


def make_plan(**changes: Any) -> SamplePlan:
    return SamplePlan(**{"seed": 7, "num_samples": 100, "global_batch": 20, "microbatch": 5, **changes})


def step_ids(plan: SamplePlan, step: int) -> list[int]:
    return [i for v in range(plan.num_virtual) for i in plan.ids(step, v).tolist()]


@pytest.mark.parametrize("num_samples", [*range(1, 70), 255, 256, 257, 1797, 65_537, 100_003])
def test_permutation_is_a_bijection(num_samples: int) -> None:
    for seed, epoch in [(0, 0), (0, 1), (2**63, 5)]:
        got = permute(
            np.arange(num_samples, dtype=np.uint64), np.full(num_samples, epoch, np.uint64), seed, num_samples
        )
        assert np.array_equal(np.sort(got), np.arange(num_samples))


def test_permutation_differs_by_seed_and_epoch_and_is_spread() -> None:
    n = 10_000
    positions = np.arange(n, dtype=np.uint64)
    orders = [
        permute(positions, np.full(n, epoch, np.uint64), seed, n) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    for k, order in enumerate(orders):
        assert abs(np.corrcoef(positions, order)[0, 1]) < 0.05  # standard deviation 0.01
        for other in orders[:k]:
            assert np.count_nonzero(order == other) < 12  # one on average


def test_permutation_of_few_samples_is_uniform() -> None:
    counts = np.zeros((10, 10))
    for epoch in range(4000):
        counts[np.arange(10), permute(np.arange(10, dtype=np.uint64), np.full(10, epoch, np.uint64), 3, 10)] += 1
    assert ((counts - 400) ** 2 / 400).sum() < 140  # chi-squared with 81 degrees of freedom: 81 +- 13


def test_ids_are_the_formula_of_the_design() -> None:
    plan = make_plan(num_samples=33)
    for step in (0, 1, 9, 10_000):
        for v in range(plan.num_virtual):
            positions = [step * 20 + v * 5 + j for j in range(5)]
            want = [
                int(permute(np.array([p % 33], np.uint64), np.array([p // 33], np.uint64), 7, 33)[0]) for p in positions
            ]
            ids = plan.ids(step, v)
            assert ids.tolist() == want
            assert ids.dtype == torch.int64


def test_ids_far_away_and_of_a_huge_set_are_in_range() -> None:
    plan = make_plan(num_samples=2**61)
    assert all(0 <= i < 2**61 for i in step_ids(plan, 10**15))


@pytest.mark.parametrize("worlds", [(1,), (4,), (3, 1, 4, 2, 2), (2, 3)])
def test_every_sample_comes_once_an_epoch_at_any_sequence_of_world_sizes(worlds: tuple[int, ...]) -> None:
    plan = make_plan(num_samples=100, max_world_size=4)
    for epoch in range(3):
        seen: list[int] = []
        for step in range(epoch * 5, epoch * 5 + 5):
            world_size = worlds[step % len(worlds)]
            for rank in range(world_size):
                for v in plan.share(rank, world_size):
                    seen += plan.ids(step, v).tolist()
        assert sorted(seen) == list(range(100))


def test_every_sample_comes_once_an_epoch_when_steps_straddle_epochs() -> None:
    plan = make_plan(num_samples=33)
    used = [i for step in range(33) for i in step_ids(plan, step)]
    for epoch in range(20):
        assert sorted(used[epoch * 33 : epoch * 33 + 33]) == list(range(33))


def test_shares_are_contiguous_complete_and_even() -> None:
    for num_virtual in range(1, 60):
        for world_size in range(1, num_virtual + 1):
            shares = shares_of(num_virtual, world_size)
            assert [v for share in shares for v in share] == list(range(num_virtual))
            sizes = {len(share) for share in shares}
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= 1


def test_hash_sum_of_all_shares_is_the_expected_one_at_any_world_size() -> None:
    plan = make_plan()
    for world_size in range(1, 5):
        shares = [plan.share(rank, world_size) for rank in range(world_size)]
        total = sum(plan.hash_of(3, v) for share in shares for v in share)
        assert total % 2**64 == plan.expected_hash(3)


def test_stale_share_gives_the_right_count_and_the_wrong_hash() -> None:
    """Trace H14 QUOTA: shares change while one rank has not heard: v1 twice, v2 never, and the count is right."""
    plan = make_plan()
    before = [range(0, 1), range(1, 2), range(2, 4)]
    after = [range(0, 2), range(2, 3), range(3, 4)]
    dealt = [*after[0], *before[1], *after[2]]  # rank 1 has not heard
    assert dealt == [0, 1, 1, 3]
    assert sum(len(plan.ids(0, v)) for v in dealt) == plan.global_batch
    assert sum(plan.hash_of(0, v) for v in dealt) % 2**64 != plan.expected_hash(0)


def test_hash_is_of_the_samples_whatever_their_microbatch() -> None:
    """The same samples, cut into other microbatches, have the same sum; other samples another."""
    whole, halves = SamplePlan(7, 100, 8, 8), SamplePlan(7, 100, 8, 4)
    for step in range(5):
        assert sorted(whole.ids(step, 0).tolist()) == sorted(
            [*halves.ids(step, 0).tolist(), *halves.ids(step, 1).tolist()]
        )
        assert whole.hash_of(step, 0) == (halves.hash_of(step, 0) + halves.hash_of(step, 1)) % 2**64
    assert len({whole.hash_of(step, 0) for step in range(5)}) == 5


@pytest.mark.parametrize("change", [{"seed": 8}, {"num_samples": 101}])
def test_plans_that_differ_expect_different_hashes(change: dict[str, int]) -> None:
    assert make_plan(**change).expected_hash(0) != make_plan().expected_hash(0)


@pytest.mark.parametrize("num_samples", [1, 7, 33, 100, 1000])
def test_digest_is_absolute(num_samples: int) -> None:
    """In whatever order steps are asked for, from whatever history: the sum over all committed samples."""
    one_by_one = make_plan(num_samples=num_samples)
    total, want = 0, []
    for step in range(120):
        want.append(f"{total:016x}")
        assert one_by_one.digest(step) == want[step]
        total = (total + one_by_one.expected_hash(step)) % 2**64
    jumping = make_plan(num_samples=num_samples)
    for step in (119, 3, 4, 60, 59, 61, 118, 0):
        assert jumping.digest(step) == want[step]
        assert make_plan(num_samples=num_samples).digest(step) == want[step]


def test_digest_continues_from_what_came_with_the_state() -> None:
    plan = make_plan(num_samples=10**9)
    assert plan.digest(1_000_001, known=(1_000_000, "00000000000000ff")) == (
        f"{(0xFF + plan.expected_hash(1_000_000)) % 2**64:016x}"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"global_batch": 21}, r"global_batch \(21\) is not a multiple of microbatch \(5\)", id="ragged"),
        pytest.param({"max_world_size": 5}, r"= 4\) is less than the largest number of ranks \(5\)", id="too few"),
        pytest.param({"num_samples": 0}, r"num_samples is 0; .* The data is empty", id="no data"),
        pytest.param({"microbatch": -1}, "microbatch is -1", id="negative microbatch"),
        pytest.param({"global_batch": 20.0}, "global_batch is 20.0", id="not an integer"),
    ],
)
def test_plan_that_cannot_be_is_refused_in_one_sentence(changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        make_plan(**changes)


def test_share_of_is_the_row_of_shares_of() -> None:
    assert [share_of(10, rank, 3) for rank in range(3)] == list(shares_of(10, 3))


def test_every_sample_comes_once_while_the_batch_changes() -> None:
    """Whatever the batches are, positions are used in turn; a batch that nobody committed a step with leaves no trace."""
    plan, random = make_plan(num_samples=33, global_batch=15), np.random.default_rng(3)
    used: list[int] = []
    digests = {0: "0" * 16}
    for step in range(60):
        if step % 4 == 0:
            for batch in random.integers(1, 6, size=2) * 5:
                plan.change_batch(step, int(batch))
                assert len(step_ids(plan, step)) == batch
        assert plan.samples(step) == len(used)
        used += step_ids(plan, step)
        digests[len(used)] = plan.digest(step + 1)
    for epoch in range(len(used) // 33):
        assert sorted(used[epoch * 33 : epoch * 33 + 33]) == list(range(33))
    one_by_one = SamplePlan(7, 33, 5, 5)
    for position, digest in digests.items():
        assert digest == one_by_one.digest(position // 5), "a function of the number of samples alone"


def test_plan_that_loads_where_another_was_gives_its_answers() -> None:
    first, second = make_plan(), make_plan()
    first.change_batch(3, 10)
    first.change_batch(8, 15)
    digest = first.digest(9)
    second.ids(8, 0)  # computed ahead, of another batch
    second.load_state_dict(first.state_dict())
    assert second.digest(9, known=(9, digest)) == digest
    for step in range(8, 40):
        assert step_ids(second, step) == step_ids(first, step)
        assert second.expected_hash(step) == first.expected_hash(step)
        assert second.digest(step + 1) == first.digest(step + 1)
    assert second.samples(8) == 3 * 20 + 5 * 10
    assert second.num_virtual == 3
    with pytest.raises(ValueError, match="step 7 is before step 8"):
        second.ids(7, 0)


def test_batch_that_no_microbatch_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="batch 12 is not a multiple of microbatch 5"):
        make_plan().change_batch(0, 12)
