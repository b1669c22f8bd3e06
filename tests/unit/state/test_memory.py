"""Memory snapshots: complete or absent, whatever happens while one is taken, and what is read back is what was committed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regroup.checkpoint import staging
from regroup.data import SamplePlan
from regroup.errors import StateError
from regroup.layout import Layout
from regroup.protocol import env, local, snapshot
from regroup.protocol.state import StatePair
from regroup.state.memory import Memory
from regroup.state.training import CommitRecord, TrainingState

PLAN = SamplePlan(0, 100, 10, 5, 1)
SPLIT = SamplePlan(0, 96, 12, 2, 4, layout=Layout((("shard", 2),)))


class Process:
    """One trainer process with a memory tier in a directory, and what it has told its agent."""

    def __init__(
        self, *, width: int = 4, local_rank: int = 0, seed: int = 1, plan: SamplePlan = PLAN, inner: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.state = TrainingState(self.model, self.optimizer, {})
        self.told: list[local.Snapshotted] = []
        self.memory = Memory(self.state, plan, self.told.append, local_rank, inner)

    def commit(self, generation: int, step: int) -> None:
        """One step that changes parameters, buffers and the optimizer's state."""
        self.model(torch.randn(8, 4)).pow(2).sum().backward()
        self.state.begin_change()
        self.optimizer.step()
        pair = StatePair(generation, step)
        self.state.committed(CommitRecord(pair, 0.5, 10.0), generation)

    def restore(self) -> snapshot.Snapshot | None:
        """What a generation that continues from its worker's snapshot does; return which one that was."""
        newest = self.memory.newest
        if newest is not None:
            self.memory.restore()
            self.state.named(newest.state, 9)
            self.memory.committed()
        return newest

    def values(self) -> dict[str, Any]:
        structure, tensors = self.state.packed()
        return {"structure": structure, **{name: tensor.clone() for name, tensor in tensors.items()}}


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value, name


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.SNAPSHOT_DIR, str(tmp_path))
    monkeypatch.setenv(env.JOB_UID, "job")
    monkeypatch.delenv(env.SNAPSHOT_BYTES, raising=False)
    return tmp_path


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies begin once this is set."""
    go, fill = threading.Event(), staging.Copy.fill

    def wait_and_fill(copy: staging.Copy, room: staging.Room) -> None:
        assert go.wait(10)
        fill(copy, room)

    monkeypatch.setattr(staging.Copy, "fill", wait_and_fill)
    return go


def held(directory: Path) -> list[StatePair]:
    return [one.state for one in snapshot.held(directory, "job")]


def test_sparse_buffer_that_is_no_part_of_the_state_is_left_alone() -> None:
    process = Process()
    process.model.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    process.commit(1, 1)
    process.memory.take()
    process.memory.settle()
    assert process.memory.step == 1


def test_next_process_continues_from_what_was_committed(directory: Path) -> None:
    first = Process()
    first.commit(3, 7)
    first.memory.take()
    first.memory.settle()
    want = first.values()
    first.commit(3, 8)  # and dies

    second = Process(seed=2)
    newest = second.restore()
    assert_equal(second.values(), want)
    assert newest is not None
    assert (newest.state, newest.adopted, newest.is_last) == ((3, 7), 3, False)
    assert second.state.record is not None
    assert (second.state.record.loss, second.state.record.weight) == (0.5, 10.0)
    assert first.told == [local.Snapshotted(StatePair(3, 7), 3)]
    # The optimizer's state is in memory of its own, not in the slot: the next snapshot must not write into it.
    second.commit(4, 8)
    second.memory.take()
    second.memory.settle()
    assert held(directory) == [(4, 8), (3, 7)]


def test_what_a_forward_changes_is_copied_before_the_next_one(late: threading.Event) -> None:
    """The thread copies late; the next step's forward has moved BatchNorm's statistics by then."""
    first = Process()
    first.commit(1, 1)
    want = first.values()
    first.memory.take()
    first.model(torch.randn(8, 4))
    late.set()
    first.memory.settle()
    second = Process(seed=2)
    second.restore()
    assert_equal(second.values(), want)


def test_a_commit_waits_for_the_copy(late: threading.Event) -> None:
    """Else half of a snapshot would be of the next step."""
    first = Process()
    first.commit(1, 1)
    want = first.values()
    first.memory.take()
    stepped = threading.Thread(target=first.commit, args=(1, 2))
    stepped.start()
    stepped.join(0.2)  # long enough for a commit that does not wait
    assert stepped.is_alive()
    late.set()
    stepped.join(10)
    first.memory.settle()
    second = Process(seed=2)
    second.restore()
    assert_equal(second.values(), want)


def _parameter_outside(process: Process) -> None:
    with torch.no_grad():
        process.model[0].weight.clamp_(-0.1, 0.1)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("disturb", "sentence"),
    [
        pytest.param(
            _parameter_outside, "model.0.weight was changed outside step.commit()", id="the script clamps weights"
        ),
        pytest.param(None, "killed", id="the thread dies in mid-copy"),
    ],
)
def test_incomplete_snapshot_is_absent_and_the_one_before_stays(
    directory: Path, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[Process], None] | None, sentence: str
) -> None:
    process = Process()
    process.commit(1, 1)
    process.memory.take()
    process.memory.settle()
    process.commit(1, 2)
    go = threading.Event()
    fill = staging.Copy.fill

    def late(copy: staging.Copy, room: staging.Room) -> None:
        assert go.wait(10)
        fill(copy, room)
        if disturb is None:
            raise RuntimeError("killed")

    monkeypatch.setattr(staging.Copy, "fill", late)
    process.memory.take()
    assert held(directory) == [(1, 1)]  # also for a process that is killed now
    if disturb is not None:
        disturb(process)
    go.set()
    process.memory.settle()
    assert held(directory) == [(1, 1)]
    assert sentence in (process.memory.problem or "")


def test_last_snapshot_of_a_process_is_no_backup(directory: Path) -> None:
    first = Process()
    first.commit(1, 5)
    first.memory.take_last()
    assert first.told == [local.Snapshotted(StatePair(1, 5), 1, is_last=True)]
    second = Process(seed=2)
    newest = second.restore()
    assert newest is not None
    assert (newest.state, newest.is_last) == ((1, 5), True)
    assert held(directory) == [(1, 5)]


def test_torn_state_is_not_copied_at_the_end(directory: Path) -> None:
    process = Process()
    process.commit(1, 5)
    process.state.begin_change()
    process.memory.take_last()
    assert held(directory) == []


def test_state_that_was_only_read_back_is_not_copied_as_if_it_were_live(directory: Path) -> None:
    """A process that reads a backup and ends before a generation adopts it must not turn it into a witness."""
    first = Process()
    first.commit(1, 5)
    first.memory.take()
    first.memory.settle()
    second = Process(seed=2)
    second.memory.restore()
    second.memory.take_last()
    (only,) = snapshot.held(directory, "job")
    assert not only.is_last


def test_weights_that_were_swapped_for_an_evaluation_are_not_what_the_process_held(directory: Path) -> None:
    """An evaluation with averaged weights raises: what lies in the model then is no committed state."""
    process = Process()
    process.commit(1, 5)
    process.memory.committed()
    process.memory.take()
    process.memory.settle()
    process.commit(1, 6)
    process.memory.committed()
    _parameter_outside(process)
    process.memory.take_last()
    assert held(directory) == [(1, 5)]
    assert "model.0.weight was changed outside step.commit()" in (process.memory.problem or "")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA out of memory"), OSError(24, "Too many open files")],
    ids=["no memory", "no descriptor"],
)
def test_snapshot_that_cannot_be_read_now_is_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    first = Process()
    first.commit(1, 5)
    first.memory.take_last()
    second = Process(seed=2)

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(second.optimizer, "load_state_dict", fails)
        failing.setattr("mmap.mmap", fails if isinstance(error, OSError) else __import__("mmap").mmap)
        with pytest.raises(StateError):
            second.memory.restore()
    assert held(directory) == [(1, 5)]
    assert Process(seed=3).restore() is not None


def test_snapshot_of_another_model_is_refused_once(directory: Path) -> None:
    first = Process()
    first.commit(1, 5)
    first.memory.take_last()
    other = Process(width=5)
    with pytest.raises(StateError, match=r"does not fit this script"):
        other.memory.restore()
    assert other.told == [local.Snapshotted(None)]
    assert Process(width=5).restore() is None
    assert held(directory) == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda d: (d / "a.bin").write_bytes(b""), id="the bytes are gone"),
        pytest.param(
            lambda d: (d / "a.json").write_text((d / "a.json").read_text().replace("float32", "__loader__")),
            id="no type",
        ),
    ],
)
def test_damaged_snapshot_is_one_sentence(directory: Path, damage: Callable[[Path], Any]) -> None:
    first = Process()
    first.commit(1, 5)
    first.memory.take_last()
    damage(directory)
    with pytest.raises(StateError, match=r"The memory snapshot of step 5 is damaged: .*\."):
        Process().memory.restore()
    assert held(directory) == []


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', '{"version": 2, "job": "job", "state": [1, 2]}', "[]"])
def test_description_that_cannot_be_read_is_an_absent_snapshot(directory: Path, text: str) -> None:
    (directory / "a.json").write_text(text)
    process = Process()
    assert process.memory.newest is None
    assert process.memory.step == -1


def test_another_jobs_snapshot_is_absent(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process()
    first.commit(1, 5)
    first.memory.take_last()
    monkeypatch.setenv(env.JOB_UID, "another")
    assert Process().memory.newest is None
    assert held(directory) == [(1, 5)]


def test_too_small_a_limit_is_a_sentence_with_the_size_that_would_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env.SNAPSHOT_BYTES, str(1 << 20))
    process = Process(width=100_000)
    process.commit(1, 1)
    process.memory.take()
    process.memory.take()
    process.memory.settle()
    said = capsys.readouterr().out
    assert said.count("spec.memorySnapshot.sizeLimit is 1 MiB. Raise it to at least ") == 1
    assert process.memory.problem == said.strip()
    assert held(directory) == []
    wanted = int(said.rsplit(" ", 1)[1].removesuffix("Mi.\n"))
    monkeypatch.setenv(env.SNAPSHOT_BYTES, str(wanted << 20))
    again = Process(width=100_000)
    again.commit(1, 1)
    again.memory.take_last()
    assert held(directory) == [(1, 1)]
    assert again.memory.problem == ""


def test_one_process_of_a_worker_copies() -> None:
    process = Process(local_rank=1)
    process.commit(1, 1)
    assert not process.memory.due(1e9)
    process.memory.take()
    process.memory.settle()
    assert (process.told, process.memory.step, process.memory.problem) == ([], None, None)


@pytest.mark.parametrize(
    ("copy_s", "waits_s", "apart_s"),
    [
        pytest.param(2.0, 0.0, 10.0, id="steps are longer than the copy: as was asked for"),
        pytest.param(8.0, 0.0, 16.0, id="a copy that takes long: copies run half of the time at most"),
        pytest.param(2.0, 1.5, 30.0, id="a step waits for the copy: one part in twenty at most"),
    ],
)
def test_snapshots_are_apart_by_the_interval_or_by_what_they_cost(
    monkeypatch: pytest.MonkeyPatch, copy_s: float, waits_s: float, apart_s: float
) -> None:
    monkeypatch.setenv(env.SNAPSHOT_EVERY_SECONDS, "10")
    process = Process()
    process.commit(1, 1)
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    assert process.memory.due(clock[0])
    fill = staging.Copy.fill

    def slow(copy: staging.Copy, room: staging.Room) -> None:
        fill(copy, room)
        copy.waited_s = waits_s
        clock[0] += copy_s

    monkeypatch.setattr(staging.Copy, "fill", slow)
    process.memory.take()
    process.memory.settle()
    assert not process.memory.due(100.0 + apart_s - 0.1)
    assert process.memory.due(100.0 + apart_s + 0.1)


def test_each_step_that_is_hardly_longer_than_the_interval_has_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a step say that a snapshot is due; its copy begins after the commit."""
    monkeypatch.setenv(env.SNAPSHOT_EVERY_SECONDS, "10")
    process = Process()
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for step in range(1, 5):
        assert process.memory.due(clock[0]), step
        clock[0] += 0.5
        process.commit(1, step)
        process.memory.take()
        process.memory.settle()
        assert process.memory.step == step
        assert not process.memory.due(clock[0] + 9.0)
        clock[0] += 9.7


@pytest.mark.parametrize(
    ("copy_s", "waits_s", "why"),
    [
        pytest.param(2.0, 0.0, "a snapshot is taken after a step, once all workers find it due", id="long steps"),
        pytest.param(40.0, 0.0, "a copy takes 40 s, and copies may run for half of the time", id="long copies"),
        pytest.param(2.0, 8.0, "training waits 8 s for a copy, and may do so for a twentieth of the time", id="waits"),
        pytest.param(90.0, 8.0, "a copy takes 90 s, and copies may run for half of the time", id="both"),
    ],
)
def test_why_snapshots_come_late(monkeypatch: pytest.MonkeyPatch, copy_s: float, waits_s: float, why: str) -> None:
    monkeypatch.setenv(env.SNAPSHOT_EVERY_SECONDS, "10")
    process = Process()
    clock, fill = [100.0], staging.Copy.fill
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def slow(copy: staging.Copy, room: staging.Room) -> None:
        fill(copy, room)
        copy.waited_s = waits_s
        clock[0] += copy_s

    monkeypatch.setattr(staging.Copy, "fill", slow)
    for step in range(1, 4):
        process.commit(1, step)
        while not process.memory.due(clock[0]):
            clock[0] += 30.0
        process.memory.take()
        process.memory.settle()
        clock[0] += 30.0
    assert why in (process.memory.late or "")


@pytest.mark.parametrize(
    "restore",
    [
        pytest.param(lambda memory: memory.restore() is None, id="the newest"),
        pytest.param(lambda memory: memory.restore_exactly(1, 1) == (1, 1), id="a certain one"),
    ],
)
def test_what_is_being_copied_is_there_to_be_read_back(
    late: threading.Event, restore: Callable[[Memory], bool]
) -> None:
    process = Process()
    process.commit(1, 1)
    process.memory.take()
    threading.Timer(0.05, late.set).start()
    assert restore(process.memory)


def test_thread_that_cannot_be_started_keeps_no_commit_waiting(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    process.commit(1, 1)

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as failing:
        failing.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            process.memory.take()
    process.commit(1, 2)
    process.memory.take()
    process.memory.settle()
    assert held(directory) == [(1, 2)]


def test_last_copy_sets_nothing_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes any more, and there may be no memory for it."""
    process = Process()
    process.commit(1, 1)
    said: list[bool] = []
    start = process.state.staging.start

    def recorded(tensors: Any, *, changes: bool) -> staging.Copy:
        said.append(changes)
        return start(tensors, changes=changes)

    monkeypatch.setattr(process.state.staging, "start", recorded)
    process.memory.take()
    process.memory.take_last()
    assert said == [True, False]


def test_each_process_copies_its_part_of_a_split_model(directory: Path) -> None:
    processes = [Process(local_rank=rank, plan=SPLIT, inner=rank, seed=rank) for rank in range(2)]
    for process in processes:
        process.commit(1, 1)
        process.memory.take_last()
    assert held(directory) == held(directory / "1") == [(1, 1)]
    again = Process(local_rank=1, plan=SPLIT, inner=1, seed=7)
    again.restore()
    assert_equal(again.values(), processes[1].values())


@pytest.mark.parametrize(("plan", "inner"), [(PLAN, 0), (SPLIT, 1)], ids=["not split", "another part"])
def test_snapshot_of_another_part_is_absent(directory: Path, plan: SamplePlan, inner: int) -> None:
    first = Process(plan=SPLIT)
    first.commit(1, 5)
    first.memory.take_last()
    other = Process(plan=plan, inner=inner)
    assert (other.memory.newest, other.memory.held) == (None, ())
    assert held(directory) == [(1, 5)]


def test_copy_is_not_written_over_a_part_that_the_newest_whole_state_needs() -> None:
    """Another process has no copy of step 2: until it has a newer one, that of step 1 is what all have."""
    process = Process(plan=SPLIT)
    for step in (1, 2, 3):
        process.commit(1, step)
        process.memory.whole_step = None if step == 1 else 1
        process.memory.take()
        process.memory.settle()
    assert process.memory.held == ((1, 3), (1, 1))
    process.commit(1, 4)
    process.memory.take_last()
    assert process.memory.held == ((1, 4), (1, 1))
    process.memory.restore(StatePair(1, 1))
    assert process.state.record is not None
    assert process.state.record.state == (1, 1)
