"""A parameter server with real processes: whatever happens, its parameters are those of a replay of what it recorded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regroup.data import SamplePlan
from regroup.protocol import local
from regroup.protocol.document import PLANNED
from tests.trainer.agent_double import AgentDouble
from tests.trainer.replay import hash_of, replay
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "served_job.py"
STEPS, PACE_S = 60, 0.05


@pytest.fixture
def job(tmp_path: Path, zygote: Zygote) -> Iterator[AgentDouble]:
    double = AgentDouble(tmp_path, zygote, SCRIPT, {"TEST_STEPS": str(STEPS), "TEST_PACE": str(PACE_S)})
    yield double
    double.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As many as the processes have: a sum's bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def launch(job: AgentDouble, slot: int, terms: str, **environment: str) -> None:
    log = job.directory / f"versions-{len(job.everyone)}"
    log.touch()
    job.start(slot, TEST_SERVER=terms, TEST_LOG=str(log), TEST_HELD=str(job.directory / f"held-{slot}"), **environment)


def begin(job: AgentDouble, count: int, terms: str) -> None:
    for slot in range(count):
        launch(job, slot, terms)
    job.wait_attached(*range(count))
    job.announce(range(count))


def end(job: AgentDouble, slots: list[int]) -> list[dict[str, Any]]:
    job.go()
    job.wait_finished(*slots)
    job.stop()
    job.wait_exit(*slots)
    return [json.loads(job.workers[slot].log.strip().splitlines()[-1]) for slot in slots]


def recorded(job: AgentDouble) -> list[tuple[int, list[tuple[int, list[int]]], str]]:
    """Return generation, pushes, and the hash of the parameters (empty: not known), of each version: where two generations made one
    of a number, the later one's is what counts."""
    found: dict[int, tuple[int, Any, str]] = {}
    for path in sorted(job.directory.glob("versions-*")):
        for line in path.read_text().splitlines():
            generation, version, pushes, parameters = json.loads(line)
            known = found.get(version)
            if known is not None and generation == known[0]:
                assert known[1] == pushes, f"server and standby differ in version {version}"
            if known is None or generation > known[0] or not known[2]:
                found[version] = (generation, pushes, parameters)
    assert sorted(found) == list(range(1, len(found) + 1))
    return [found[version] for version in sorted(found)]


def check(job: AgentDouble, ends: list[dict[str, Any]], staleness: int | None, versions: int = STEPS) -> None:
    """The server's state is that of a replay; every share was counted at most once, and nothing was left out for good."""
    history = recorded(job)
    assert len(history) == versions
    pushes = [one for _, one, _ in history]
    plan = SamplePlan(0, 500, 48, 4)
    hashes: list[str] = []
    model, optimizer = replay(pushes, plan, hashes)
    wrong = [n for n, ((_, _, theirs), ours) in enumerate(zip(history, hashes), 1) if theirs not in ("", ours)]
    assert not wrong, (
        f"the first version that differs from the replay is {wrong[0]}: {history[max(0, wrong[0] - 3) : wrong[0]]}"
    )
    for one in ends:
        assert one["parameters"] == hash_of(model), f"rank {one['rank']}"
        assert one["version"] == versions
    server = next(one for one in ends if one["rank"] == 0)
    assert server["state"] == hash_of(model, optimizer)
    counted = Counter(share for of_version in pushes for _, shares in of_version for share in shares)
    assert set(counted.values()) == {1}
    missing = set(range(max(counted) + 1)) - set(counted)
    assert len(missing) <= 16, "what was owed is dealt first"
    assert server["samples"] == 4 * len(counted)
    digest = sum(plan.hash_of(*divmod(share, plan.num_virtual)) for share in counted) % 2**64
    assert server["digest"] == f"{digest:016x}"
    for number, of_version in enumerate(pushes):
        assert all(base <= number and (staleness is None or number - base <= staleness) for base, _ in of_version)


@pytest.mark.parametrize("terms", ["0:none:1", "1:1:1", "none:none:1"])
def test_kills_and_resizes_come_to_what_a_replay_of_the_versions_does(job: AgentDouble, terms: str) -> None:
    """A worker, the server and the standby die in turn; then the job grows, and shrinks."""
    staleness = None if terms.startswith("none") else int(terms.split(":")[0])
    begin(job, 4, terms)
    job.wait_step(1, 6, [0, 1, 2, 3])
    job.kill(3)
    job.announce([0, 1, 2], lost=[job.workers[3].pod_uid])
    job.first_commit(2, [0, 1, 2])
    job.kill(0)
    job.announce([1, 2], lost=[job.workers[0].pod_uid])
    job.first_commit(3, [1, 2])
    job.kill(2)
    job.announce([1], lost=[job.workers[2].pod_uid])
    job.first_commit(4, [1])
    for slot in (4, 5):
        launch(job, slot, terms)
    job.wait_attached(4, 5)
    job.announce([1, 4, 5], PLANNED)
    job.first_commit(5, [1, 4, 5])
    job.announce([4, 1], PLANNED)
    job.first_commit(6, [1, 4])
    ends = end(job, [4, 1])
    check(job, ends, staleness)
    assert {generation for generation, _, _ in recorded(job)} == {1, 2, 3, 4, 5, 6}
    left = [m for slot in (1, 4) for m in job.workers[slot].messages(local.Left) if m.cause]
    assert all("error" not in m.cause for m in left)
