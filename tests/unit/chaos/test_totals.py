"""Results add up over runs, survive an interruption, and come out as the table and the file that are promised."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from chaos import totals
from chaos.totals import Journal, Result
from chaos.verdict import Injected, Verdict


def injected(kind: str, recovered_s: float | None, moment: str = "settled", planned: str = "settled") -> Injected:
    return Injected(kind, moment, "x", 1.0, 20.0, 5, 1, recovered_s, stuck=recovered_s is None, planned=planned)


def result(seed: int, *faults: Injected, verdict: Verdict | None = None, version: str = "v1") -> Result:
    verdict = verdict or Verdict("Succeeded", generations=4, redone=2)
    return Result(seed, 25, "local", version, "a job", faults, verdict, 30.0)


def test_file_has_the_promised_keys_and_sums() -> None:
    found = totals.summary(
        [
            result(7, injected("kill-trainer", 0.1), injected("kill-trainer", 0.3)),
            result(8, injected("scale", 0.5)),
        ]
    )
    assert {"seed", "faults", "stuck", "equal", "rolled_back", "by_kind"} <= set(found)
    assert (found["faults"], found["stuck"], found["equal"], found["rolled_back"]) == (3, 0, True, 0)
    assert (found["generations"], found["redone"]) == (8, 4)
    assert found["by_kind"] == {
        "kill-trainer": {"n": 2, "p50_s": 0.2, "p99_s": 0.298, "max_s": 0.3},
        "scale": {"n": 1, "p50_s": 0.5, "p99_s": 0.5, "max_s": 0.5},
    }


@pytest.mark.parametrize(
    ("verdict", "key", "value"),
    [
        pytest.param(Verdict("Stuck", stuck=["no commit"]), "stuck", 1, id="stuck"),
        pytest.param(Verdict("Stuck", stuck=["no commit"]), "equal", False, id="a job without an end is not equal"),
        pytest.param(Verdict("Succeeded", unequal=["parameters"]), "equal", False, id="other parameters"),
        pytest.param(Verdict("Succeeded", rolled_back=["g2"]), "rolled_back", 1, id="rolled back"),
        pytest.param(Verdict("Failed"), "failed", 1, id="failed"),
    ],
)
def test_broken_promise_is_counted_and_its_seed_named(verdict: Verdict, key: str, value: object) -> None:
    assert not verdict.passed
    found = totals.summary([result(1, injected("scale", 0.1)), result(2, injected("scale", None), verdict=verdict)])
    assert found[key] == value
    assert found["failing_seeds"] == [2]


def test_kind_counts_all_of_its_faults_also_those_that_no_commit_followed() -> None:
    found = totals.by_kind([injected("scale", 0.5), injected("scale", None), injected("stop-agent", None)])
    assert found == {
        "scale": {"n": 2, "p50_s": 0.5, "p99_s": 0.5, "max_s": 0.5},
        "stop-agent": {"n": 1, "p50_s": None, "p99_s": None, "max_s": None},
    }


def test_moments_count_what_was_met_and_what_was_planned() -> None:
    found = totals.by_moment(
        [
            injected("scale", 0.5),
            injected("kill-two", 0.5, "forming", "forming"),
            injected("kill-two", 0.5, "recovering", "forming"),
            injected("kill-two", 0.5, "forming", "settled"),
            injected("kill-two", 0.5, "adopting", planned=""),
        ]
    )
    assert found == {
        "settled": {"n": 1, "planned": 2, "met": 1},
        "recovering": {"n": 1, "planned": 0, "met": 0},
        "forming": {"n": 2, "planned": 2, "met": 1},
    }


def test_line_from_before_planned_moments_were_recorded_is_read() -> None:
    raw = json.loads(result(1, injected("scale", 0.1, "forming")).line())
    del raw["faults"][0]["planned"]
    old = totals.parse(json.dumps(raw))
    assert [(f.moment, f.planned, f.when) for f in old.faults] == [("forming", "", "forming")]
    found = totals.summary([old, result(2, injected("scale", 0.3))])
    assert (found["by_kind"]["scale"]["n"], found["by_moment"]["settled"]["n"]) == (2, 1)


def test_journal_keeps_whole_lines_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out" / "journal.jsonl")
    assert journal.read() == []
    first, second = result(1, injected("scale", 0.1)), result(2, injected("kill-trainer", None))
    journal.add(first)
    journal.add(second)
    assert journal.read() == [first, second]
    with journal.path.open("a") as file:
        file.write(first.line()[:50])
    assert journal.read() == [first, second]
    journal.add(first)
    assert journal.read() == [first, second, first]


def test_resuming_counts_what_passed_with_these_sources_only() -> None:
    passed, failed = result(1), result(2, verdict=Verdict("Stuck", stuck=["no commit"]))
    other = result(3, version="v0")
    assert totals.done_already([passed, failed, other], version="v1") == {(1, 25): passed}


def test_tables_have_a_row_for_each_kind_and_each_moment() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    found = totals.summary([result(1, injected("kill-trainer", 0.25), injected("scale", None, "settled", "forming"))])
    times, moments = totals.grids(found)
    console.print(times.table())
    console.print(moments.table())
    text = console.export_text()
    assert "kill-trainer  1  0.25 s  0.25 s  0.25 s" in text
    assert "scale         1       -       -       -" in text
    assert "settled       2            1             1" in text
    assert "forming       0            1             0" in text
    assert times.markdown().splitlines() == [
        "| fault | n | p50 | p99 | max |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| kill-trainer | 1 | 0.25 s | 0.25 s | 0.25 s |",
        "| scale | 1 | - | - | - |",
    ]
