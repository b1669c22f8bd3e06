"""What a job leaves for TensorBoard, as TensorBoard reads it: curves that go on where another process becomes rank 0."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent_double import AgentDouble
from tests.trainer.zygote import Zygote

pytest.importorskip("tensorboard", reason="it is an extra; make venv installs it")

SCRIPT = Path(__file__).parent / "train_job.py"
SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "train" / "digits.yaml"
STEPS = 300


@pytest.fixture
def job(tmp_path: Path, zygote: Zygote) -> Iterator[AgentDouble]:
    changes = [f"steps={STEPS}", "print_every=1", f"tensorboard={tmp_path / 'runs'}", "histograms_every=100"]
    arguments = [str(SAMPLE), *(word for change in changes for word in ("--set", change))]
    # The tests' process may find tensorboard on a path that the trainer's does not have.
    path = os.environ.get("PYTHONPATH", "")
    one = AgentDouble(tmp_path, zygote, SCRIPT, {"TEST_ARGUMENTS": "\n".join(arguments), "PYTHONPATH": path})
    yield one
    one.close()


def _read(directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(directory), {"scalars": 0, "histograms": 0})
        found.Reload()
    return found


@pytest.mark.slow
def test_curves_go_on_when_rank_0_is_killed(job: AgentDouble, tmp_path: Path) -> None:
    job.run_and_replace_rank_0(5)
    files = sorted(path.name.rpartition(".")[2] for path in (tmp_path / "runs").glob("events.*"))
    assert files == ["g1", "g2"]
    found = _read(tmp_path / "runs")
    losses = found.Scalars("loss")
    steps = [point.step for point in losses]
    assert steps == sorted(set(steps)), "a step is there twice"
    missing = set(range(1, STEPS + 1)) - set(steps)
    assert len(missing) <= 1, "only that of the step in which rank 0 died"
    assert steps[-1] == STEPS
    assert losses[-1].value < losses[0].value / 2
    assert {"learning rate", "speed/samples per second", "step seconds/backward"} <= set(found.Tags()["scalars"])
    assert [point.step for point in found.Histograms("parameters/head/1/weight")] == [100, 200, 300]
