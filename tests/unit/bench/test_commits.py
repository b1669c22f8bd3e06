"""What a benchmark reads out of the commit log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.commits import (
    BENCH_LOG,
    Commit,
    CommitLog,
    LogReader,
    first_after,
    full_after,
    is_whole_again,
    longest_gap,
    percentile,
    pids_of,
    rolled_back,
    steady_epoch,
)


def commits(epoch: int, pids: dict[int, int], t_s: float = 0.0) -> list[Commit]:
    """`pids`: how many commits each process has made in the epoch."""
    return [
        Commit(t_s + n, rank, pid, n, epoch, len(pids))
        for rank, (pid, num) in enumerate(pids.items())
        for n in range(num)
    ]


@pytest.mark.parametrize(
    ("log", "want"),
    [
        pytest.param([], None, id="nothing yet"),
        pytest.param(commits(1, {10: 3, 11: 3}), 1, id="all ranks have made their steps"),
        pytest.param(commits(1, {10: 3, 11: 2}), None, id="one rank has not"),
        pytest.param(commits(1, {10: 3}), None, id="a rank is missing"),
        pytest.param(commits(1, {10: 3, 11: 3}) + commits(2, {10: 1}), None, id="only the newest epoch counts"),
        pytest.param(commits(1, {10: 9, 11: 9}) + commits(2, {10: 3, 12: 3}), 2, id="steady again with a new process"),
    ],
)
def test_steady_epoch(log: list[Commit], want: int | None) -> None:
    assert steady_epoch(log, ranks=2, steps=3) == want


def test_first_after_is_the_earliest_commit_of_a_newer_epoch() -> None:
    log = [
        Commit(5.0, 0, 10, 8, 1, 2),
        Commit(7.5, 1, 11, 9, 2, 2),
        Commit(7.0, 0, 10, 9, 2, 2),
        Commit(6.0, 1, 11, 8, 1, 2),
    ]
    assert first_after(log, 1) == Commit(7.0, 0, 10, 9, 2, 2)
    assert first_after(log, 2) is None
    assert pids_of(log, 2) == [10, 11]


BEFORE = [Commit(4.0, 0, 10, 7, 1, 2), Commit(5.0, 0, 10, 8, 1, 2), Commit(4.1, 1, 11, 7, 1, 2)]
SURVIVOR = Commit(6.0, 0, 10, 9, 2, 1)
JOINING = [Commit(8.0, 0, 10, 10, 3, 1), Commit(8.1, 1, 12, 10, 3, 1)]  # torchft: the new one copies state in this step
WHOLE = [Commit(9.0, 0, 10, 11, 3, 2), Commit(9.1, 1, 12, 11, 3, 2)]


@pytest.mark.parametrize(
    ("log", "full_s", "is_whole"),
    [
        pytest.param(BEFORE, None, False, id="nothing since the kill"),
        pytest.param([*BEFORE, SURVIVOR], None, False, id="survivors only"),
        pytest.param([*BEFORE, SURVIVOR, *JOINING], None, False, id="all commit, and one gave nothing to the step"),
        pytest.param(
            [*BEFORE, SURVIVOR, WHOLE[0]], 9.0, False, id="a step of all ranks, the new process is not known yet"
        ),
        pytest.param(
            [*BEFORE, SURVIVOR, *JOINING, *reversed(WHOLE)], 9.0, True, id="all ranks, in whatever order they are read"
        ),
    ],
)
def test_full_size_is_the_first_step_that_all_ranks_are_in(
    log: list[Commit], full_s: float | None, is_whole: bool
) -> None:
    found = full_after(log, 1, ranks=2)
    assert (found and found.t_s) == full_s
    assert is_whole_again(log, 1, ranks=2) == is_whole


@pytest.mark.parametrize(
    ("first_step", "want"),
    [
        pytest.param(9, 0, id="the step after the last committed one comes next"),
        pytest.param(8, 1, id="the last committed step comes again"),
        pytest.param(6, 3, id="three committed steps come again"),
        pytest.param(10, 0, id="a commit in between was not logged"),
    ],
)
def test_rolled_back_counts_from_the_last_step_that_any_rank_committed(first_step: int, want: int) -> None:
    assert (
        rolled_back([*BEFORE, Commit(7.0, 1, 11, first_step + 1, 2, 1), Commit(6.0, 0, 10, first_step, 2, 1)], 1)
        == want
    )


@pytest.mark.parametrize(
    ("values", "percent", "want"),
    [
        pytest.param([3.0], 99, 3.0, id="one value"),
        pytest.param([1.0, 2.0, 4.0], 50, 2.0, id="the middle"),
        pytest.param([4.0, 1.0], 50, 2.5, id="between neighbours, whatever the order"),
        pytest.param([float(n) for n in range(101)], 99, 99.0, id="p99"),
    ],
)
def test_percentile(values: list[float], percent: float, want: float) -> None:
    assert percentile(values, percent) == pytest.approx(want)


def test_log_is_read_as_written_and_a_half_line_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BENCH_LOG, str(tmp_path))
    log, reader = CommitLog(), LogReader(tmp_path)
    log.imported()
    log.committed(rank=1, step=7, epoch=2, world=3)
    with (tmp_path / "99.jsonl").open("w") as half:
        half.write('{"t": 1.0, "rank": 0, "pid": 99, "st')
    reader.poll()
    assert [(c.rank, c.pid, c.step, c.epoch, c.world) for c in reader.commits] == [(1, os.getpid(), 7, 2, 3)]
    assert reader.imports[os.getpid()].imports_s > 0
    with (tmp_path / "99.jsonl").open("a") as half:
        half.write('ep": 8, "epoch": 2, "world": 3}\n')
    reader.poll()
    assert pids_of(reader.commits, 2) == sorted([99, os.getpid()])


@pytest.mark.parametrize(
    ("times", "gap"), [pytest.param([], 0.0, id="none"), ([5.0], 0.0), ([3.0, 1.0, 7.5, 3.5], 4.0)]
)
def test_longest_time_without_a_commit_of_anyone(times: list[float], gap: float) -> None:
    commits = [Commit(t_s, number % 2, number, number, 1, 2) for number, t_s in enumerate(times)]
    assert longest_gap(commits) == gap
