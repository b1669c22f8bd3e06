"""What `bench.recovery` makes of the log around a kill, and of all trials."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench import torchft_peer
from bench.commits import Commit, Imports, LogReader
from bench.peers import Peer
from bench.recovery_report import result, tables
from bench.trials import BenchError, Trial, trial_of

KILLED_S = 100.0
STEADY = [Commit(99.9, rank, 10 + rank, 50, 1, 3) for rank in range(3)]  # then process 12 is killed


def log_of(*later: Commit, imports: dict[int, float]) -> LogReader:
    return LogReader(Path(), [*STEADY, *later], {pid: Imports(pid, seconds) for pid, seconds in imports.items()})


@pytest.mark.parametrize(
    ("log", "want"),
    [
        pytest.param(
            log_of(
                Commit(100.2, 1, 11, 51, 2, 2),
                Commit(100.1, 0, 10, 51, 2, 2),
                Commit(103.0, 0, 10, 80, 3, 3),
                Commit(103.0, 1, 11, 80, 3, 3),
                Commit(103.1, 2, 13, 80, 3, 3),
                imports={10: 9.0, 11: 9.0, 12: 9.0, 13: 2.5},
            ),
            Trial(0.1, 0.0, 2, world=2, full_s=3.0, full_imports_s=2.5, kept=2, rolled_back=0),
            id="survivors go on, the new process joins them",
        ),
        pytest.param(
            log_of(
                Commit(105.0, 0, 20, 50, 2, 3),
                Commit(105.1, 1, 21, 50, 2, 3),
                Commit(105.1, 2, 22, 50, 2, 3),
                imports={20: 3.0, 21: 3.5, 22: 3.2},
            ),
            Trial(5.0, 3.5, 2, world=3, full_s=5.0, full_imports_s=3.5, kept=0, rolled_back=1),
            id="all processes are new and the last step comes again",
        ),
        pytest.param(
            log_of(
                Commit(100.5, 0, 10, 51, 3, 1),
                Commit(100.5, 1, 11, 51, 3, 1),
                Commit(104.0, 0, 10, 90, 5, 2),
                Commit(104.0, 2, 13, 90, 5, 2),
                Commit(104.1, 1, 11, 91, 5, 3),
                Commit(104.1, 0, 10, 91, 5, 3),
                imports={13: 2.0},
            ),
            Trial(0.5, 0.0, 2, world=1, full_s=4.1, full_imports_s=2.0, kept=2, rolled_back=0),
            id="one survivor was a step ahead, and the new process gives nothing to its first step",
        ),
    ],
)
def test_a_trial_is_read_from_the_log(log: LogReader, want: Trial) -> None:
    got = trial_of(log, 1, ranks=3, killed_s=KILLED_S, killed_rank=2)
    assert vars(got) == pytest.approx(vars(want))


def peer(key: str, **settings: int) -> Peer:
    return Peer(key, f"<{key}>", [], {}, f"What {key} loses.", settings or None)


REGROUP = Trial(0.1, 0.0, 0, world=3, full_s=2.0, full_imports_s=0.5, kept=3, rolled_back=0)
TORCHFT = Trial(0.2, 0.0, 0, world=3, full_s=4.0, full_imports_s=3.0, kept=3, rolled_back=0)
ALONE = Trial(0.2, 0.0, 0, world=1, full_s=4.0, full_imports_s=3.0, kept=3, rolled_back=0)
TORCHRUN = Trial(5.0, 3.0, 1, world=4, full_s=5.0, full_imports_s=3.0, kept=0, rolled_back=1)
SETUP = {"ranks": 4, "trials": 3, "cpus": 2, "torch": "2", "load_before": 0.0, "load_after": 0.0}


def test_result_sets_each_peer_beside_regroup() -> None:
    peers = [peer("regroup"), peer("torchft_tuned", join_timeout_ms=7), peer("torchrun")]
    measured = {"regroup": [REGROUP] * 3, "torchft_tuned": [TORCHFT, ALONE, TORCHFT], "torchrun": [TORCHRUN] * 3}
    got = result(measured, peers, SETUP)
    assert (got["regroup"]["p50"], got["regroup"]["p99"]) == (0.1, 0.1)
    assert (got["torchrun"]["p50"], got["torchrun"]["p99"]) == (5.0, 5.0)
    assert got["torchrun_without_imports"] == {"p50": 2.0, "p99": 2.0}
    assert got["ratio"] == {"p50": 50.0, "p99": 50.0}
    assert got["ratio_without_imports"] == {"p50": 20.0, "p99": 20.0}
    assert got["ratios"]["torchft_tuned"] == {
        "survivors": {"p50": 2.0, "p99": 2.0},
        "full_size": {"p50": 2.0, "p99": 2.0},
    }
    tuned = got["torchft_tuned"]
    assert tuned["survivors"]["ranks"] == {"1": 1, "3": 2}
    assert tuned["survivors"]["kept"] == {"min": 3, "max": 3}
    assert got["torchrun"]["survivors"]["rolled_back"] == {"total": 3, "max": 1}
    assert tuned["full_size"] == {
        "p50": 4.0,
        "p99": 4.0,
        "imports": {"p50": 3.0, "p99": 3.0},
        "without_imports": {"p50": 1.0, "p99": 1.0},
    }
    assert tuned["settings"] == {"join_timeout_ms": 7}
    assert "settings" not in got["torchrun"]


def test_what_is_printed_says_what_comes_back_and_what_is_lost() -> None:
    peers = [peer("regroup"), peer("torchft_tuned", join_timeout_ms=7), peer("torchrun")]
    measured = {"regroup": [REGROUP], "torchft_tuned": [ALONE, TORCHFT, TORCHFT], "torchrun": [TORCHRUN]}
    console = Console(width=120)
    with console.capture() as printed:
        console.print(tables(result(measured, peers, SETUP), peers))
    rows = [" ".join(line.replace("│", " ").split()) for line in printed.get().splitlines()]
    assert "<regroup> 0.100 s 0.100 s survivors: 3 of 4" in rows
    assert "<torchft_tuned> 0.200 s 0.200 s 2.0 x survivors: 3 of 4, survivors: 1 of 4" in rows
    assert "<torchrun> 5.000 s 5.000 s 50.0 x all 4" in rows
    assert "<torchft_tuned> 4.000 s 4.000 s 2.0 x 1.000 s" in rows
    assert "without its imports 2.000 s 2.000 s 20.0 x" in rows
    text = " ".join(rows)
    assert "<torchft_tuned>: 3 of 4 processes live on, no committed step rolled back." in text
    assert "<torchrun>: 0 of 4 processes live on, at most 1 committed step rolled back. What torchrun loses." in text


UV = """#!/bin/sh
echo called >> {calls}
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/torchft" && exit {code}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torchft_peer, "REPOSITORY", tmp_path)
    monkeypatch.setattr(torchft_peer, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(torchft_peer, "UV", tmp_path / "uv")
    return tmp_path / "cache"


def uv(directory: Path, code: int) -> None:
    (directory / "uv").write_text(UV.format(calls=directory / "calls", code=code))
    (directory / "uv").chmod(0o755)


def test_torchft_is_installed_once(cache: Path, tmp_path: Path) -> None:
    uv(tmp_path, 0)
    site = torchft_peer.install()
    assert site.parent == cache
    assert (site / "torchft").is_dir()
    assert torchft_peer.install() == site
    assert (tmp_path / "calls").read_text() == "called\n"


@pytest.mark.parametrize("has_uv", [pytest.param(True, id="no network"), pytest.param(False, id="no uv")])
def test_torchft_not_installed_is_one_sentence_and_leaves_nothing(cache: Path, tmp_path: Path, has_uv: bool) -> None:
    if has_uv:
        uv(tmp_path, 2)
    with pytest.raises(BenchError, match="WITHOUT=torchft"):
        torchft_peer.install()
    assert [path.name for path in cache.iterdir()] == ["torchft-install.log"]
