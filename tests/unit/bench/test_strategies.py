"""What `bench.strategies` makes of its blocks, and what it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import gpt
from bench.strategies import BEGIN, CASES, END, Case, commands, summary, with_table
from bench.strategies_figure import draw
from bench.strategies_model import MICROBATCH

DDP = next(case for case in CASES if case.key == "data_parallel")
RING = next(case for case in CASES if case.key == "ring")
TENSOR = next(case for case in CASES if case.key == "tensor")
PIPELINE = next(case for case in CASES if case.key == "pipeline")


def block(ms: float, sent: float = 2e6, peak_mb: float = 500.0) -> dict[str, Any]:
    return {"ms": ms, "cpu_ms": ms / 2, "sent": sent, "peak_mb": peak_mb}


def test_each_block_is_compared_with_that_of_torch_alone_in_the_same_turn() -> None:
    blocks = {
        "ours": [block(220.0), block(400.0), block(100.0, peak_mb=610.4)],
        "plain": [block(200.0), block(400.0), block(50.0)],
    }
    found = summary(DDP, 2, blocks, apart=True)
    assert (found["ratio"], found["ratio_middle_half"]) == (1.1, [1.0, 2.0])
    tokens = 2 * MICROBATCH * gpt.LENGTH
    assert (found["tokens_per_s"], found["plain_tokens_per_s"]) == (round(tokens / 0.22, 1), tokens / 0.2)
    assert (found["sent_mb"], found["cpu_ms"], found["peak_mb"], found["plain_peak_mb"]) == (2.0, 110.0, 610, 500)


def test_what_torch_does_not_have_and_what_cannot_be_counted_is_null() -> None:
    found = summary(RING, 2, {"ours": [block(200.0), block(200.0)]}, apart=False)
    names = (
        "plain_tokens_per_s",
        "ratio",
        "ratio_middle_half",
        "sent_mb",
        "plain_sent_mb",
        "plain_cpu_ms",
        "plain_peak_mb",
    )
    assert [found[name] for name in names] == [None] * len(names)


def test_strategy_of_several_optimizer_steps_counts_the_tokens_of_all() -> None:
    local = next(case for case in CASES if case.optimizer_steps == 4)
    one = summary(local, 2, {"ours": [block(400.0), block(400.0)]}, apart=False)
    assert one["tokens_per_s"] == 4 * 2 * MICROBATCH * gpt.LENGTH / 0.4


@pytest.mark.parametrize(
    ("case", "ranks", "workers", "processes", "sides"),
    [
        (DDP, 2, "2", "1", ["ours", "plain"]),
        (TENSOR, 2, "1", "2", ["ours", "plain"]),
        (TENSOR, 4, "2", "2", ["ours"]),
        (PIPELINE, 2, "1", "2", ["ours", "plain"]),
        (PIPELINE, 4, "2", "2", ["ours"]),
        (RING, 4, "4", "1", ["ours"]),
    ],
)
def test_as_many_processes_as_ranks_are_started(
    case: Case, ranks: int, workers: str, processes: str, sides: list[str]
) -> None:
    found = commands(case, ranks, 3)
    ours = found["ours"]
    assert list(found) == sides
    assert (ours[ours.index("--workers") + 1], ours[ours.index("--processes-per-worker") + 1]) == (workers, processes)


def test_figure_names_each_strategy_and_is_the_same_each_time(tmp_path: Path) -> None:
    found = [
        summary(case, 2, {"ours": [block(200.0)] * 2}, apart=False) | {"recovery_s": 0.2, "resize_s": None}
        for case in (DDP, RING)
    ]
    for name in ("one.svg", "two.svg"):
        draw(found, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert text.replace("one.svg", "two.svg") == (tmp_path / "two.svg").read_text()
    assert "python -m bench.strategies" in text
    assert "torch has no counterpart" in text


def test_page_has_the_figures_between_its_marks_and_nothing_else_changes() -> None:
    setup = {"date": "2026-11-23T12:00:00Z", "cpus": 2, "torch": "2.13.0", "load_before": 0.4}
    more = {
        "recovery_s": 0.213,
        "resize_s": None,
        "recovery_trials_s": [0.2],
        "setup": setup,
        "recovery_of_four_s": 0.5,
    }
    found = [summary(DDP, 2, {"ours": [block(200.0)] * 2, "plain": [block(160.0)] * 2}, apart=True) | more]
    page = with_table(f"Before.\n{BEGIN}\nold figures\n{END}\nAfter.\n", found)
    assert page.startswith(f"Before.\n{BEGIN}\n| strategy ")
    assert page.endswith(f"{END}\nAfter.\n")
    assert "old figures" not in page
    assert "| data parallel | 2 | 7,680 | 9,600 | 1.250 | 1.250 to 1.250 | 2.0 MB | 0.21 s |  |" in page
    assert "load of the machine 0.4" in page
    assert "with four processes, as many as two copies of a split model have: recovery 0.50 s." in page
    assert with_table(page, found) == page
