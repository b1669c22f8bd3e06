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
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from harness.polling import until
from regroup.checkpoint import Checkpointer, CheckpointError, ImportMissing, store
from regroup.checkpoint.checkpointer import Origin
from regroup.checkpoint.selection import Name
from regroup.checkpoint.staging import Staging
from regroup.checkpoint.store import marks
from regroup.protocol.document import CheckpointRef
from regroup.protocol.state import StatePair
from tests.builders.checkpoints import LINEAGE, build, flat, make, save, train


def tree_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": {"sched": {"last": 3, "e": {}}}}


def test_checkpoint_restores_model_and_fresh_optimizer(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    tree = tree_of(model, optimizer)
    staging = Staging()
    checkpointer = make(tmp_path, staging=staging)
    assert checkpointer.save(tree, pair=StatePair(1, 60), origin=Origin(2, "abcd-1234-ef", 1, 50), digest="0f")
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
    checkpointer.save(tree, pair=StatePair(1, 3), origin=Origin(1, "a", 0, 0))
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
    assert not checkpointer.save({}, pair=StatePair(1, 11), origin=Origin(1, "x", 0, 0)), "the copies are being written"
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
        assert checkpointer.save(tree, pair=StatePair(1, step), origin=Origin(1, "a", 0, 0))
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


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["given up", "its generation ended"])
def test_model_group_whose_parts_do_not_come_is_a_fault_of_the_volume(tmp_path: Path, is_cancelled: bool) -> None:
    checkpointer = make(tmp_path)
    checkpointer.save(
        {"model": {"w": torch.ones(5)}, "optimizer": {"state": {}}, "state": {}}, pair=StatePair(1, 7),
        origin=Origin(1, "aaaa", 0, 0),
        part=(0, 2), parts_within_s=300 if is_cancelled else 0.01,
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
        make(tmp_path).save({"state": {"f": print}}, pair=StatePair(1, 1), origin=Origin(1, "x", 0, 0))
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
