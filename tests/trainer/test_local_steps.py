"""Rounds of local steps with real processes: whatever happens between and in them, the result is that of a replay by hand."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from regroup.data import SamplePlan
from regroup.protocol import local
from regroup.protocol.document import PLANNED
from regroup.protocol.state import StatePair
from tests.long import only_long
from tests.trainer import rounds_loss
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import PACE_S, start
from tests.trainer.rounds import Holder, Way, make_data, make_model, make_optimizer, replay_round
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "rounds_job.py"
ROUNDS = 60


@pytest.fixture
def job(tmp_path: Path, zygote: Zygote) -> Iterator[AgentDouble]:
    double = AgentDouble(tmp_path, zygote, SCRIPT, {"TEST_STEPS": str(ROUNDS), "TEST_PACE": str(PACE_S)})
    yield double
    double.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As many as the processes have: a sum's bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def replay(job: AgentDouble, way: Way, rounds: list[tuple[int, int, float]]) -> dict[str, Holder]:
    """Return what each pod must hold. `rounds`: (number, generation, loss) as one committed them that was always there."""
    plan, data = SamplePlan(0, 500, 48, 4), make_data()
    holders: dict[str, Holder] = {}
    entered = 0
    for index, generation, loss in rounds:
        members = [member.pod_uid for member in job.documents[generation - 1].members]
        if generation != entered:
            entered = generation
            for uid in members:
                holder = holders.setdefault(uid, Holder.new(way, make_model(), make_optimizer))
                (worker,) = (one for one in job.everyone if one.pod_uid == uid)
                (adopted,) = worker.messages(local.AdoptedLocally, generation)
                if adopted.source not in ("self", "nothing"):
                    holder.take(holders[adopted.source])
        ranks = [holders[uid] for uid in members]
        replay_round(ranks, way, plan, data, index)
        assert ranks[0].losses[index] == pytest.approx(loss, rel=1e-6)
    return holders


@pytest.mark.parametrize("way", [pytest.param(Way(2, 0.7, 0.9), id="DiLoCo"), pytest.param(Way(3), id="local SGD")])
def test_kill_in_mid_round_and_resizes_come_to_what_a_replay_of_them_does(job: AgentDouble, way: Way) -> None:
    words = {"TEST_WAY": f"{way.inner_steps}:{way.outer_rate}:{way.outer_momentum}"}
    held = [job.directory / f"held-{slot}" for slot in range(3)]
    for slot in range(3):
        # A rank has four microbatches: the first inner step, of two, is made.
        job.start(slot, TEST_HOLD="1:5:2", TEST_HELD=str(held[slot]), **words)
    job.wait_attached(0, 1, 2)
    job.announce(range(3))
    job.wait(lambda: all(path.exists() for path in held), "all are in the middle of round 5")
    job.kill(1)
    job.announce([0, 2], lost=[job.workers[1].pod_uid])
    job.wait_step(2, 10, [0, 2])
    job.start(3, **words)
    job.wait_attached(3)
    job.announce([2, 0, 3], PLANNED)
    job.first_commit(3, [0, 2, 3])
    job.announce([3, 0], PLANNED)
    job.first_commit(4, [0, 3])
    job.stop("Released", [2])
    job.wait_exit(2)
    job.go()
    job.wait_finished(0, 3)
    job.finish()
    job.wait_exit(0, 3)
    ends = [json.loads(job.workers[slot].log.strip().splitlines()[-1]) for slot in (0, 3)]
    rounds = ends[0]["rounds"]
    assert [index for index, _, _ in rounds] == list(range(ROUNDS)), "each round is committed once"
    assert {generation for _, generation, _ in rounds} == {1, 2, 3, 4}
    assert [generation for index, generation, _ in rounds if index in (4, 5)] == [1, 2]
    commits = [m for slot in (0, 3) for m in job.workers[slot].messages(local.Committed)]
    assert {m.steps_redone for m in commits if m.generation == 2} <= {0, 1}
    holders = replay(job, way, rounds)
    for slot, end in zip((0, 3), ends):
        bits = b"".join(one.numpy().tobytes() for one in holders[job.workers[slot].pod_uid].bits())
        assert end["hash"] == hashlib.sha256(bits).hexdigest(), f"slot {slot}"
    assert ends[0]["hash"] != ends[1]["hash"], "the inner optimizer's state is each rank's own"


def test_what_joins_has_the_sources_optimizer(job: AgentDouble) -> None:
    """A job of one grows, and the first one leaves: what it held goes on."""
    start(job, 1, TEST_WAY="4:0.7:0.9")
    job.wait_step(1, 5, [0])
    job.start(1, TEST_WAY="4:0.7:0.9")
    job.wait_attached(1)
    job.announce([0, 1], PLANNED)
    job.first_commit(2, [0, 1])
    (adopted,) = job.workers[1].messages(local.AdoptedLocally, 2)
    assert adopted.source == job.workers[0].pod_uid
    job.go()
    job.wait_finished(0, 1)
    job.finish()
    job.wait_exit(0, 1)
    ends = [json.loads(job.workers[slot].log.strip().splitlines()[-1]) for slot in (0, 1)]
    holders = replay(job, Way(4, 0.7, 0.9), ends[0]["rounds"])
    for slot, end in enumerate(ends):
        bits = b"".join(one.numpy().tobytes() for one in holders[job.workers[slot].pod_uid].bits())
        assert end["hash"] == hashlib.sha256(bits).hexdigest(), f"slot {slot}"


def test_round_that_one_rank_did_not_apply_is_not_done_again(job: AgentDouble, tmp_path: Path) -> None:
    """The others have it. The one that is behind copies one of them, with its inner optimizer's state, and its own is gone."""
    go, way = tmp_path / "fault", Way(2, 0.7, 0.9)
    words = {"TEST_WAY": "2:0.7:0.9"}
    job.start(0, **words)
    job.start(1, TEST_FAULT="breaks-before-apply:8", TEST_FAULT_GO=str(go), **words)
    job.start(2, **words)
    job.wait_attached(0, 1, 2)
    job.announce(range(3))
    job.wait_step(1, 9, [0, 2])
    go.touch()
    assert [job.wait_left(slot)[-1].state for slot in range(3)] == [StatePair(1, 9), StatePair(1, 8), StatePair(1, 9)]
    job.announce(range(3))
    job.first_commit(2, range(3))
    sources = [job.workers[slot].messages(local.AdoptedLocally, 2)[0].source for slot in range(3)]
    assert sources == ["self", job.workers[0].pod_uid, "self"]
    job.go()
    job.wait_finished(0, 1, 2)
    job.finish()
    job.wait_exit(0, 1, 2)
    ends = [json.loads(job.workers[slot].log.strip().splitlines()[-1]) for slot in range(3)]
    assert [generation for index, generation, _ in ends[0]["rounds"] if index in (8, 9)] == [1, 2]
    holders = replay(job, way, ends[0]["rounds"])
    for slot, end in enumerate(ends):
        bits = b"".join(one.numpy().tobytes() for one in holders[job.workers[slot].pod_uid].bits())
        assert end["hash"] == hashlib.sha256(bits).hexdigest(), f"slot {slot}"


@pytest.mark.parametrize("number", [1, 4], ids=["local SGD", "DiLoCo"])
@only_long("five runs of each algorithm")
def test_loss_is_within_the_spread_of_five_runs_with_the_whole_gradient(number: int) -> None:
    name, optimizer, steps, way = rounds_loss.ROWS[number]
    spread = [rounds_loss.losses(optimizer, steps, None, seed)[1] for seed in range(rounds_loss.SEEDS)]
    held_out = statistics.mean(rounds_loss.losses(optimizer, steps, way, seed)[1] for seed in range(3))
    assert min(spread) < held_out < max(spread), name
