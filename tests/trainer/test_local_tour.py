"""`make run`, with real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_tour_without_a_cluster_kills_a_worker_and_ends_well() -> None:
    """Slow: who calls `make test` has seen `make run`."""
    done = subprocess.run([sys.executable, "-m", "demo.local"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with a copy of their state" in done.stdout
    assert done.stdout.index(">>> kill -9") < done.stdout.index("held-out accuracy")
