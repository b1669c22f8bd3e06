"""Data that is read in order: each rank reads its part of it, wherever it begins, and all stop before a step that is not whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import regroup
from regroup import strategies
from regroup.data import UNKNOWN, DataError, EndOfStream, Key, SamplePlan, Stream, as_stream, make_feed, stream
from regroup.errors import DataEnded, GenerationChanged
from regroup.job import Job
from regroup.protocol import env


class Records:
    """Numbers from 0 on. Knows where it was opened, what was read, and whether it was closed."""

    def __init__(self, length: int = 10**9) -> None:
        self.length = length
        self.opened: list[int] = []
        self.read: list[int] = []
        self.num_closed = 0

    def __call__(self, position: int) -> Iterator[int]:
        self.opened.append(position)
        try:
            for number in range(position, self.length):
                self.read.append(number)
                yield number
        finally:
            self.num_closed += 1


PLAN = SamplePlan(0, UNKNOWN, 12, 3, 4, in_order=True)


def take(feed: Any, step: int, share: range) -> list[list[int]]:
    return [feed.take(Key(step, v), share).tolist() for v in share]


def test_rank_reads_on_and_leaves_out_what_others_compute() -> None:
    records = Records()
    feed = make_feed(stream(records), PLAN)
    assert take(feed, 2, range(1, 3)) == [[27, 28, 29], [30, 31, 32]]
    assert take(feed, 3, range(1, 3)) == [[39, 40, 41], [42, 43, 44]]
    assert records.opened == [27]
    assert records.read == list(range(27, 45))


def test_rank_that_has_to_go_back_opens_it_again() -> None:
    """After a membership change: the same step, another share."""
    records = Records()
    feed = make_feed(stream(records), PLAN)
    take(feed, 2, range(1, 3))
    assert take(feed, 2, range(0, 2)) == [[24, 25, 26], [27, 28, 29]]
    assert records.opened == [27, 24]
    assert records.num_closed == 1
    feed.close()
    assert records.num_closed == 2


def test_whatever_the_shares_all_samples_are_read_once() -> None:
    for shares in ([range(4)], [range(2), range(2, 4)], [range(1), range(1, 4)], [range(1), range(1, 3), range(3, 4)]):
        feeds = [make_feed(stream(Records()), PLAN) for _ in shares]
        found = [
            number
            for step in range(5)
            for feed, share in zip(feeds, shares)
            for v in take(feed, step, share)
            for number in v
        ]
        assert sorted(found) == list(range(60))


def test_iterator_that_can_skip_is_asked_to() -> None:
    class Skips:
        def __init__(self, position: int) -> None:
            self.position, self.num_read = position, 0

        def __iter__(self) -> Skips:
            return self

        def __next__(self) -> int:
            self.position, self.num_read = self.position + 1, self.num_read + 1
            return self.position - 1

        def skip(self, count: int) -> None:
            self.position += count

    opened: list[Skips] = []

    def open_at(position: int) -> Skips:
        opened.append(Skips(position))
        return opened[-1]

    feed = make_feed(stream(open_at), PLAN)
    assert take(feed, 0, range(1)) + take(feed, 1, range(1)) == [[0, 1, 2], [12, 13, 14]]
    assert [one.num_read for one in opened] == [6]


def test_what_a_stream_draws_depends_on_the_microbatch_only() -> None:
    def noisy(_position: int) -> Iterator[float]:
        while True:
            yield random.random() + float(torch.rand(()))

    alone, other = make_feed(stream(noisy), PLAN), make_feed(stream(noisy), PLAN)
    whole = [take(alone, step, range(4)) for step in range(2)]
    random.seed(7)
    part = [take(other, step, range(2, 4)) for step in range(2)]
    assert part == [batches[2:] for batches in whole]


@pytest.mark.parametrize("length", [0, 26, 27, 29])
def test_end_is_said_before_a_microbatch_that_is_not_whole(length: int) -> None:
    feed = make_feed(stream(Records(length)), PLAN)
    with pytest.raises(EndOfStream):
        take(feed, 2, range(1, 3))


def test_error_of_the_stream_is_raised_and_it_is_opened_again() -> None:
    opened = []

    def fails(position: int) -> Iterator[int]:
        opened.append(position)
        yield position
        if len(opened) == 1:
            raise ZeroDivisionError
        yield from (1, 2)

    feed = make_feed(stream(fails), PLAN)
    with pytest.raises(ZeroDivisionError):
        take(feed, 0, range(1))
    assert take(feed, 0, range(1)) == [[0, 1, 2]]


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Skippable(Counting):
    def __init__(self) -> None:
        self.skipped: list[int] = []

    def skip(self, count: int) -> Any:
        self.skipped.append(count)
        return range(count, 100)


@pytest.mark.parametrize("dataset", [Counting(), Skippable()])
def test_iterable_dataset_is_a_stream(dataset: Counting) -> None:
    found = as_stream(dataset)
    assert isinstance(found, Stream)
    assert take(make_feed(found, PLAN), 2, range(1, 3)) == [[27, 28, 29], [30, 31, 32]]
    assert not isinstance(dataset, Skippable) or dataset.skipped == [27]


def test_wrong_argument_is_one_sentence() -> None:
    with pytest.raises(DataError, match=r"open_at of regroup\.stream\(\) is a list_iterator; it must be a function"):
        stream(iter([1]))  # type: ignore[arg-type]
    feed: Any = make_feed(stream(lambda position: position), PLAN)  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match=r"open_at\(24\) of regroup\.stream\(\) returned a int"):
        take(feed, 2, range(1))


# --- in a session ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.SOCKET, env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)


def make_job(records: Any, **changes: Any) -> Job:
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    fields: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4),
        "data": stream(records),
        "global_batch": 12,
        "microbatch": 3,
    }
    return regroup.session(**{**fields, **changes})


def train(job: Job, total: int, seen: list[Any] | None = None) -> list[int]:
    """Return the records of committed steps. `seen`: what the block was ended by."""
    used = []
    for step in job.steps(total):
        mine: list[int] = []
        with step:
            try:
                for batch in step.microbatches():
                    assert batch.tolist() == step.ids.tolist()
                    mine += batch.tolist()
                    step.backward(mean=job.model(batch[:, None].float()).square().mean(), weight=len(batch))
                step.commit()
            except GenerationChanged as error:
                if seen is not None:
                    seen.append(error)
                raise
        if step.committed:
            used += mine
    return used


def test_job_ends_with_the_last_whole_step() -> None:
    ends: list[Any] = []
    with make_job(Records(40)) as job:
        assert train(job, 100, ends) == list(range(36))
    assert (job.outcome, job.step) == ("Complete", 3)
    assert [type(error) for error in ends] == [DataEnded]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"reduction": "exact"}, id="exact"),
        pytest.param({"strategy": strategies.LocalSGD(inner_steps=2)}, id="local SGD"),
        pytest.param({"global_batch": None, "batch_per_rank": 12}, id="a batch for each rank"),
    ],
)
@pytest.mark.parametrize("length", [36, 37, 41, 47])
def test_end_under_other_strategies(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], length: int) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)  # it would stay so for other tests
    with make_job(Records(), **fields) as three_steps:
        train(three_steps, 3)
    with make_job(Records(length), **fields) as job:
        assert train(job, 100) == list(range(36))
    assert all(torch.equal(a, b) for a, b in zip(three_steps.model.parameters(), job.model.parameters()))


def test_stream_longer_than_the_job_is_left_in_the_middle() -> None:
    records = Records()
    with make_job(records) as job:
        assert train(job, 5) == list(range(60))
    assert records.num_closed == 1


def test_stream_without_a_whole_step_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data ended in step 0: the stream has fewer samples than a step needs \(12\)"):
        with make_job(Records(11)) as job:
            train(job, 5)


def test_checkpoint_says_where_the_stream_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CHECKPOINT_DIR, str(tmp_path))
    with make_job(Records()) as job:
        train(job, 3)
    records = Records()
    with make_job(records) as job:
        assert train(job, 5) == list(range(36, 60))
    assert records.opened == [36]
