"""What tests with real processes share. Expensive things are made once for the run: the agent's zipapp, a zygote with torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from _regroup_agent.build import build
from harness.local_run import LocalRun
from regroup import torch_versions
from tests.trainer.agent_double import AgentDouble
from tests.trainer.agent_edge import OperatorEdge, Worker, operator_edge
from tests.trainer.elastic_kit import PACE_S, SCRIPT, STEPS
from tests.trainer.zygote import Zygote

LONGEST = "test_tutorials.py"
"""Its longest test takes twice as long as any other. The last process of pytest would run it alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests. Leave out what needs FSDP2 where torch is too old for it.

    Such tests name the dimension `shard` in their text or in their parameters, or a sample that has it.
    """
    items.sort(key=lambda item: item.path.name != LONGEST)
    if torch_versions.has(torch_versions.FSDP, torch.__version__):
        return
    skip = pytest.mark.skip(reason="a session refuses FSDP2 with this torch (regroup/torch_versions.py)")
    for item in items:
        in_text = (
            isinstance(item, pytest.Function) and "shard=" in inspect.getsource(item.function).partition("def ")[2]
        )
        named = repr(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
        is_sample = "fsdp" in item.nodeid or "zero1" in item.nodeid
        if Path(__file__).parent in item.path.parents and (in_text or is_sample or "shard=" in named):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent as a pod has it."""
    target = tmp_path_factory.mktemp("agent") / "agent.pyz"
    build(target)
    return target


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorEdge]:
    """The operator's edge for one worker; the test decides."""
    with operator_edge(tmp_path) as edge:
        yield edge


@pytest.fixture
def worker(tmp_path: Path, operator: OperatorEdge, zipapp: Path) -> Iterator[Worker]:
    """A worker of one process, not started."""
    one = Worker(tmp_path, operator, zipapp, 1)
    yield one
    one.close()


@pytest.fixture
def pair(tmp_path: Path, operator: OperatorEdge, zipapp: Path) -> Iterator[Worker]:
    """A worker of two processes, not started."""
    one = Worker(tmp_path, operator, zipapp, 2)
    yield one
    one.close()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """What forks the trainers of the elastic tests."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def job(tmp_path: Path, zygote: Zygote) -> Iterator[AgentDouble]:
    """Workers of the small job, which the test starts and announces generations to."""
    double = AgentDouble(tmp_path, zygote, SCRIPT, {"TEST_STEPS": str(STEPS), "TEST_PACE": str(PACE_S)})
    yield double
    double.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    """A function that starts `regroup run` with these arguments."""
    runs: list[LocalRun] = []

    def begin(*arguments: str, directory: Path = tmp_path) -> LocalRun:
        runs.append(LocalRun(directory, *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()
