"""Which tests run, and how long each may take: one that hangs fails with every thread's stack (pytest-timeout), it does not stop
the suite.

Trainers that tests start have one thread, as under `make`: the bits of a sum depend on their number, and some tests compare bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("tests.e2e.samples", "tests.e2e.shared")

TESTS = Path(__file__).parent
TIMEOUTS_S = {"unit": 120, "model": 600, "simulator": 600, "trainer": 900, "api": 600, "e2e": 900, "page": 300}
"""By directory, several times what the slowest test takes on two busy cores. A `timeout` mark of a test's own comes first."""
BUILDING = {"api", "e2e"}
"""Here a session's fixtures may build Kubernetes and images, which is not the test's time: they have their own."""
FIXTURES_S = 2400
"""What precedes one of these tests, and what follows it: with empty caches 6 minutes of Go and some of images, then a cluster."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, and those that only root can run; give every test the timeout of its directory."""
    if not os.environ.get("REGROUP_SLOW"):
        slow = pytest.mark.skip(reason="slow: runs in CI and in `make test-all` (REGROUP_SLOW=1)")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(slow)
    if os.geteuid() != 0:
        root = pytest.mark.skip(reason="root: runs in `make test-cluster`")
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(root)
    if not config.pluginmanager.has_plugin("timeout"):
        return
    for item in items:
        if item.get_closest_marker("timeout") is None and _directory(item) in TIMEOUTS_S:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S[_directory(item)], func_only=_directory(item) in BUILDING))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """End a fixture that hangs, for every test that wants it."""
    with _fixtures_timed(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """The same for what comes after a fixture's `yield`."""
    with _fixtures_timed(item):
        return (yield)


@contextmanager
def _fixtures_timed(item: pytest.Item) -> Iterator[None]:
    """Run pytest-timeout's timer, which runs for the test itself only (`func_only`), around its fixtures, too."""
    mark = item.get_closest_marker("timeout")
    if mark is None or not mark.kwargs.get("func_only") or not item.config.pluginmanager.has_plugin("timeout"):
        yield  # the test's own timer runs already
        return
    import pytest_timeout

    hooks, settings = item.config.hook, pytest_timeout.get_env_settings(item.config)
    hooks.pytest_timeout_set_timer(item=item, settings=settings._replace(timeout=FIXTURES_S))
    try:
        yield
    finally:
        hooks.pytest_timeout_cancel_timer(item=item)


def _directory(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]
