"""How long a test may take: one that hangs fails with every thread's stack (pytest-timeout), it does not stop the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TIMEOUTS_S = {"unit": 120, "model": 600, "simulator": 600, "trainer": 900, "api": 600, "e2e": 900}
"""By directory, several times what the slowest test takes on two busy cores. A `timeout` mark of a test's own comes first."""
BUILDING = {"api", "e2e"}
"""Here a session's fixtures may build Kubernetes and images; only the test itself is timed."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test the timeout of its directory."""
    if not config.pluginmanager.has_plugin("timeout"):
        return
    for item in items:
        directory = item.path.relative_to(TESTS).parts[0]
        if item.get_closest_marker("timeout") is None and directory in TIMEOUTS_S:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S[directory], func_only=directory in BUILDING))
