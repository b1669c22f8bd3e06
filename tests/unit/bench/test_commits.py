"""What a benchmark reads out of the commit log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.commits import BENCH_LOG, Commit, CommitLog, LogReader, first_after, percentile, pids_of, steady_epoch
from bench.recovery import result
from bench.trials import Trial


def commits(epoch: int, pids: dict[int, int], t_s: float = 0.0) -> list[Commit]:
    """`pids`: how many commits each process has made in the epoch."""
    return [Commit(t_s + n, rank, pid, n, epoch) for rank, (pid, num) in enumerate(pids.items()) for n in range(num)]


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
    log = [Commit(5.0, 0, 10, 8, 1), Commit(7.5, 1, 11, 9, 2), Commit(7.0, 0, 10, 9, 2), Commit(6.0, 1, 11, 8, 1)]
    assert first_after(log, 1) == Commit(7.0, 0, 10, 9, 2)
    assert first_after(log, 2) is None
    assert pids_of(log, 2) == [10, 11]


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
    log.committed(rank=1, step=7, epoch=2)
    with (tmp_path / "99.jsonl").open("w") as half:
        half.write('{"t": 1.0, "rank": 0, "pid": 99, "st')
    reader.poll()
    assert [(c.rank, c.pid, c.step, c.epoch) for c in reader.commits] == [(1, os.getpid(), 7, 2)]
    assert reader.imports[os.getpid()].imports_s > 0
    with (tmp_path / "99.jsonl").open("a") as half:
        half.write('ep": 8, "epoch": 2}\n')
    reader.poll()
    assert pids_of(reader.commits, 2) == sorted([99, os.getpid()])


def test_result_sets_torchrun_beside_regroup_with_and_without_its_imports() -> None:
    ours, theirs = [Trial(0.1, 0.0, 0)] * 3, [Trial(5.0, 3.0, 1)] * 3
    got = result(ours, theirs)
    assert got["regroup"] == {"p50": 0.1, "p99": 0.1}
    assert got["torchrun"] == {"p50": 5.0, "p99": 5.0}
    assert got["ratio"] == {"p50": 50.0, "p99": 50.0}
    assert got["ratio_without_imports"] == {"p50": 20.0, "p99": 20.0}
