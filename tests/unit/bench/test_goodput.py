"""What `bench.goodput` makes of the commits of a run in which ranks are killed."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bench import goodput as command
from bench.commits import Commit
from bench.goodput_figure import draw
from bench.goodput_report import (
    Disturbed,
    Goodput,
    Window,
    fault_times,
    goodput,
    mean_step_s,
    result,
    standing,
    tables,
    victim,
)
from bench.peers import Peer
from bench.trials import BenchError


def epoch(number: int, at: Sequence[tuple[float, int]], ranks: int = 4, pids: int = 10) -> list[Commit]:
    """Return the commits of an epoch: each of its ranks commits each (time, step)."""
    return [Commit(t_s, rank, pids + rank, step, number, ranks) for t_s, step in at for rank in range(ranks)]


@pytest.mark.parametrize(
    ("seconds", "every_s", "want"),
    [
        pytest.param(30.0, 10.0, [5.0, 15.0, 25.0], id="one in the middle of each interval"),
        pytest.param(180.0, 60.0, [30.0, 90.0, 150.0], id="three in three minutes"),
        pytest.param(15.0, 10.0, [5.0], id="none in an interval that is not whole"),
        pytest.param(5.0, 10.0, [], id="no whole interval"),
    ],
)
def test_fault_times(seconds: float, every_s: float, want: list[float]) -> None:
    assert fault_times(seconds, every_s) == want


CALM = epoch(1, [(0.0, 1), (1.0, 2), (2.0, 3)])
WINDOW = Window(2.5, 12.5)


@pytest.mark.parametrize(
    ("later", "keeps_batch", "want"),
    [
        pytest.param(
            epoch(1, [(3.0 + n, 4 + n) for n in range(10)]),
            True,
            Goodput(stayed=10, partial=0, again=0, goodput=1.0, steps=1.0),
            id="undisturbed: all of the time",
        ),
        pytest.param(
            epoch(1, [(3.0, 4), (4.0, 5)]) + epoch(2, [(8.0, 6), (9.0, 7)], ranks=3) + epoch(3, [(10.0, 8)]),
            True,
            Goodput(stayed=5, partial=2, again=0, goodput=0.5, steps=0.5),
            id="time without a step does not count, a step of the survivors does",
        ),
        pytest.param(
            epoch(1, [(3.0, 4), (4.0, 5)]) + epoch(2, [(8.0, 6), (9.0, 7)], ranks=3) + epoch(3, [(10.0, 8)]),
            False,
            Goodput(stayed=5, partial=2, again=0, goodput=0.45, steps=0.5),
            id="survivors that leave samples out train on fewer",
        ),
        pytest.param(
            epoch(1, [(3.0, 4), (4.0, 5), (5.0, 6)]) + epoch(2, [(9.0, 5), (10.0, 6), (11.0, 7)]),
            True,
            Goodput(stayed=4, partial=0, again=2, goodput=0.4, steps=0.4),
            id="steps that are made again count once",
        ),
        pytest.param(
            epoch(1, [(3.0, 4)]) + epoch(2, [(9.0, 3), (10.0, 4), (11.0, 5)]),
            True,
            Goodput(stayed=2, partial=0, again=2, goodput=0.2, steps=0.2),
            id="a step from before the window that is made again does not count",
        ),
        pytest.param(
            epoch(1, [(3.0, 4), (4.0, 5), (5.0, 6)]) + epoch(2, [(13.0, 5), (14.0, 6)]),
            True,
            Goodput(stayed=1, partial=0, again=2, goodput=0.1, steps=0.1),
            id="steps that are lost at the end do not count, though they are made again after it",
        ),
        pytest.param(
            epoch(1, [(3.0, 4), (4.0, 5)]) + epoch(2, [(5.0, 6), (6.0, 7)]) + epoch(3, [(9.0, 4)]),
            True,
            Goodput(stayed=1, partial=0, again=4, goodput=0.1, steps=0.1),
            id="an epoch that goes on from an old state voids all epochs in between",
        ),
        pytest.param(
            epoch(1, [(3.0, 4), (13.0, 5)]),
            True,
            Goodput(stayed=1, partial=0, again=0, goodput=0.1, steps=0.1),
            id="a step after the end does not count",
        ),
        pytest.param(
            [*epoch(1, [(3.0, 4)]), Commit(4.0, 0, 10, 5, 1, 4), *epoch(2, [(5.0, 6)], ranks=3)],
            True,
            Goodput(stayed=3, partial=1, again=0, goodput=0.3, steps=0.3),
            id="a step that one rank alone had committed stands, if the others go on from it",
        ),
        pytest.param(
            [Commit(2.4, 0, 10, 4, 1, 4), Commit(2.6, 1, 11, 4, 1, 4), *epoch(1, [(3.0, 5)])],
            True,
            Goodput(stayed=1, partial=0, again=0, goodput=0.1, steps=0.1),
            id="a step that ranks commit on both sides of the begin is before it",
        ),
        pytest.param([], True, Goodput(stayed=0, partial=0, again=0, goodput=0.0, steps=0.0), id="no step"),
    ],
)
def test_goodput(later: list[Commit], keeps_batch: bool, want: Goodput) -> None:
    got = goodput(CALM + later, WINDOW, step_s=1.0, ranks=4, keeps_batch=keeps_batch)
    assert vars(got) == pytest.approx(vars(want))
    assert goodput((CALM + later)[::-1], WINDOW, step_s=1.0, ranks=4, keeps_batch=keeps_batch) == got


def test_a_step_stands_in_the_last_epoch_that_made_it() -> None:
    log = epoch(1, [(1.0, 1), (2.0, 2), (3.0, 3)]) + epoch(2, [(6.0, 2)], ranks=3)
    found = standing(log, 10.0)
    assert {step: (commit.epoch, commit.t_s) for step, commit in found.items()} == {1: (1, 1.0), 2: (2, 6.0)}


@pytest.mark.parametrize(
    ("log", "want"),
    [
        pytest.param(epoch(1, [(1.0, 1), (2.0, 2), (4.0, 3), (4.6, 4)]), 1.2, id="a slow step counts"),
        pytest.param(
            [*epoch(1, [(1.0, 1), (2.0, 2)]), Commit(1.9, 1, 11, 2, 1, 4)], 0.9, id="the first rank to commit counts"
        ),
        pytest.param(epoch(1, [(1.0, 1), (2.0, 2), (99.0, 3)]), 1.0, id="what is outside the window does not count"),
        pytest.param(epoch(1, [(1.0, 1)]), None, id="one step has no duration"),
        pytest.param(
            epoch(1, [(1.0, 1), (2.0, 2)]) + epoch(2, [(5.0, 3), (5.1, 4), (5.2, 5)], ranks=3) + epoch(3, [(9.0, 6)]),
            1.0,
            id="neither a step of fewer ranks counts nor the time between two epochs",
        ),
    ],
)
def test_mean_step(log: list[Commit], want: float | None) -> None:
    assert mean_step_s(log, Window(0.0, 10.0), ranks=4) == (None if want is None else pytest.approx(want))


@pytest.mark.parametrize(
    ("living", "draw_", "want"),
    [
        pytest.param({20, 21, 22}, 0.0, 20, id="the first of them by rank"),
        pytest.param({20, 21, 22}, 0.99, 22, id="the last of them by rank"),
        pytest.param({20, 22}, 0.6, 22, id="one that has ended is not drawn"),
        pytest.param({10, 11, 20}, 0.99, 20, id="one that is not in the newest epoch is not drawn"),
        pytest.param({10, 11}, 0.5, None, id="nobody trains"),
    ],
)
def test_victim(living: set[int], draw_: float, want: int | None) -> None:
    log = epoch(1, [(1.0, 1)]) + epoch(2, [(2.0, 2), (3.0, 3)], ranks=3, pids=20)
    found = victim(log, living, draw_)
    assert (found and (found.pid, found.step)) == (want and (want, 3))


def peer(key: str, *, keeps_batch: bool = True) -> Peer:
    return Peer(key, f"<{key}>", [], {}, f"What {key} loses.", None, keeps_batch)


def disturbed(every_s: float, share: float, *, steps: float | None = None, skipped: int = 0) -> Disturbed:
    good = Goodput(stayed=900, partial=20, again=3, goodput=share, steps=share if steps is None else steps)
    return Disturbed(every_s, 180.0, 0.02, 0.99, 18 - skipped, skipped, good)


PEERS = [peer("regroup"), peer("torchft_tuned", keeps_batch=False), peer("torchrun")]
MEASURED = {
    "regroup": [disturbed(10, 0.97), disturbed(60, 0.99)],
    "torchft_tuned": [disturbed(10, 0.8, steps=0.9), disturbed(60, 0.98)],
    "torchrun": [disturbed(10, 0.2, skipped=4), disturbed(60, 0.85)],
}
SETUP = {"ranks": 4, "cpus": 2, "seconds": 180.0, "torch": "2", "load_before": 0.0, "load_after": 0.0}
FOUND = result(MEASURED, PEERS, SETUP)


def test_table_has_a_row_for_each_rate_of_kills() -> None:
    console = Console(width=80)
    with console.capture() as printed:
        console.print(tables(FOUND))
    rows = [" ".join(line.split()) for line in printed.get().splitlines()]
    assert "<regroup>, 10 s 97.0 % 97.0 % 99.0 % 20.0 ms 900 18" in rows
    assert "<torchft_tuned>, 10 s 80.0 % 90.0 % 99.0 % 20.0 ms 900 18" in rows
    assert "<torchrun>, 10 s 20.0 % 20.0 % 99.0 % 20.0 ms 900 14 of 18" in rows
    assert "<torchrun>: 6 steps made again or lost. What torchrun loses." in rows
    assert json.loads(json.dumps(FOUND))["regroup"]["every"]["60"]["goodput"] == 0.99


def test_figure_names_each_system_and_is_the_same_each_time(tmp_path: Path) -> None:
    times = {"regroup": (0.1, 0.7), "torchft_tuned": (0.2, 4.6), "torchft_default": (5.1, 5.1), "torchrun": (8.3, 8.3)}
    recovery = {key: {"survivors": {"p50": a}, "full_size": {"p50": b}} for key, (a, b) in times.items()}
    drawn = []
    for _ in range(2):
        draw(FOUND, recovery, tmp_path / "goodput.svg")
        drawn.append((tmp_path / "goodput.svg").read_text())
    assert drawn[0] == drawn[1]
    texts = [found.strip() for found in re.findall(r"<text[^>]*>([^<]+)</text>", drawn[0])]
    assert {"&lt;regroup&gt;", "&lt;torchft_tuned&gt;", "&lt;torchrun&gt;"} <= set(texts)
    assert {"0.1 s", "0.7 s", "97.0 %", "99.0 %", "20.0 %"} <= set(texts)
    assert "torchft_default" not in drawn[0]
    assert 'style="fill: #ffffff' in drawn[0]  # a ground of its own, for dark pages


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--every", "0"], r"--every \(0 to 0\) must be from 1 to --seconds \(180\)", id="too often"),
        pytest.param(["--every", "200"], r"--every \(200 to 200\) must be from 1", id="never"),
        pytest.param(["--every", "1"], "must be at most 100", id="more kills than torchrun survives"),
    ],
)
def test_bad_options_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.goodput", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert re.search(sentence, capsys.readouterr().err)


def test_a_peer_that_cannot_run_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_common: object) -> list[Peer]:
        raise BenchError("its packages could not be installed.")

    monkeypatch.setattr(command, "torchft", missing)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own
    monkeypatch.setattr(sys, "argv", ["bench.goodput"])
    assert command.main() == 1
    assert capsys.readouterr().out == "torchft: its packages could not be installed.\n"


def test_figure_without_measurements_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "REPOSITORY", tmp_path)
    monkeypatch.setattr(command, "OUT", tmp_path)
    monkeypatch.setattr(command, "JSON", tmp_path / "goodput.json")
    monkeypatch.setattr(sys, "argv", ["bench.goodput", "--figure", "docs/goodput.svg"])
    assert command.main() == 1
    assert capsys.readouterr().out == "goodput.json does not exist: run `make bench-goodput` first.\n"
