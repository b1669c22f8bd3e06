"""How a job begins: the first generation, tiers, slow starts, what cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.plan import make_job
from tests.unit.controller.world import World


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("known_session", [False, True])
def test_job_starts_with_one_generation_of_all_workers(tmp_path: Path, processes: int, known_session: bool) -> None:
    world = World(tmp_path, make_job().with_replicas(3), processes=processes, known_session=known_session)
    world.advance(0.1)
    assert (world.generation, world.members, world.phase) == (1, "0-2", "Running")
    assert world.training() == "0-0,1-0,2-0"
    world.step(5)
    world.advance(15, step_every_s=0.5)
    assert (world.generation, world.status["tier"]) == (1, "Session")
    assert world.status["progress"]["step"] > 5
    assert world.status["summary"]["ready"] == "3/3"
