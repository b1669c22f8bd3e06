"""What the two samples claim has held: they run beside the tests before these (see samples.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.samples import SAMPLE, Samples

MAX_LINES = 60


@pytest.fixture(scope="module", autouse=True)
def ended(samples: Samples) -> Iterator[None]:
    """Nothing of the samples runs beside the tests that follow, whichever of these tests ran and passed."""
    yield
    samples.end()


def test_exact_run_with_faults_equals_a_fixed_size_run_without(samples: Samples) -> None:
    print(samples.session.result())


@pytest.mark.slow
def test_script_starts_again_in_the_same_pods_from_its_own_checkpoint(samples: Samples) -> None:
    print(samples.script.result())


def test_sample_script_is_short() -> None:
    assert len(SAMPLE.read_text().splitlines()) < MAX_LINES
