"""The jobs and the reports that `regroup convert` makes of manifests as they are in use."""

from __future__ import annotations

import pytest

from tests.unit.cli.convert.golden import EXAMPLES, NAMES, made


@pytest.mark.parametrize("name", NAMES)
def test_example_is_converted_as_it_was_reviewed(name: str) -> None:
    job, report = made(name)
    assert job == (EXAMPLES / f"{name}.job.yaml").read_text()
    assert report == (EXAMPLES / f"{name}.report.txt").read_text()
