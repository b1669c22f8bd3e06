"""Copies to host memory: bitwise equal, of the state as it was at the commit, and in an order that a device can keep up with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from regroup.checkpoint import shards, staging, store
from regroup.checkpoint.checkpointer import Checkpointer, Origin
from regroup.checkpoint.staging import Copy, Staging, pieces
from regroup.protocol.state import StatePair
from regroup.state.training import TrainingState

CPU = torch.device("cpu")
SMALL = 1024
"""Bytes of a buffer here."""


class Delayed(torch.Tensor):
    """A pinned buffer: what is copied to it without blocking arrives when the device is waited for, and not before."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.copy_ and isinstance(args[0], Delayed) and kwargs.pop("non_blocking", False):
            FakeDevice.now.enqueue(args[0].as_subclass(torch.Tensor), args[1])
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class FakeDevice:
    """Runs what is enqueued on its copying stream only when that is waited for, as late as a real one may; records the order."""

    now: FakeDevice

    def __init__(self) -> None:
        FakeDevice.now = self
        self.events: list[str] = []
        self._queue: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._marks = count()
        self._in_stream = False
        self._buffers: list[torch.Tensor] = []

    def mark(self) -> int:
        number = next(self._marks)
        self.events.append(f"mark {number} on {'own' if self._in_stream else 'compute'}")
        return number

    @contextmanager
    def behind(self, mark: int) -> Iterator[None]:
        self.events.append(f"own stream waits for {mark}")
        self._in_stream = True
        yield
        assert not self._queue, "the copy is over, and the device still reads"
        self._in_stream = False

    def wait(self, mark: int) -> None:
        self.events.append(f"host waits for {mark}")
        while self._queue and self._queue[0][0] < mark + 1:
            _, tensor, staged = self._queue.pop(0)
            staged.copy_(tensor)

    def buffers(self) -> Sequence[torch.Tensor]:
        if not self._buffers:
            self.events.append("allocates")
            for _ in range(staging.NUM_BUFFERS):
                self._buffers.append(torch.zeros(SMALL, dtype=torch.uint8).as_subclass(Delayed))
        return self._buffers

    def enqueue(self, staged: torch.Tensor, tensor: torch.Tensor) -> None:
        assert self._in_stream
        number = next(self._marks)
        self.events.append(f"reads {tensor.nbytes} as {number}")
        self._queue.append((number, tensor, staged))


def to_memory(into: dict[str, torch.Tensor]) -> staging.Room:
    def room(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        into.update({name: torch.empty(one.shape, dtype=one.dtype) for name, one in tensors.items()})
        return into

    return room


def all_kinds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(40, 30, generator=generator)
    return {
        "large": torch.randn(3000, generator=generator),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "half": values.bfloat16(),
        "transposed": values.t(),
        "channels last": torch.randn(2, 6, 9, 9, generator=generator).to(memory_format=torch.channels_last),
        "one long row": values.reshape(1, -1).expand(2, -1)[:1],
        "every second": torch.arange(2000)[::2],
        "bits": values > 0,
        "complex": torch.complex(values, values).conj(),
        "flags": values[0, :3] > 0,
        **{f"step {i}": torch.tensor(float(i)) for i in range(30)},
    }


@pytest.mark.parametrize("device", [None, FakeDevice], ids=["cpu", "a device"])
def test_copy_has_every_bit_whatever_type_and_order_in_memory(device: Callable[[], FakeDevice] | None) -> None:
    wanted, got = all_kinds(), dict[str, torch.Tensor]()
    copy = Staging(make_engine=lambda _: device() if device else None).start(wanted)
    copy.fill(to_memory(got))
    assert copy.changed is None
    assert got.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(got[name], one), name
        assert got[name].is_contiguous()


def test_device_fills_one_buffer_while_the_host_empties_the_other_and_each_is_emptied_before_it_is_filled_again() -> (
    None
):
    device = FakeDevice()
    begun = Staging(make_engine=lambda _: device)
    copy = begun.start({"a": torch.zeros(SMALL), "b": torch.zeros(2)})
    assert device.events == ["mark 0 on compute"], "nothing is read before the thread begins"
    copy.fill(to_memory({}))
    assert device.events[1:] == [
        "own stream waits for 0",
        "allocates",
        "reads 1024 as 1",
        "mark 2 on own",
        "reads 1024 as 3",
        "mark 4 on own",
        "host waits for 2",
        "reads 1024 as 5",
        "mark 6 on own",
        "host waits for 4",
        "reads 1024 as 7",
        "mark 8 on own",
        "host waits for 6",
        "reads 8 as 9",
        "mark 10 on own",
        "host waits for 8",
        "host waits for 10",
    ]
    device.events.clear()
    begun.start({"other": torch.zeros(3)}).fill(to_memory({}))
    assert "allocates" not in device.events, "sizes change, and the buffers stay"


def test_small_tensors_travel_together() -> None:
    device = FakeDevice()
    Staging(make_engine=lambda _: device).start({str(i): torch.tensor(1.0) for i in range(40)}).fill(to_memory({}))
    assert [event for event in device.events if event.startswith("mark")] == [
        "mark 0 on compute", "mark 17 on own", "mark 34 on own", "mark 43 on own",
    ], "16 fit into a buffer"  # fmt: skip


@pytest.mark.parametrize("device", [None, FakeDevice], ids=["cpu", "a device"])
def test_next_commit_changes_nothing_before_the_copy_has_read_it(device: Callable[[], FakeDevice] | None) -> None:
    begun = Staging(make_engine=lambda _: device() if device else None)
    weights, got, go = torch.ones(3000), dict[str, torch.Tensor](), threading.Event()

    def room(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        assert go.wait(10)
        return to_memory(got)(tensors)

    copy = begun.start({"w": weights})
    thread = threading.Thread(target=copy.fill, args=(room,))
    thread.start()

    def commit() -> None:
        begun.settle()
        weights.add_(1.0)

    stepped = threading.Thread(target=commit)
    stepped.start()
    stepped.join(0.1)  # long enough for a commit that does not wait
    assert stepped.is_alive()
    go.set()
    stepped.join(10)
    thread.join(10)
    assert torch.equal(got["w"], torch.ones(3000))
    assert copy.changed is None
    assert copy.waited_s >= 0.05


class Split:
    """A DTensor, as far as it is asked here. It has an address of its own."""

    layout = torch.strided

    def __init__(self, local: torch.Tensor) -> None:
        self._local_tensor = local

    def data_ptr(self) -> int:
        return 0


@pytest.mark.parametrize("registered", [lambda one: one, Split], ids=["whole", "of a model that is split"])
def test_what_a_forward_changes_is_set_aside_at_the_commit(
    monkeypatch: pytest.MonkeyPatch, registered: Callable[[torch.Tensor], Any]
) -> None:
    monkeypatch.setattr(shards, "is_split", lambda one: isinstance(one, Split))
    buffer, got = torch.zeros(4), dict[str, torch.Tensor]()
    copy = Staging(lambda: [registered(buffer)]).start({"running_mean": buffer})
    buffer.add_(1.0)
    copy.fill(to_memory(got))
    assert (copy.changed, got["running_mean"].tolist()) == (None, [0.0] * 4)


def test_nothing_is_set_aside_where_this_process_changes_nothing_more() -> None:
    """A process that ends may have no memory left for a second copy."""
    buffer = torch.zeros(4)
    copy = Staging(lambda: [buffer]).start({"running_mean": buffer}, changes=False)
    assert copy._tensors["running_mean"] is buffer
    copy.abandon()


def test_commit_waits_for_each_copy_that_has_begun() -> None:
    """A snapshot and a checkpoint of one commit."""
    begun, weight = Staging(), torch.ones(3)
    first, second = begun.start({"w": weight}), begun.start({"w": weight})
    second.fill(to_memory({}))
    settled = threading.Thread(target=begun.settle)
    settled.start()
    settled.join(0.05)  # long enough for one that does not wait
    assert settled.is_alive()
    first.abandon()
    settled.join(10)
    assert not settled.is_alive()


def test_copies_go_through_the_buffers_one_after_the_other() -> None:
    """They share them: of two at once, one would find the bytes of the other."""
    device, waits, go, got = (
        FakeDevice(),
        threading.Event(),
        threading.Event(),
        [dict[str, torch.Tensor]() for _ in "ab"],
    )
    wait = device.wait

    def late(mark: int) -> None:
        waits.set()
        assert go.wait(10)
        wait(mark)

    device.wait = late  # type: ignore[method-assign]
    begun = Staging(make_engine=lambda _: device)
    copies = [begun.start({"w": torch.full((3,), float(i))}) for i in range(2)]
    threads = [threading.Thread(target=copy.fill, args=(to_memory(into),)) for copy, into in zip(copies, got)]
    threads[0].start()
    assert waits.wait(10)
    threads[1].start()
    threads[1].join(0.05)  # long enough for one that does not wait
    assert len([event for event in device.events if event.startswith("reads")]) == 1
    go.set()
    for thread in threads:
        thread.join(10)
    assert [into["w"].tolist() for into in got] == [[0.0] * 3, [1.0] * 3]


def test_change_in_between_is_named_and_inference_tensors_have_none_to_see() -> None:
    with torch.inference_mode():
        fixed = torch.ones(2)
    weight = torch.zeros(2)
    copy = Staging().start({"fixed": fixed, "weight": weight})
    weight.add_(1.0)
    copy.fill(to_memory({}))
    assert copy.changed == "weight"


@pytest.mark.parametrize("end", ["no room", "no thread"])
def test_copy_that_fails_keeps_no_commit_waiting(end: str) -> None:
    begun = Staging()
    copy = begun.start({"w": torch.ones(3)})
    if end == "no thread":
        copy.abandon()
    else:
        with pytest.raises(OSError, match="full"):
            copy.fill(lambda _: (_ for _ in ()).throw(OSError("full")))
    begun.settle()


@pytest.mark.parametrize("size", [1, 64, 1000])
def test_pieces_cover_a_tensor_once(size: int) -> None:
    tensor = torch.arange(7 * 5 * 3).view(7, 5, 3).permute(2, 0, 1)
    place = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for piece, there in pieces([(tensor, place)], size):
        assert piece.nbytes <= max(size, tensor.element_size())
        assert int(there.sum()) == 0
        there.copy_(piece + 1)
    assert torch.equal(place, tensor + 1)


# --- checkpoints --------------------------------------------------------------------------------------------------------


class Trained:
    """A process that writes checkpoints, and a gate that its copies wait for."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.state = TrainingState(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), {})
        self.checkpointer = Checkpointer(str(directory), 60, "job", self.state.staging)
        self.go, fill = threading.Event(), Copy.fill

        def late(copy: Copy, room: staging.Room) -> None:
            assert self.go.wait(10)
            fill(copy, room)

        monkeypatch.setattr(Copy, "fill", late)

    def save(self, step: int) -> None:
        pair = StatePair(1, step)
        tree = self.state.saved_tree()
        assert self.checkpointer.save(tree, pair=pair, origin=Origin(1, "a", 0, 0))

    def saved_weight(self, step: int) -> torch.Tensor:
        assert self.checkpointer.wait(30)
        weight = self.checkpointer.load(self.checkpointer.info_of(f"step-{step}.g1-a"))["model"]["weight"]
        assert isinstance(weight, torch.Tensor)
        return weight


def test_checkpoint_is_of_the_committed_state_although_it_is_copied_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Trained(tmp_path, monkeypatch)
    want = process.model.weight.detach().clone()
    process.save(1)  # returns before anything is copied
    threading.Timer(0.05, process.go.set).start()
    process.state.begin_change()
    with torch.no_grad():
        process.model.weight.add_(1.0)
    assert torch.equal(process.saved_weight(1), want)


def test_script_that_changes_weights_between_commits_gets_its_checkpoint_and_is_told_that_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Trained(tmp_path, monkeypatch)
    process.save(1)
    with torch.no_grad():
        process.model.weight.clamp_(-0.1, 0.1)
    process.go.set()
    assert process.checkpointer.wait(30)
    assert "training waits for each copy from now on: model.weight was changed outside step.commit()" in (
        process.checkpointer.problem or ""
    )
    assert (process.checkpointer.failure, list(tmp_path.iterdir())) == (None, [])
    assert process.checkpointer.due(0.0), "at once, whatever the interval"
    want = process.model.weight.detach().clone()
    process.go.clear()
    threading.Timer(0.05, process.go.set).start()
    process.save(2)  # returns with the copy
    with torch.no_grad():
        process.model.weight.add_(1.0)
    assert torch.equal(process.saved_weight(2), want)
    assert process.checkpointer.problem is None


def test_state_that_cannot_be_copied_is_not_laid_to_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Trained(tmp_path, monkeypatch)

    def fails(copy: Copy, _: staging.Room) -> None:
        copy.abandon()
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(Copy, "fill", fails)
    process.save(1)
    assert process.checkpointer.wait(30)
    problem = process.checkpointer.problem or ""
    assert "step-1.g1-a was not written: the state could not be copied to host memory" in problem
    assert "can't allocate memory" in problem
    assert "volume" not in problem
    assert process.checkpointer.failure == problem


def test_volume_that_hangs_keeps_no_commit_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Trained(tmp_path, monkeypatch)
    process.go.set()
    answers = threading.Event()

    def hangs(_: Path) -> Any:
        assert answers.wait(10)
        return [], []

    monkeypatch.setattr("regroup.checkpoint.store.names", hangs)
    process.save(1)
    process.state.begin_change()
    assert process.checkpointer.busy
    answers.set()
    assert process.checkpointer.wait(30)


def test_commit_does_not_wait_for_a_write_that_waits_for_that_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread is at step 1 until step 2 is acknowledged. The copy of step 2 must not wait for that thread."""
    process, acknowledged, asked = Trained(tmp_path, monkeypatch), threading.Event(), threading.Event()
    process.go.set()

    def is_acknowledged() -> bool:
        asked.set()
        return acknowledged.is_set()

    for step in (1, 2):
        assert process.checkpointer.save(
            process.state.saved_tree(), pair=StatePair(1, step), origin=Origin(1, "a", 0, 0),
            acknowledged=is_acknowledged,
        )  # fmt: skip
        assert asked.wait(10), "the data of step 1 is durable"
        settled = threading.Thread(target=process.state.begin_change, daemon=True)
        settled.start()
        settled.join(10)
        assert not settled.is_alive()
    acknowledged.set()
    assert process.checkpointer.wait(30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1.g1-a", "step-2.g1-a"]


def test_write_that_was_cancelled_keeps_no_later_one_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model group the others write their parts of the later one, and would wait for this process's."""
    process, writes, may_go = Trained(tmp_path, monkeypatch), threading.Event(), threading.Event()
    process.go.set()
    write_data, written = store.write_data, list[torch.Tensor]()

    def slow(*arguments: Any) -> Path:
        writes.set()
        assert may_go.wait(10)
        written.append(arguments[-1]["model.weight"].clone())
        return write_data(*arguments)

    monkeypatch.setattr(store, "write_data", slow)
    process.save(1)
    assert writes.wait(10)
    process.checkpointer.cancel()
    process.state.begin_change()
    before = process.model.weight.detach().clone()
    with torch.no_grad():
        process.model.weight.add_(1.0)
    want = process.model.weight.detach().clone()
    process.save(2)
    process.state.begin_change()
    may_go.set()
    assert torch.equal(process.saved_weight(2), want)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2.g1-a"], "nobody will commit on the first state"
    assert torch.equal(written[0], before), (
        "a model group's writer may commit the part still, if it was cancelled later"
    )


def test_thread_that_cannot_be_started_keeps_no_commit_and_no_checkpoint_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Trained(tmp_path, monkeypatch)
    process.go.set()

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as failing:
        failing.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            process.save(1)
    process.state.begin_change()
    process.save(2)
    assert torch.equal(process.saved_weight(2), process.model.weight)
