"""The durable tier with real files, real DCP and real kills."""

import json
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from harness.polling import until
from regroup.checkpoint import Checkpointer, CheckpointError, ImportMissing, pack, store
from regroup.checkpoint.selection import Name
from regroup.checkpoint.staging import Staging
from regroup.checkpoint.store import marks
from regroup.data import SamplePlan
from regroup.protocol.document import CheckpointRef, LineageEntry
from regroup.protocol.state import StatePair
from regroup.state.durable import Durable, Origin, patience_s
from regroup.state.training import TrainingState
from tests.trainer.dead_volume import DeadVolume

LINEAGE = (LineageEntry(1, 0), LineageEntry(2, 50))


def build(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()


def tree_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": {"sched": {"last": 3, "e": {}}}}


def flat(tree: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Return every bit of a tree."""
    structure, tensors = pack(tree)
    return structure, {
        key: tensor.clone().view(-1).view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()
    }


def make(directory: Path, job_uid: str = "job-1", **changes: Any) -> Checkpointer:
    return Checkpointer(str(directory), every_s=0, job_uid=job_uid, **changes)


def save(
    checkpointer: Checkpointer,
    generation: int,
    step: int,
    *,
    acknowledged: Callable[[], bool] | None = None,
    wait: bool = True,
) -> dict[str, Any]:
    """Save a small state that is a function of (generation, step); return it."""
    tree = {"model": {"w": torch.full((5,), generation + step / 1000)}, "optimizer": {"state": {}}, "state": {}}
    start = next((entry.start_step for entry in LINEAGE if entry.generation == generation), 0)
    assert checkpointer.save(
        tree, pair=StatePair(generation, step), generation=generation, uid=f"{generation:08x}-0000",
        parent_generation=generation - 1, start_step=start, digest=f"{step:016x}", acknowledged=acknowledged,
    )  # fmt: skip
    if wait:
        assert checkpointer.wait(30)
    return tree


def test_checkpoint_restores_model_and_fresh_optimizer(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    tree = tree_of(model, optimizer)
    staging = Staging()
    checkpointer = make(tmp_path, staging=staging)
    assert checkpointer.save(
        tree, pair=StatePair(1, 60), generation=2, uid="abcd-1234-ef", parent_generation=1, start_step=50, digest="0f"
    )
    before = flat(tree)
    staging.settle()
    train(model, optimizer)  # the copy was taken: what the main thread does now is not in the checkpoint
    assert checkpointer.wait(30)
    assert checkpointer.problem is None
    assert checkpointer.last_committed == CheckpointRef(2, 60, "step-60.g2-abcd1234")

    found = make(tmp_path).newest(LINEAGE)
    assert found.skipped == ()
    assert found.info is not None
    assert found.info.pair == StatePair(1, 60)
    assert (found.info.commit.parent_generation, found.info.commit.start_step, found.info.commit.digest) == (
        1,
        50,
        "0f",
    )
    other, fresh = build(seed=1)
    loaded = make(tmp_path).load(found.info, into=tree_of(other, fresh))
    assert flat(loaded) == before
    other.load_state_dict(loaded["model"])
    fresh.load_state_dict(loaded["optimizer"])
    assert flat(tree_of(other, fresh)) == before


def test_checkpoint_is_plain_dcp(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    tree = tree_of(model, optimizer)
    checkpointer = make(tmp_path / "checkpoints")
    checkpointer.save(tree, pair=StatePair(1, 3), generation=1, uid="a", parent_generation=0, start_step=0)
    assert checkpointer.wait(30)
    dcp_to_torch_save(tmp_path / "checkpoints" / "step-3.g1-a", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert {"model", "optimizer", "state"} <= set(plain)
    assert flat(plain["model"]) == flat(tree["model"])
    assert plain["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.99)
    assert plain["state"]["sched"]["last"] == 3


def test_other_jobs_checkpoint_begins_this_one_below_all_its_states(tmp_path: Path) -> None:
    save(make(tmp_path, "job-1"), 2, 60)
    path = tmp_path / "step-60.g2-00000002"
    mine = make(tmp_path, "job-2")
    assert mine.newest(LINEAGE).info is None
    info = mine.imported(str(path))
    assert info.pair == StatePair(0, 60)
    assert info.pair < StatePair(1, 0)
    assert torch.equal(mine.load(info)["model"]["w"], torch.full((5,), 2.06))
    mine.prune(["step-1.g9-aaaa"], 9)
    assert mine.wait(30)
    assert path.is_dir(), "this job never deletes it"
    damage_byte(path)
    with pytest.raises(CheckpointError) as refused:
        mine.imported(str(path))
    assert not isinstance(refused.value, ImportMissing), "a volume may be whole again"


@pytest.mark.parametrize("leftover", [False, True], ids=["gone", "never completed"])
def test_what_a_job_is_to_begin_with_and_is_not_there_is_named(tmp_path: Path, leftover: bool) -> None:
    path = tmp_path / "step-60.g2-00000002"
    if leftover:
        path.mkdir()
    with pytest.raises(ImportMissing, match=f"{path}.*{'lacks COMMIT.json' if leftover else 'does not exist'}"):
        make(tmp_path).imported(str(path))


def test_volume_of_the_first_checkpoint_that_is_not_there_may_come_back(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be listed") as refused:
        make(tmp_path).imported(str(tmp_path / "unmounted" / "step-60.g2-00000002"))
    assert not isinstance(refused.value, ImportMissing)


def damage_byte(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut_data(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def edit_commit(path: Path, **changes: Any) -> None:
    record = json.loads((path / "COMMIT.json").read_text())
    (path / "COMMIT.json").write_text(json.dumps({**record, **changes}))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        pytest.param(lambda p: (p / "COMMIT.json").unlink(), "has no COMMIT.json", id="half-written"),
        pytest.param(lambda p: p.rename(p.with_name(f".writing-{p.name}")), "has no COMMIT.json", id="written aside"),
        pytest.param(lambda p: (p / "COMMIT.json").write_text("{"), "COMMIT.json is damaged", id="record cut off"),
        pytest.param(lambda p: (p / "COMMIT.json").write_bytes(b"\xff\xfe"), "cannot be read", id="record no text"),
        pytest.param(lambda p: edit_commit(p, jobUID="job-2"), "belongs to job job-2", id="another job's"),
        pytest.param(lambda p: edit_commit(p, files={}), "lists no .metadata file", id="a record of no files"),
        pytest.param(lambda p: edit_commit(p, step=59), "is that of step 59", id="a record of another step"),
        pytest.param(lambda p: (p / ".metadata").unlink(), ".metadata is missing", id="index missing"),
        pytest.param(cut_data, "bytes, ", id="data cut off"),
        pytest.param(damage_byte, "SHA-256 differs", id="one bit of data"),
    ],
)
def test_damaged_checkpoint_is_skipped_with_one_sentence(
    tmp_path: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    checkpointer = make(tmp_path)
    older = save(checkpointer, 2, 55)
    save(checkpointer, 2, 60)
    damage(tmp_path / "step-60.g2-00000002")
    found = make(tmp_path).newest(LINEAGE)
    assert found.info is not None
    assert found.info.pair == StatePair(2, 55)
    assert flat(checkpointer.load(found.info)) == flat(older)
    (said,) = found.skipped
    assert said.startswith("Skipped step-60.g2-00000002: ")
    assert sentence in said


def test_index_that_is_a_program_is_not_run(tmp_path: Path) -> None:
    """A COMMIT.json can be forged with its hashes; then DCP's pickled index must still not run anything."""
    checkpointer = make(tmp_path)
    save(checkpointer, 1, 10)
    path, proof = tmp_path / "step-10.g1-00000001", tmp_path / "ran"

    class Program:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (proof,)

    (path / ".metadata").write_bytes(pickle.dumps(Program()))
    (path / "COMMIT.json").unlink()
    files = {name: {"size": mark.size, "sha256": mark.sha256} for name, mark in marks(path).items()}
    (path / "COMMIT.json").write_text(
        json.dumps(
            {"jobUID": "job-1", "generation": 1, "step": 10, "stateGeneration": 1, "parentGeneration": 0,
             "startStep": 0, "digest": "", "files": files}
        )
    )  # fmt: skip
    info = checkpointer.newest(LINEAGE).info
    assert info is not None
    with pytest.raises(CheckpointError, match="which is no part of DCP's format"):
        checkpointer.load(info)
    assert not proof.exists()


def test_script_that_does_not_fit_is_told_so(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    save(checkpointer, 1, 10)
    info = checkpointer.newest(LINEAGE).info
    assert info is not None
    with pytest.raises(
        CheckpointError, match=r"does not fit the script\. Its model's w is \[5\], the script's is \[6\]"
    ):
        checkpointer.load(info, into={"model": {"w": torch.ones(6)}})


def test_fenced_generation_that_commits_late_is_not_read(tmp_path: Path) -> None:
    """Trace H15: g1 pauses inside its checkpoint; g2 restores and commits an earlier step; g1 then writes COMMIT."""
    g1, g2 = make(tmp_path), make(tmp_path)
    go_on = threading.Event()
    save(g1, 1, 100, acknowledged=go_on.is_set, wait=False)
    until((tmp_path / "step-100.g1-00000001").exists, "the checkpoint's directory")
    save(g2, 2, 60)
    go_on.set()
    assert g1.wait(30)
    assert g1.last_committed == CheckpointRef(1, 100, "step-100.g1-00000001")
    found = g2.newest(LINEAGE)
    assert found.info is not None
    assert found.info.pair == StatePair(2, 60)
    (tmp_path / "step-60.g2-00000002" / "COMMIT.json").unlink()
    found = g2.newest(LINEAGE)
    assert found.info is None
    assert [said.split(": ")[1][:12] for said in found.skipped] == ["it has no CO", "generation 2"]


@pytest.mark.parametrize(
    ("others", "want"),
    [
        pytest.param([], StatePair(1, 100), id="nothing else may be read"),
        pytest.param([(1, 45)], StatePair(1, 45), id="there is one that the newest generation began after"),
        pytest.param([(2, 60)], StatePair(2, 60), id="the newest generation has saved one"),
    ],
)
def test_named_checkpoint_that_was_left_behind_is_the_last_resort(
    tmp_path: Path, others: list[tuple[int, int]], want: StatePair
) -> None:
    """Generation 2 rolled back to step 50, and its volume took no checkpoint for a while; then all processes died."""
    for generation, step in [(1, 100), *others]:
        save(make(tmp_path), generation, step)
    found = make(tmp_path).newest(LINEAGE, CheckpointRef(1, 100, "step-100.g1-00000001"))
    assert found.info is not None
    assert found.info.pair == want
    unnamed = make(tmp_path).newest(LINEAGE)
    assert (unnamed.info is None) == (not others)


def test_fenced_generation_writes_nothing_once_it_sees_a_later_one(tmp_path: Path) -> None:
    g1 = make(tmp_path)
    save(make(tmp_path), 2, 60)
    save(g1, 1, 100)
    assert g1.last_committed is None
    assert "Generation 2 has written a checkpoint" in str(g1.problem)
    assert [path.name for path in tmp_path.iterdir()] == ["step-60.g2-00000002"]


def test_commit_waits_for_every_rank(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    acknowledged = threading.Event()
    save(checkpointer, 1, 10, acknowledged=acknowledged.is_set, wait=False)
    until((tmp_path / "step-10.g1-00000001").exists, "the checkpoint's directory")
    assert checkpointer.newest(LINEAGE).info is None
    acknowledged.set()
    assert checkpointer.wait(30)
    assert checkpointer.newest(LINEAGE).info is not None


def test_next_checkpoint_is_copied_once_the_data_of_the_last_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make(tmp_path)
    assert checkpointer.due(0.0)
    writes, written, acknowledged, asked = store.write_data, threading.Event(), threading.Event(), threading.Event()
    again, written_again = threading.Event(), threading.Event()
    gates = iter([(threading.Event(), written), (again, written_again)])

    def slow(*arguments: Any) -> Path:
        begins, ends = next(gates)
        begins.set()
        assert ends.wait(30)
        return writes(*arguments)

    def know() -> bool:
        asked.set()
        return acknowledged.is_set()

    monkeypatch.setattr(store, "write_data", slow)
    save(checkpointer, 1, 10, acknowledged=know, wait=False)
    assert not checkpointer.due(1.0)
    assert not checkpointer.save({}, pair=StatePair(1, 11), generation=1, uid="x", parent_generation=0, start_step=0), (
        "the copies are being written"
    )
    written.set()
    assert asked.wait(30)
    assert checkpointer.due(1.0)
    tree = save(checkpointer, 1, 11, acknowledged=lambda: True, wait=False)
    assert not checkpointer.due(2.0), "one at most waits for the writer"
    assert checkpointer.last_committed is None
    acknowledged.set()
    assert again.wait(30)
    assert not checkpointer.due(2.0), "the end of the first write gives no memory away that the second one reads"
    written_again.set()
    assert checkpointer.wait(30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10.g1-00000001", "step-11.g1-00000001"]
    info = checkpointer.newest(LINEAGE).info
    assert info is not None
    assert flat(checkpointer.load(info)) == flat(tree)


def test_checkpoint_that_waits_for_the_writer_is_cancelled_with_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make(tmp_path)
    known, asked, written = [False], threading.Event(), list[int]()
    write_data = store.write_data

    def write(directory: Path, name: Name, *rest: Any) -> Path:
        written.append(name.step)
        return write_data(directory, name, *rest)

    monkeypatch.setattr(store, "write_data", write)

    def know() -> bool:
        asked.set()
        return known[0]

    save(checkpointer, 1, 10, acknowledged=know, wait=False)
    assert asked.wait(30)
    save(checkpointer, 1, 11, acknowledged=know, wait=False)
    checkpointer.cancel()
    known[0] = True  # by another state
    assert checkpointer.wait(30)
    assert checkpointer.last_committed is None
    assert "step-11.g1-00000001 was not committed: its generation ended" in str(checkpointer.problem)
    assert (written, list(tmp_path.iterdir())) == ([10], []), "nothing of the second one is written"


def test_memory_of_the_last_copy_is_used_again_where_it_fits(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    places = []
    for step, dtype, size in ((1, torch.float32, 5), (2, torch.float32, 5), (3, torch.int32, 5), (4, torch.int32, 6)):
        tree = {"model": {"w": torch.arange(size).to(dtype)}, "optimizer": {"state": {}}, "state": {}}
        assert checkpointer.save(tree, pair=StatePair(1, step), generation=1, uid="a", parent_generation=0, start_step=0)
        assert checkpointer.wait(30)
        assert flat(checkpointer.load(checkpointer.info_of(f"step-{step}.g1-a"))) == flat(tree)
        places.append(checkpointer._host["model.w"])
    assert [one is other for one, other in pairwise(places)] == [True, False, False]


def test_old_checkpoints_are_deleted_although_a_write_always_waits(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    asked = [threading.Event() for _ in range(4)]
    known = [threading.Event() for _ in range(4)]

    def knows(step: int) -> bool:
        asked[step].set()
        return known[step].is_set()

    for step in range(4):
        save(checkpointer, 1, step, acknowledged=partial(knows, step), wait=False)
        if step:
            known[step - 1].set()
        assert asked[step].wait(30)
        if step:
            checkpointer.prune([f"step-{step - 1}.g1-00000001"], generation=1)
    left = sorted(path.name for path in tmp_path.iterdir() if (path / "COMMIT.json").exists())
    assert left == ["step-1.g1-00000001", "step-2.g1-00000001"], "0 was deleted between two writes"
    known[3].set()
    assert checkpointer.wait(30)


def test_step_that_not_every_rank_committed_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    save(checkpointer, 1, 10, acknowledged=lambda: False, wait=False)
    checkpointer.cancel()
    assert checkpointer.wait(30)
    assert checkpointer.last_committed is None
    assert "was not committed" in str(checkpointer.problem)
    assert list(tmp_path.iterdir()) == []
    save(checkpointer, 1, 11)
    assert checkpointer.problem is None


def test_step_that_is_acknowledged_by_another_state_is_not_committed(tmp_path: Path) -> None:
    """The writer was cut off; what its rank commits in a later generation, from another's state, has the same number."""
    checkpointer = make(tmp_path)
    asked, answered = threading.Event(), threading.Event()

    def acknowledged() -> bool:
        asked.set()
        return answered.wait(30)

    save(checkpointer, 1, 101, acknowledged=acknowledged, wait=False)
    assert asked.wait(30)
    checkpointer.cancel()
    answered.set()
    assert checkpointer.wait(30)
    assert checkpointer.last_committed is None
    assert "its generation ended" in str(checkpointer.problem)
    assert list(tmp_path.iterdir()) == []


class Clock:
    """A clock that a test moves, in place of the module `time`."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The only clock of the durable tier."""
    virtual = Clock()
    monkeypatch.setattr("regroup.checkpoint.checkpointer.time", virtual)
    monkeypatch.setattr("regroup.state.durable.time", virtual)
    return virtual


def durable_of(monkeypatch: pytest.MonkeyPatch, directory: Path) -> tuple[TrainingState, Durable, Checkpointer]:
    """Return the durable tier of a process that writes, every 60 s."""
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(directory))
    monkeypatch.setenv("REGROUP_CHECKPOINT_EVERY_SECONDS", "60")
    state = TrainingState(*build(), {})
    durable = Durable(state, SamplePlan(0, 100, 4, 2, 2))
    durable.is_writer = True
    assert durable.checkpointer is not None
    return state, durable, durable.checkpointer


class Asked(int):
    """The number of steps that every rank has committed; it says when the writer thread compares it."""

    looks: ClassVar = threading.Semaphore(0)

    def __ge__(self, step: int) -> bool:
        self.looks.release()
        return int(self) >= step


def test_checkpoint_is_committed_after_the_next_step_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    origin = Origin(1, "aaaa", 0, 0)
    for step, step_s in ((1, 70.0), (2, 70.0), (3, 600.0), (4, 7200.0)):
        state.named(StatePair(1, step), 1)
        assert checkpointer.wait(30)
        Asked.looks = threading.Semaphore(0)
        durable.save_if_due(origin, alone=False)
        assert checkpointer.busy == (step > 1), "the first call starts the clock"
        durable.known_by_all = Asked(step - 1)
        assert not checkpointer.busy or Asked.looks.acquire(timeout=30), "the data is written"
        for _ in range(7 if checkpointer.busy else 0):
            while Asked.looks.acquire(blocking=False):
                pass
            clock.now_s += step_s / 7
            for _ in range(3):  # the last one is after the clock was moved
                assert Asked.looks.acquire(timeout=30)
            assert durable.problem() == "", "a step takes as long as it takes: nothing is wrong with the volume"
        clock.now_s += 0 if checkpointer.busy else step_s
        durable.known_by_all = step
        assert checkpointer.wait(30)
        saved = durable.report()
        assert (saved and saved["step"]) == (step if step > 1 else None)
    assert checkpointer.longest_s == 0, "steps are no part of what the volume takes"


def test_each_write_and_each_deletion_has_the_bound_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The writer thread does one behind the other. A volume that takes 50 s for each does not hang."""
    checkpointer = make(tmp_path)
    save(checkpointer, 1, 1)
    said: list[str | None] = []

    def slowly(does: Callable[..., Any]) -> Callable[..., Any]:
        def does_slowly(*arguments: Any) -> Any:
            clock.now_s += 50.0
            said.append(checkpointer.hangs(60.0))
            return does(*arguments)

        return does_slowly

    monkeypatch.setattr(store, "write_data", slowly(store.write_data))
    monkeypatch.setattr(store, "delete", slowly(store.delete))
    asked, acknowledged = threading.Event(), threading.Event()

    def know() -> bool:
        asked.set()
        return acknowledged.is_set()

    save(checkpointer, 1, 2, acknowledged=know, wait=False)
    assert asked.wait(30)
    save(checkpointer, 1, 3, wait=False)
    checkpointer.prune(["step-2.g1-00000001"], generation=1)
    acknowledged.set()
    assert checkpointer.wait(30)
    assert said == [None, None, None]
    assert checkpointer.longest_s == 50.0


def test_generation_that_rolled_back_begins_a_checkpoint_with_its_first_step_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    state.named(StatePair(2, 7), 2)
    durable.hurry()
    assert not checkpointer.busy
    assert list(tmp_path.iterdir()) == []
    for step in (8, 9):
        state.named(StatePair(2, step), 2)
        durable.save_if_due(Origin(2, "aaaa", 1, 7), alone=True)
        assert checkpointer.wait(30)
        clock.now_s += 1.0
    saved = durable.report()
    assert saved is not None
    assert saved["step"] == 8, "the next one is due after the interval"


def test_each_step_that_is_longer_than_the_interval_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    for step in range(1, 6):
        state.named(StatePair(1, step), 1)
        Asked.looks = threading.Semaphore(0)
        durable.known_by_all = Asked(step - 1)  # the rows of a step say who has committed the one before
        durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=False)
        state.staging.settle()  # as the next commit does, for which the write before this one waits
        while step > 1 and checkpointer._host_of is not None:  # the step takes longer than the volume
            assert Asked.looks.acquire(timeout=30)
        clock.now_s += 70.0
    durable.known_by_all = 5
    assert checkpointer.wait(30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}.g1-aaaa" for step in range(2, 6)]


AFTER_A_STEP = "a checkpoint begins after a step, once the data of the one before is on the volume"


@pytest.mark.parametrize(
    ("write_s", "step_s", "generations", "want"),
    [
        pytest.param(0.0, 61.0, 1, "", id="the interval is kept"),
        pytest.param(30.0, 200.0, 1, f"every 230 s, and {{}} is 60: {AFTER_A_STEP}. Raise it to 230,", id="long steps"),
        pytest.param(150.0, 60.0, 1, "every 210 s, and {} is 60: writing one has taken 150 s.", id="a slow volume"),
        pytest.param(30.0, 200.0, 4, "", id="each generation has one step: it is no interval"),
    ],
)
def test_why_checkpoints_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock,
    write_s: float, step_s: float, generations: int, want: str,
) -> None:  # fmt: skip
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    write_data, begun = store.write_data, threading.Event()

    def slow(*arguments: Any) -> Path:
        assert begun.wait(30)
        clock.now_s += write_s
        return write_data(*arguments)

    monkeypatch.setattr(store, "write_data", slow)
    for step in range(1, 6):
        if step <= generations:
            durable.begin_generation()
        state.named(StatePair(1, step), 1)
        begun.clear()
        durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=True)
        begun.set()
        assert checkpointer.wait(30)
        clock.now_s += step_s
    assert want.format("spec.checkpoint.everySeconds") in (durable.late() or "")
    assert bool(durable.late()) == bool(want)
    durable.is_writer = False
    assert durable.late() is None, "another process says it"


def test_last_checkpoint_does_not_wait_for_a_step_that_will_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROUP_CHECKPOINT_WAIT_SECONDS", "10")
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    state.named(StatePair(1, 7), 1)
    monkeypatch.setattr(checkpointer, "due", lambda _: True)
    durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=False)
    assert checkpointer.busy
    durable.save_now(Origin(1, "aaaa", 0, 0), interrupted=lambda: False)
    assert durable.report() == {"generation": 1, "step": 7, "directory": "step-7.g1-aaaa"}


def test_script_that_raises_ends_the_wait_for_its_next_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    state.named(StatePair(1, 7), 1)
    monkeypatch.setattr(checkpointer, "due", lambda _: True)
    durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=False)
    durable.lost()
    assert checkpointer.wait(30)
    assert durable.report() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["given up", "its generation ended"])
def test_model_group_whose_parts_do_not_come_is_a_fault_of_the_volume(tmp_path: Path, is_cancelled: bool) -> None:
    checkpointer = make(tmp_path)
    checkpointer.save(
        {"model": {"w": torch.ones(5)}, "optimizer": {"state": {}}, "state": {}}, pair=StatePair(1, 7), generation=1,
        uid="aaaa", parent_generation=0, start_step=0, part=(0, 2), parts_within_s=300 if is_cancelled else 0.01,
    )  # fmt: skip
    if is_cancelled:
        checkpointer.cancel()
    assert checkpointer.wait(30)
    assert "Checkpoint step-7.g1-aaaa was not committed" in str(checkpointer.problem)
    assert checkpointer.failure == (None if is_cancelled else checkpointer.problem)
    assert is_cancelled or f"Check the volume of {tmp_path}" in str(checkpointer.failure)


@pytest.mark.parametrize("moment", ["while data is written", "before the commit"])
def test_writer_killed_leaves_a_directory_that_is_skipped(tmp_path: Path, moment: str) -> None:
    older = save(make(tmp_path), 1, 10)
    script = Path(__file__).with_name("checkpoint_writer.py")
    writer = subprocess.Popen([sys.executable, str(script), str(tmp_path), "100"])
    aside, path = tmp_path / ".writing-step-20.g1-aaaa1111", tmp_path / "step-20.g1-aaaa1111"
    try:
        if moment == "while data is written":
            until(
                lambda: any(file.stat().st_size for file in aside.glob("*.distcp")) or path.exists(),
                "some data is written",
                timeout_s=60,
                every_s=0.005,
            )
        else:
            until(path.exists, "the directory", timeout_s=60, every_s=0.005)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    reader = make(tmp_path)
    found = reader.newest(LINEAGE)
    assert found.info is not None
    assert flat(reader.load(found.info)) == flat(older)
    assert found.skipped == (
        "Skipped step-20.g1-aaaa1111: it has no COMMIT.json, its writer stopped before it was complete.",
    )
    # The next generation's prune takes the remains away, and nothing else.
    reader.prune(["step-30.g2-00000002"], generation=2)
    assert reader.wait(30)
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_written_is_a_sentence_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpointer = make(tmp_path / "file" / "checkpoints")
    save(checkpointer, 1, 10)
    assert checkpointer.last_committed is None
    assert "could not be written to" in str(checkpointer.problem)
    assert "NotADirectoryError" in str(checkpointer.problem)
    assert "cannot be listed" in checkpointer.newest(LINEAGE).skipped[0]


def test_state_that_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.f is a"):
        make(tmp_path).save(
            {"state": {"f": print}}, pair=StatePair(1, 1), generation=1, uid="x", parent_generation=0, start_step=0
        )
    assert list(tmp_path.iterdir()) == []


LATER = ["step-70.g2-00000002", "step-75.g3-00000003"]


def test_prune_deletes_only_this_jobs_and_never_above_its_generation(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    save(make(tmp_path, job_uid="job-2"), 1, 5)
    for generation, step in [(1, 10), (1, 50), (2, 60), (2, 70), (3, 75)]:
        save(checkpointer, generation, step)
    for word, generation, left in [
        ("step-75.g3-00000003", 1, ["step-5.g1-00000001", "step-60.g2-00000002", *LATER]),
        ("step-70.g2-00000002", 3, ["step-5.g1-00000001", *LATER]),
    ]:
        checkpointer.prune((word,), generation)
        assert checkpointer.wait(30)
        assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_volume_that_hangs_does_not_hold_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = make(tmp_path)
    for step in (10, 20, 30):
        save(checkpointer, 1, step)
    hangs, seen = threading.Event(), threading.Event()
    names = store.names

    def hanging(directory: Path) -> Any:
        seen.set()
        assert hangs.wait(30)
        return names(directory)

    monkeypatch.setattr(store, "names", hanging)
    checkpointer.prune(["step-20.g1-00000001"], generation=1)
    checkpointer.prune(["step-30.g1-00000001"], generation=1)  # while the volume hangs: the newest word counts
    assert seen.wait(30)
    assert checkpointer.busy
    assert not checkpointer.wait(0)
    hangs.set()
    assert checkpointer.wait(30)
    assert [path.name for path in tmp_path.iterdir()] == ["step-30.g1-00000001"]
    save(checkpointer, 1, 40)
    assert checkpointer.problem is None


def test_word_that_comes_while_a_checkpoint_is_written_is_done_after_it(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    save(checkpointer, 1, 10)
    acknowledged = threading.Event()
    save(checkpointer, 1, 20, acknowledged=acknowledged.is_set, wait=False)
    checkpointer.prune(["step-20.g1-00000001"], generation=1)
    acknowledged.set()
    assert checkpointer.wait(30)
    assert [path.name for path in tmp_path.iterdir()] == ["step-20.g1-00000001"]


def test_missing_checkpoint_that_the_status_names_is_said(tmp_path: Path) -> None:
    found = make(tmp_path).newest(LINEAGE, CheckpointRef(2, 60, "step-60.g2-00000002"))
    assert found.info is None
    assert found.skipped == (f"The job's status names checkpoint step-60.g2-00000002, which is not in {tmp_path}.",)


def test_due_counts_from_the_first_call_and_from_each_start(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), every_s=10, job_uid="job-1")
    assert [checkpointer.due(now_s) for now_s in (100, 109, 110, 111, 120)] == [False, False, True, False, True]


def test_session_that_took_another_ranks_state_commits_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 wrote (1, 101) and was cut off; the others did step 101 again, and that is what it adopts and goes on from."""
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("REGROUP_CHECKPOINT_EVERY_SECONDS", "0")
    model, optimizer = build()
    state = TrainingState(model, optimizer, {})
    durable = Durable(state, SamplePlan(0, 100, 4, 2, 2))
    state.named(StatePair(1, 101), 1)
    durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=False)
    durable.known_by_all = 100
    checkpointer = durable.checkpointer
    assert checkpointer is not None
    assert not checkpointer.wait(0)
    durable.lost()
    assert durable.known_by_all == 0
    durable.known_by_all = 200
    assert checkpointer.wait(30)
    assert durable.report() is None
    durable.is_writer = True
    assert durable.problem() == "", "it is no fault of the volume"
    assert list(tmp_path.iterdir()) == []


def test_volume_that_takes_no_checkpoint_is_said_once_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(tmp_path / "file" / "checkpoints"))
    monkeypatch.setenv("REGROUP_CHECKPOINT_EVERY_SECONDS", "0")
    state = TrainingState(*build(), {})
    durable = Durable(state, SamplePlan(0, 100, 4, 2, 2))
    assert durable.checkpointer is not None
    assert durable.problem() is None, "it is not the one to write"
    durable.is_writer = True
    for _ in range(3):
        state.named(StatePair(1, 7), 1)
        durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=True)
        assert durable.checkpointer.wait(30)
    assert "could not be written to" in str(durable.problem())
    assert capsys.readouterr().out.count("Checkpoint step-7.g1-aaaa could not be written to") == 1


def test_save_that_must_be_durable_gives_up_a_volume_that_does_not_answer_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("REGROUP_CHECKPOINT_WAIT_SECONDS", "0.3")
    state = TrainingState(*build(), {})
    state.named(StatePair(1, 7), 1)
    durable = Durable(state, SamplePlan(0, 100, 4, 2, 2))
    durable.is_writer = True
    with DeadVolume(tmp_path) as volume:
        durable.save_now(Origin(1, "aaaa", 0, 0), interrupted=lambda: False)
        assert durable.problem() == (
            f"Writing checkpoint step-7.g1-aaaa has taken more than 0.3 s: the volume of {tmp_path} does not answer. Check "
            "the volume, and its mount on this worker's node."
        )
        assert capsys.readouterr().out.splitlines() == [durable.problem()]
        assert durable.report() is None
        volume.answer()
        assert durable.checkpointer is not None
        assert durable.checkpointer.wait(30)
    assert durable.problem() == ""
    assert durable.report() == {"generation": 1, "step": 7, "directory": "step-7.g1-aaaa"}


@pytest.mark.parametrize(
    ("most_s", "longest_s", "want_s"),
    [
        pytest.param(1800, None, 1800, id="none was written before: all that is allowed"),
        pytest.param(1800, 2, 300, id="quick ones before: a file server's restart is still waited for"),
        pytest.param(1800, 200, 800, id="slow ones before: four times the slowest"),
        pytest.param(1800, 900, 1800, id="never more than is allowed"),
        pytest.param(60, 2, 60, id="nor where less is allowed than usual"),
    ],
)
def test_how_long_one_checkpoint_is_waited_for(most_s: float, longest_s: float | None, want_s: float) -> None:
    assert patience_s(most_s, longest_s) == want_s


def test_plain_python_begins_with_the_checkpoint_that_is_named_until_it_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    train(model, optimizer)
    there, here = tmp_path / "there", tmp_path / "here"
    state = TrainingState(model, optimizer, {})
    checkpointer = make(there)
    checkpointer.save(
        state.saved_tree(), pair=StatePair(4, 60), generation=4, uid="a", parent_generation=3, start_step=50
    )
    assert checkpointer.wait(30)
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(here))
    monkeypatch.setenv("REGROUP_RESUME_FROM", str(there / "step-60.g4-a"))

    def alone() -> tuple[Durable, TrainingState, Origin]:
        mine = TrainingState(*build(seed=1), {})
        durable = Durable(mine, SamplePlan(0, 100, 4, 2, 2))
        return durable, mine, durable.continue_alone()

    begun = checkpointer.imported(str(there / "step-60.g4-a"))
    assert checkpointer.imported(begun.path, begun.commit.fingerprint) == begun
    with pytest.raises(CheckpointError, match=r"was replaced after the job had begun with it"):
        checkpointer.imported(begun.path, "0" * 64)

    durable, mine, origin = alone()
    assert (mine.pair, origin) == (StatePair(0, 60), Origin(1, "alone", 0, 60))
    assert flat(mine.saved_tree()) == flat(state.saved_tree())
    mine.named(StatePair(1, 61), 1)
    durable.save_now(origin, interrupted=lambda: False)
    _, again, origin = alone()
    assert (again.pair, origin.start_step) == (StatePair(1, 61), 61)
