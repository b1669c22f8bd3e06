"""Batches that worker processes read ahead: the right ones, whatever was read before."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from regroup.data import Feed, Key, SamplePlan, as_source, make_feed
from regroup.data.feed import Ahead

PLAN = SamplePlan(3, 64, 16, 4, 4)


class Noisy(Dataset[Any]):
    """Items that tell who read them, with noise as an augmentation draws it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == 63 and os.environ.get("TEST_FAILS"):
            raise KeyError("sample 63")
        return index, torch.rand(()).item() + random.random(), os.getpid()


def collate(items: list[Any]) -> Any:
    """Draw something, as masking or mixing of samples does."""
    indices, noise, pids = default_collate(items)
    return indices, noise + torch.rand(()), pids


@pytest.fixture(params=[0, 2])
def feed(request: pytest.FixtureRequest) -> Iterator[Ahead]:
    torch.manual_seed(request.param)  # what the process drew before is of no account
    loader = DataLoader(Noisy(), batch_size=4, num_workers=request.param, collate_fn=collate)
    feed = make_feed(as_source(loader, 4), PLAN)
    assert isinstance(feed, Ahead)
    yield feed
    feed.close()


def seen(feed: Feed, share: range, *keys: tuple[int, int]) -> list[tuple[list[int], list[float]]]:
    batches = [feed.take(Key(*key), share) for key in keys]
    return [(indices.tolist(), noise.tolist()) for indices, noise, _ in batches]


def test_batches_are_those_of_the_plan_in_any_order_of_events(feed: Ahead) -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    first = seen(feed, range(2), *keys)
    assert [ids for ids, _ in first] == [PLAN.ids(*key).tolist() for key in keys]
    assert len({noise for _, batch in first for noise in batch}) == 20
    # Step 1 again with other shares, as after a membership change: the same batches, and the same noise.
    assert seen(feed, range(1, 4), (1, 1), (1, 2)) == [first[3], *seen(feed, range(2, 3), (1, 2))]
    assert seen(feed, range(2), (1, 0), (1, 1), (2, 0)) == first[2:]


def test_noise_does_not_depend_on_who_reads() -> None:
    noise = []
    for workers in (0, 1):
        torch.manual_seed(workers)
        feed = make_feed(as_source(DataLoader(Noisy(), batch_size=4, num_workers=workers, collate_fn=collate), 4), PLAN)
        noise.append(seen(feed, range(2), (0, 0), (0, 1), (1, 0)))
        feed.close()
    assert noise[0] == noise[1]


class Opened(Noisy):
    """What each worker process opens for itself."""

    file: str | None = None

    def __getitem__(self, index: int) -> Any:
        return index, self.file


def opens(_worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert len(info.dataset) == 64  # type: ignore[arg-type]
    info.dataset.file = "open"  # type: ignore[attr-defined]


def test_worker_init_meets_the_scripts_dataset() -> None:
    loader = DataLoader(Opened(), batch_size=4, num_workers=1, worker_init_fn=opens)
    feed = make_feed(as_source(loader, 4), PLAN)
    assert list(feed.take(Key(0, 0), range(1))[1]) == ["open"] * 4
    feed.close()


def test_worker_processes_stay_over_a_membership_change() -> None:
    feed = make_feed(as_source(DataLoader(Noisy(), batch_size=4, num_workers=2), 4), PLAN)
    pids = set()
    for share in (range(2), range(4), range(1)):
        for v in share:
            pids.add(int(feed.take(Key(0, v), share)[2][0]))
    assert len(pids) == 2
    assert os.getpid() not in pids
    feed.close()


def test_error_of_a_worker_process_is_the_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FAILS", "1")
    feed = make_feed(as_source(DataLoader(Noisy(), batch_size=4, num_workers=1), 4), PLAN)
    keys = [(step, v) for step in range(4) for v in range(4)]
    with pytest.raises(KeyError, match="sample 63"):
        seen(feed, range(4), *keys)
    feed.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_read_ahead_is_dropped_when_the_batch_changes(num_workers: int) -> None:
    """Rank 0's share has the same numbers at any batch; its samples are others."""
    plan = SamplePlan(3, 64, 16, 4, 4)
    feed = make_feed(as_source(DataLoader(Noisy(), batch_size=4, num_workers=num_workers, collate_fn=collate), 4), plan)
    try:
        seen(feed, range(2), (0, 0), (0, 1))
        plan.change_batch(1, 8)
        keys = [(1, 0), (1, 1), (2, 0), (2, 1)]
        assert [ids for ids, _ in seen(feed, range(2), *keys)] == [plan.ids(*key).tolist() for key in keys]
    finally:
        feed.close()
