"""Timed steps: the line that is shown, and the record that the tour sums up."""

from pathlib import Path

import pytest

from cluster import progress
from cluster.progress import Step


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROUP_CLUSTER_DIR", str(tmp_path))


def test_line_shows_bar_elapsed_and_expected_time() -> None:
    step = Step("Kubernetes binaries", 280)
    step.fraction, step.note = 0.5, "package 1500 of 3000"
    line = step.line(step.started_s + 70)
    assert "[############............] 70 of about 280 s  package 1500 of 3000" in line


def test_bar_without_a_count_follows_the_clock_and_never_claims_to_be_done() -> None:
    step = Step("Go modules", 10)
    assert step.line(step.started_s + 5).count("#") == 12
    assert step.line(step.started_s + 100).count("#") == 23


def test_successful_steps_are_recorded_with_their_kind() -> None:
    with progress.step("one", "download"):
        pass
    with pytest.raises(ValueError), progress.step("two", "build"):
        raise ValueError
    recorded = progress.recorded_since(60)
    assert {name: step["kind"] for name, step in recorded.items()} == {"one": "download"}


def test_steps_of_an_earlier_run_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    progress.record("old", "build", 100)
    monkeypatch.setattr("time.time", lambda: 9e9)
    assert progress.recorded_since(60) == {}
