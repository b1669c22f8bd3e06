"""A fixture that hangs ends by itself, as a test does (tests/conftest.py).

In a pytest of its own, which takes most of two seconds: a process has one such timer, and this test needs it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
ENDS_S = 0.5
"""On a busy machine a fixture's end may begin so late; a timer that is over by then would not be its own."""
HANGING = """
import threading

import pytest


@pytest.fixture(scope="session")
def cluster():
    threading.Event().wait()


@pytest.fixture(scope="session")
def left():
    yield
    threading.Event().wait()


def test_first(cluster): ...
def test_second(cluster): ...
def test_last(left): ...
"""


def test_session_fixtures_that_never_come_to_an_end_fail_their_tests(tmp_path: Path) -> None:
    (tmp_path / "tests" / "api").mkdir(parents=True)
    text = CONFTEST.read_text()
    assert "FIXTURES_S = 2400" in text
    (tmp_path / "tests" / "conftest.py").write_text(text.replace("FIXTURES_S = 2400", f"FIXTURES_S = {ENDS_S}"))
    (tmp_path / "tests" / "api" / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null"]
    done = subprocess.run([*command, "tests"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed, 3 errors" in done.stdout, done.stdout
    assert done.stdout.count(f"Timeout (>{ENDS_S}s) from pytest-timeout") >= 2, done.stdout
