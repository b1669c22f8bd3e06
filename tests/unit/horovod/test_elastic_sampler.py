"""ElasticSampler: every sample of an epoch once, through changes of the number of ranks."""

from __future__ import annotations

import pytest

from regroup.horovod.elastic import link
from regroup.horovod.elastic.sampler import ElasticSampler, remaining, share


class Ranks:
    """What each rank's sampler believes its place to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = (0, 1)
        monkeypatch.setattr(link, "place", lambda: self.place)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def samplers(ranks: Ranks, size: int, length: int, state: dict[str, int] | None = None) -> list[ElasticSampler]:
    made = []
    for rank in range(size):
        ranks.place = rank, size
        made.append(ElasticSampler(range(length), seed=5))
        if state is not None:
            made[-1].load_state_dict(state)
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_together_have_every_sample_and_equally_many(ranks: Ranks, size: int) -> None:
    dealt = [list(one) for one in samplers(ranks, size, 50)]
    assert len({len(one) for one in dealt}) == 1
    together = [index for one in dealt for index in one]
    assert set(together) == set(range(50))
    assert len(together) - 50 < size


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_samples_that_are_left_are_dealt_anew_and_used_ones_do_not_come_again(
    ranks: Ranks, before: int, after: int
) -> None:
    first, used = samplers(ranks, before, 96), set[int]()
    for one in first:
        for number, index in enumerate(one):
            if number == 8:
                break
            used.add(index)
        one.record_batch(0, 4)
        one.record_batch(1, 4)
    second = samplers(ranks, after, 96, first[0].state_dict())
    left = {index for one in second for index in one}
    assert left == set(range(96)) - used


def test_epochs_differ_and_ranks_agree_on_them(ranks: Ranks) -> None:
    (one,) = samplers(ranks, 1, 40)
    before = list(one)
    one.record_batch(0, 40)
    assert list(remaining(40, shuffle_seed=5, processed=40)) == []
    one.set_epoch(1)
    assert one.processed_num == 0
    assert sorted(one) == sorted(before)
    assert list(one) != before


def test_recorded_indices_count_as_a_batch_of_as_many(ranks: Ranks) -> None:
    one, _ = samplers(ranks, 2, 40)
    one.record_indices([3, 9, 11])
    assert one.state_dict() == {"epoch": 0, "processed_num": 6}


@pytest.mark.parametrize(
    ("indices", "size", "want"),
    [
        pytest.param([], 3, [[], [], []], id="nothing is left"),
        pytest.param([7], 3, [[7], [7], [7]], id="fewer samples than ranks: they come again"),
        pytest.param([1, 2, 3, 4], 2, [[1, 3], [2, 4]], id="in turn"),
        pytest.param([1, 2, 3], 2, [[1, 3], [2, 1]], id="the first one comes twice"),
    ],
)
def test_shares(indices: list[int], size: int, want: list[list[int]]) -> None:
    assert [share(indices, rank, size) for rank in range(size)] == want


def test_without_shuffle_the_order_is_that_of_the_numbers(ranks: Ranks) -> None:
    ranks.place = 0, 1
    assert list(ElasticSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]
