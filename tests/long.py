"""What `make test-all` does and `make test` leaves out, for want of time (REGROUP_LONG=1)."""

from __future__ import annotations

import os

import pytest

LONG = bool(os.environ.get("REGROUP_LONG"))


def only_long(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that runs in `make test-all` only. `why`: what of it the other tests have."""
    return pytest.mark.skipif(not LONG, reason=f"REGROUP_LONG: {why}")


def trials(short: int, *, long: int) -> int:
    """Return how often a test breaks something: `short` in `make test`, `long` in `make test-all`."""
    return long if LONG else short
