"""What the two samples claim has held: they run beside the tests before these (see samples.py)."""

from __future__ import annotations

from concurrent.futures import Future

from tests.e2e.samples import SAMPLE

MAX_LINES = 60


def test_exact_run_with_faults_equals_a_fixed_size_run_without(samples: dict[str, Future[str]]) -> None:
    print(samples["session"].result())


def test_script_starts_again_in_the_same_pods_from_its_own_checkpoint(samples: dict[str, Future[str]]) -> None:
    print(samples["script"].result())


def test_sample_script_is_short() -> None:
    assert len(SAMPLE.read_text().splitlines()) < MAX_LINES
