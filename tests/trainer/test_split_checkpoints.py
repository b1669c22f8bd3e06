"""Checkpoints of a model that is split, with real processes: every process writes its part, and any other split reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from harness.polling import until
from regroup.checkpoint import Checkpointer, pack, store
from regroup.checkpoint.selection import Name
from regroup.protocol import env, local
from regroup.protocol.document import CheckpointRef
from regroup.protocol.state import StatePair
from tests.long import only_long
from tests.trainer.split_kit import SplitJob
from tests.trainer.test_model_groups import TOLERANCE, Whole
from tests.trainer.zygote import Zygote

STEPS = "16"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Whole:
    """The state of one process after as many steps."""
    job = SplitJob(tmp_path_factory.mktemp("alone"), zygote, "", TEST_STEPS=STEPS, TEST_PACE="0")
    try:
        job.start([0])
        job.agents.announce([0])
        return job.finish([0])[1]
    finally:
        job.close()


@pytest.fixture
def make(tmp_path: Path, zygote: Zygote) -> Iterator[Callable[..., SplitJob]]:
    """Make a job by its mesh that saves as often as it can. It is ended after the test."""
    jobs: list[SplitJob] = []

    def made(mesh: str, **environment: str) -> SplitJob:
        saved = {env.CHECKPOINT_DIR: str(tmp_path / "saved"), env.CHECKPOINT_EVERY_SECONDS: "0"}
        jobs.append(SplitJob(tmp_path, zygote, mesh, TEST_STEPS=STEPS, TEST_PACE="0.1", **saved, **environment))
        return jobs[-1]

    yield made
    for one in jobs:
        one.close()


def saved(job: SplitJob, slots: list[int], at_least: int) -> CheckpointRef:
    """Wait for a checkpoint of this step or a later one, as rank 0 reports it."""

    def newest() -> CheckpointRef | None:
        reports = [one.checkpoint for one in job.agents.workers[slots[0]].messages(local.Committed) if one.checkpoint]
        return CheckpointRef(**reports[-1]) if reports and reports[-1]["step"] >= at_least else None

    found: CheckpointRef = until(newest, "a checkpoint", details=lambda: job.agents.workers[slots[0]].log)
    return found


def begin_again(
    job: SplitJob,
    ranks: int,
    mesh: str,
    checkpoint: CheckpointRef | None,
    environment: dict[str, str] | None = None,
    *,
    is_new: bool = False,
    imported: str | None = None,
) -> None:
    """All pods are lost; others take their slots, with another split perhaps. `is_new`: they are another job's."""
    pods = [worker.pod_uid for worker in job.agents.workers.values()]
    for slot in list(job.agents.workers):
        job.agents.kill(slot)
        del job.agents.workers[slot]
    job.split(mesh)
    job.start(range(ranks), TEST_MESH=mesh, **(environment or {}))
    lost = () if is_new else pods
    job.agents.announce(range(ranks), lost=lost, checkpoint=checkpoint, imported=imported, is_new=is_new)


def assert_close(whole: Whole, reference: Whole) -> None:
    for name, held in reference.items():
        for key, one in held.items():
            assert (whole[name][key] - one).abs().max() <= TOLERANCE, (name, key)


@pytest.mark.parametrize(
    ("mesh", "ranks", "then", "then_ranks"),
    [
        ("", 1, "shard=2", 2),
        ("shard=2", 2, "shard=3", 3),
        ("shard=2", 2, "tensor=2", 4),
        ("shard=2 tensor=2", 4, "shard=4", 4),
        ("shard=4", 4, "shard=2 tensor=2", 4),
        ("pipeline=2", 4, "", 1),
        ("tensor=2 pipeline=2", 4, "pipeline=2 shard=2", 4),
        *(
            pytest.param(*one, marks=only_long("each split is written in one row above and read in another"))
            for one in (
                ("shard=2", 4, "shard=2", 4),
                ("shard=2", 2, "", 1),
                ("tensor=2", 2, "shard=2", 2),
                ("", 1, "pipeline=2", 4),
                ("pipeline=2", 2, "pipeline=4", 4),
                ("pipeline=2", 2, "shard=2", 2),
                ("shard=2", 2, "pipeline=2", 2),
                ("pipeline=2 shard=2", 4, "", 1),
            )
        ),
    ],
)
@pytest.mark.slow
def test_a_checkpoint_is_read_at_any_split(
    make: Callable[[str], SplitJob], alone: Whole, mesh: str, ranks: int, then: str, then_ranks: int
) -> None:
    job = make(mesh)
    job.start(range(ranks))
    job.agents.announce(range(ranks))
    newest = saved(job, [0], 3)
    begin_again(job, then_ranks, then, newest)
    job.agents.wait_step(2, 0, range(then_ranks))
    for slot in range(then_ranks):
        (adopted,) = job.agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert adopted.source == "disk"
        assert adopted.start_step >= newest.step
    _, whole = job.finish(range(then_ranks))
    assert_close(whole, alone)


def test_uneven_and_empty_parts_of_two_optimizers_are_read_at_another_split(
    make: Callable[..., SplitJob], tmp_path: Path, zygote: Zygote
) -> None:
    words = {"TEST_MODEL": "uneven two"}
    whole_job = SplitJob(tmp_path / "alone", zygote, "", TEST_STEPS=STEPS, TEST_PACE="0", **words)
    try:
        whole_job.start([0])
        whole_job.agents.announce([0])
        reference = whole_job.finish([0])[1]
    finally:
        whole_job.close()
    job = make("shard=3", **words)
    job.start(range(3))
    job.agents.announce(range(3))
    newest = saved(job, [0], 3)
    begin_again(job, 2, "shard=2", newest)
    job.agents.wait_step(2, 0, range(2))
    for slot in range(2):
        (adopted,) = job.agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert adopted.source == "disk"
    _, whole = job.finish(range(2))
    assert whole.keys() == reference.keys()
    assert_close(whole, reference)


@pytest.mark.parametrize(
    ("then", "ranks"),
    [pytest.param("", 1, id="whole", marks=pytest.mark.slow), pytest.param("shard=2", 4, id="two groups")],
)
def test_job_begins_with_another_ones_checkpoint_at_another_split_and_again_when_all_is_lost(
    make: Callable[[str], SplitJob], alone: Whole, tmp_path: Path, then: str, ranks: int
) -> None:
    job = make("shard=2")
    job.start([0, 1])
    job.agents.announce([0, 1])
    begun = saved(job, [0], 3)
    settings = {env.JOB_UID: "new", env.RESUME_FROM: str(tmp_path / "saved" / begun.directory)}
    begin_again(job, ranks, then, None, settings | {env.CHECKPOINT_EVERY_SECONDS: "1000"}, is_new=True)
    job.agents.wait_step(2, begun.step + 1, range(ranks))
    begin_again(job, ranks, then, None, settings)  # it has saved nothing of its own
    job.agents.wait_step(3, begun.step + 1, range(ranks))
    for slot in range(ranks):
        (adopted,) = job.agents.workers[slot].messages(local.AdoptedLocally, 3)
        assert (adopted.source, adopted.state, adopted.start_step) == ("disk", StatePair(0, begun.step), begun.step)
    own = saved(job, [0], begun.step + 2)
    begin_again(job, ranks, then, own, settings)
    _, whole = job.finish(range(ranks))
    (adopted,) = job.agents.workers[0].messages(local.AdoptedLocally, 4)
    assert adopted.state >= StatePair(3, own.step), "a state of its own is newer than what it began with"
    assert_close(whole, alone)


@pytest.mark.parametrize(
    ("then", "ranks"), [pytest.param("", 3, id="2 to 3 ranks"), pytest.param("shard=2", 2, id="split")]
)
def test_branch_has_its_own_data_and_length_and_waits_where_its_beginning_was_replaced(
    make: Callable[[str], SplitJob], tmp_path: Path, then: str, ranks: int
) -> None:
    job = make("")
    job.start([0, 1])
    job.agents.announce([0, 1])
    begun = saved(job, [0], 3)
    path = tmp_path / "saved" / begun.directory
    settings = {env.JOB_UID: "new", env.RESUME_FROM: str(path), env.CHECKPOINT_EVERY_SECONDS: "1000"}
    branch = {"TEST_STEPS": "24", "TEST_ROWS": "700", **settings}
    begin_again(job, ranks, then, None, branch, is_new=True)
    job.agents.wait_step(2, begun.step + 1, range(ranks))
    (digest,) = {
        m.imported for slot in range(ranks) for m in job.agents.workers[slot].messages(local.AdoptedLocally, 2)
    }

    record = path / "COMMIT.json"
    written = record.read_text()
    record.write_text(written.replace('"digest": "', '"digest": "f'))  # whole, and another one
    begin_again(job, ranks, then, None, branch, imported=digest)

    def refused() -> list[local.Left]:
        return [message for message in job.agents.workers[0].messages(local.Left) if message.cause is not None]

    (left,) = job.agents.wait(refused, "a refusal")
    assert left.cause == "checkpoint", left
    assert f"{path} was replaced after the job had begun with it" in left.message
    record.write_text(written)
    job.agents.announce(range(ranks), older=(2,), lost=job.agents.documents[-1].lost, imported=digest)
    ends, _ = job.finish(range(ranks))
    for slot in range(ranks):
        (adopted,) = job.agents.workers[slot].messages(local.AdoptedLocally, 4)
        assert (adopted.imported, adopted.state) == (digest, StatePair(0, begun.step))
    assert sorted(map(int, ends[0]["losses"])) == list(range(begun.step, 24))


@pytest.mark.parametrize("mesh", ["shard=2", "pipeline=2"])
def test_one_group_that_loses_a_process_goes_back_to_the_checkpoint(
    make: Callable[[str], SplitJob], alone: Whole, mesh: str
) -> None:
    job = make(mesh)
    job.start([0, 1])
    job.agents.announce([0, 1])
    newest = saved(job, [0], 2)
    job.agents.kill(1)
    job.restart(1)
    job.agents.announce([0, 1], checkpoint=newest)
    job.agents.wait_step(2, 0, [0, 1])
    for slot in (0, 1):
        (adopted,) = job.agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert (adopted.source, adopted.rolled_back) == ("disk", True)
    ends, whole = job.finish([0, 1])
    assert ends[0]["same_model"]
    assert_close(whole, alone)


def test_a_split_checkpoint_is_read_without_regroup(make: Callable[[str], SplitJob], tmp_path: Path) -> None:
    job = make("shard=2")
    job.start([0, 1])
    job.agents.announce([0, 1])
    _, whole = job.finish([0, 1])
    (directory,) = (tmp_path / "saved").glob(f"step-{STEPS}.*")
    assert sorted(file.name for file in directory.iterdir()) == [
        ".job",
        ".metadata",
        "COMMIT.json",
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    dcp_to_torch_save(directory, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    for name, held in whole.items():
        assert torch.equal(plain["model"][name], held["parameter"]), name


def test_a_pipelines_checkpoint_is_read_without_regroup(make: Callable[[str], SplitJob], tmp_path: Path) -> None:
    """It is that of one process with all layers: torch's own classes take it."""
    job = make("pipeline=2")
    job.start([0, 1])
    job.agents.announce([0, 1])
    _, whole = job.finish([0, 1])
    (directory,) = (tmp_path / "saved").glob(f"step-{STEPS}.*")
    dcp_to_torch_save(directory, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert plain["parameters"] == [[list(whole)]]
    parameters = {name: torch.nn.Parameter(torch.zeros_like(held["parameter"])) for name, held in whole.items()}
    optimizer = torch.optim.AdamW(parameters.values())
    optimizer.load_state_dict(plain["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.0025
    assert plain["state"]["schedule"]["last_epoch"] == int(STEPS)
    for name, held in whole.items():
        assert torch.equal(plain["model"][name], held["parameter"]), name
        for key, one in optimizer.state[parameters[name]].items():
            assert torch.equal(one, held[key]), (name, key)


def test_a_part_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """The last step is saved when it is due and again at the end; meanwhile another process may be joining the parts."""
    store.prepare()
    name = Name(1, 7, "abcd")
    tree = {"model": {"w": torch.ones(2)}}
    structure, tensors = pack(tree)
    store.write_part(tmp_path, name, "job", 0, structure, tensors)
    part = tmp_path / f".writing-{name.directory}" / "part-0"
    before = part.stat().st_ino
    store.write_part(tmp_path, name, "job", 0, structure, tensors)
    assert part.stat().st_ino == before
    path = store.join_parts(tmp_path, name, 1)
    store.write_part(tmp_path, name, "job", 0, structure, tensors)
    assert not part.parent.exists()
    assert store.has_parts(tmp_path, name, 1)
    assert store.join_parts(tmp_path, name, 1) == path
    assert torch.equal(store.read_data(path)["model"]["w"], torch.ones(2))


@pytest.mark.parametrize("inner", [0, 1])
def test_a_part_is_deleted_although_the_other_process_died_before_it_wrote_its_own(tmp_path: Path, inner: int) -> None:
    store.prepare()
    name, newer = Name(1, 7, "abcd"), Name(2, 9, "efgh")
    store.write_part(tmp_path, name, "job", inner, *pack({"model": {}}))
    assert store.names(tmp_path) == ([], [name])
    checkpointer = Checkpointer(str(tmp_path), 0, "job")
    checkpointer.prune([newer.directory], newer.generation)
    assert checkpointer.wait(60)
    assert store.names(tmp_path) == ([], [])
