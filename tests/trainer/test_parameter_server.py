"""A parameter server with real processes: whatever happens, its parameters are those of a replay of what it recorded."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.local_run import LocalRun
from regroup.data import SamplePlan
from regroup.protocol import local
from regroup.protocol.document import PLANNED
from tests.long import LONG, only_long
from tests.trainer import served_loss
from tests.trainer.agent_double import AgentDouble, Worker
from tests.trainer.replay import hash_of, replay
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "served_job.py"
SAMPLE = Path(__file__).parents[2] / "manifests/samples/train/parameter-server.yaml"
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
    job.finish()
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


@pytest.mark.parametrize(
    "terms",
    [
        "0:none:1",
        pytest.param("1:1:1", marks=only_long("the others nearly contain it")),
        "none:none:1",
    ],
)
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


def test_only_server_and_standby_bring_a_state(job: AgentDouble) -> None:
    """Both are lost at once: the others hold nothing that could be followed, and say so. A checkpoint is read."""
    checkpoints = str(job.directory / "checkpoints")
    for slot in range(4):
        launch(job, slot, "none:none:1", REGROUP_CHECKPOINT_DIR=checkpoints, REGROUP_CHECKPOINT_EVERY_SECONDS="0.2")
    job.wait_attached(*range(4))
    job.announce(range(4))
    saved = job.wait(
        lambda: [m.checkpoint for m in job.workers[0].messages(local.Committed, 1) if m.checkpoint], "a checkpoint"
    )[0]
    job.wait_step(1, saved["step"] + 5, [0])
    for slot in (0, 1):
        job.kill(slot)
    assert [job.wait_left(slot)[-1].state for slot in (2, 3)] == [None, None]
    job.announce([2, 3], lost=[job.workers[0].pod_uid])
    # Where one has refused and closed its connections, the other may say that it could not connect.
    job.wait(
        lambda: [
            m
            for slot in (2, 3)
            for m in job.workers[slot].messages(local.Left)
            if m.cause == "witness" and job.workers[1].pod_uid in m.message
        ],
        "they wait for the standby, which may be there",
    )
    for worker in (job.workers[2], job.workers[3]):
        job.wait(partial(left_second, worker), f"{worker.pod_uid} leaves")
    job.announce([2, 3], lost=[job.workers[0].pod_uid, job.workers[1].pod_uid], older=[1, 2])
    job.first_commit(3, [2, 3])
    adopted = job.workers[2].messages(local.AdoptedLocally, 3)[0]
    assert (adopted.source, adopted.rolled_back) == ("disk", True)
    assert adopted.state.step >= saved["step"]
    check(job, end(job, [2, 3]), None)


def left_second(worker: Worker) -> bool:
    """Return whether a worker has left generation 2."""
    return any(message.left_up_to == 2 for message in worker.messages(local.Left))


def test_server_that_hears_of_no_newer_generation_commits_nothing_that_is_lost(job: AgentDouble) -> None:
    begin(job, 3, "none:none:1")
    job.wait_step(1, 8, [0, 1, 2])
    job.announce([1, 2], to=[1, 2])
    job.first_commit(2, [1, 2])
    assert job.wait_left(0, cause=True)[-1].state.generation == 1
    seen = max(m.step for m in job.workers[0].messages(local.Committed))
    job.announce([1, 0, 2], older=[1, 2])
    job.first_commit(3, [0, 1, 2])
    start = {m.start_step for m in job.workers[1].messages(local.AdoptedLocally, 2)}
    assert min(start) >= seen, "what the server has reported, its standby had"
    check(job, end(job, [1, 0, 2]), None)


def test_slow_workers_are_backup_workers(job: AgentDouble) -> None:
    """Of four gradients the first three make a version, and what the fourth was dealt is dealt again."""
    for slot in range(3):
        launch(job, slot, "0:3:1")
    launch(job, 3, "0:3:1", TEST_SLOW="0.6")
    job.wait_attached(*range(4))
    job.announce(range(4))
    ends = end(job, [0, 1, 2, 3])
    check(job, ends, 0)
    assert all(len(pushes) == 3 for _, pushes, _ in recorded(job))
    assert ends[3]["blocks"] < STEPS / 3, "it holds up nobody"


def test_slow_worker_under_a_bound_delivers_what_is_not_too_old(job: AgentDouble) -> None:
    for slot in range(3):
        launch(job, slot, "2:none:1", **({"TEST_SLOW": "0.2"} if slot == 2 else {}))
    job.wait_attached(*range(3))
    job.announce(range(3))
    check(job, end(job, [0, 1, 2]), 2)


def test_server_that_only_serves(job: AgentDouble) -> None:
    for slot in range(4):
        launch(job, slot, "none:none:0", **({"TEST_SLOW": "1.0"} if slot == 2 else {}))
    job.wait_attached(*range(4))
    job.announce(range(4))
    job.wait_step(1, 10, [0, 1, 3])
    assert not job.workers[2].messages(local.Committed), "it holds up nobody"
    job.kill(0)
    job.announce([1, 2, 3], lost=[job.workers[0].pod_uid])
    job.first_commit(2, [1, 2])
    check(job, end(job, [1, 2, 3]), None)


def test_job_ends_where_one_script_leaves_its_loop(job: AgentDouble) -> None:
    for slot in range(3):
        launch(job, slot, "none:none:1", **({"TEST_BREAK": "20"} if slot == 2 else {}))
    job.wait_attached(*range(3))
    job.announce(range(3))
    ends = end(job, [0, 1, 2])
    (version,) = {one["version"] for one in ends}
    assert 20 <= version < STEPS
    check(job, ends, None, version)


def test_worker_that_does_not_come_to_a_cut_is_left_behind(job: AgentDouble) -> None:
    """It hears of the newer generation as the others do, and stays in its microbatch: four usual times later they go without it."""
    for slot in range(3):
        launch(job, slot, "none:none:1", **({"TEST_SLOW": "300"} if slot == 2 else {}))
    job.wait_attached(0, 1, 2)
    job.announce(range(3))
    job.wait_step(1, 10, [0, 1])
    job.announce([0, 1], PLANNED)
    job.wait_step(2, 20, [0, 1])
    assert not [m for slot in (0, 1) for m in job.workers[slot].messages(local.Left) if m.cause], "it is no fault"
    job.kill(2)
    check(job, end(job, [0, 1]), None)


@only_long("it takes a minute")
@pytest.mark.parametrize("number", range(1, len(served_loss.ROWS)))
def test_loss_is_within_the_spread_of_five_runs_of_data_parallel(number: int) -> None:
    name, way = served_loss.ROWS[number]
    spread = [served_loss.losses(None, seed)[1] for seed in range(served_loss.SEEDS)]
    held_out = statistics.mean(served_loss.losses(way, seed)[1] for seed in range(served_loss.SEEDS))
    assert min(spread) < held_out < max(spread), name


def test_server_of_a_job_under_the_operator_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real operator and agents, a process of the server first, then of its standby and of a worker: at most the version in
    flight is made again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = ("--workers", "3", "--min", "2", "--max", "3")
    settings = ("--set", "steps=100000", "--set", "evaluate_every=1000000", "--set", "print_every=1000")
    run = LocalRun(tmp_path, *sizes, str(SAMPLE), *settings)
    try:
        run.trains(3)
        victims = ["local-worker-0-0", *(["local-worker-1-0", "local-worker-2-0"] if LONG else [])]
        for number, victim in enumerate(victims, 1):
            before = run.status()
            step = (before.get("progress") or {}).get("step", 0)
            run.wait(lambda s, least=step + 20: (s.get("progress") or {}).get("step", 0) > least, "versions")  # type: ignore[misc]
            os.kill(run.trainers()[victim], signal.SIGKILL)
            status = run.trains(3, after=before["membership"]["generation"])
            assert status["restarts"]["processes"] == number
            assert all(incident.get("stepsRedone", 0) <= 1 for incident in status["incidents"])
            assert status["membership"]["startStep"] > step
    finally:
        run.close()
