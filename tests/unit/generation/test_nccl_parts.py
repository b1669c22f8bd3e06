"""Parts of a generation on a GPU: a communicator for each, and what is waited for by the GPU only.

The backends are fakes that behave as the real one was seen to (`fake_nccl`).
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions

from harness.polling import until
from regroup.data import SamplePlan
from regroup.errors import Aborted, PeerLost, UsageError
from regroup.generation import backends, edges, living, nccl
from regroup.generation.edges import Edges
from regroup.generation.groups import Groups, Part
from regroup.generation.living import LivingGroup
from regroup.layout import Layout
from regroup.parallel.ddp import DataParallel

from .fake_nccl import FakeNccl
from .nccl_kit import SOON_S, Connecting, Waiting, Watcher, make_groups, make_regrouper, remote
from .test_outcomes import LOST, Lost

META = torch.device("meta")
"""In place of the GPU: its tensors can be made on any machine."""


@pytest.fixture(autouse=True)
def none_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {**nccl.OURS, **nccl.DEFAULTS}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nccl, "first_tensor", lambda _device: torch.zeros(1))
    yield
    backends.wait_ended(timeout_s=SOON_S)
    assert not backends._ending, "a test leaves one behind that the next test would wait for"


def add_part(groups: Groups, name: str, *ranks: int) -> Part:
    groups._parts[name] = Part(groups, name, ranks, FakeNccl().backend())
    return groups._parts[name]


def with_parts(*fakes: FakeNccl) -> Groups:
    """Return connected groups: the first communicator is that of all ranks, the others are of parts."""
    groups = make_groups()
    groups._nccl = {str(i) if i else "": fake.backend() for i, fake in enumerate(fakes)}
    return groups


# --- connecting --------------------------------------------------------------------------------------------------------


def test_parts_are_connected_one_after_the_other_in_the_order_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are in different parts. Two that waited for each other in different ones would wait for ever."""
    opened: list[tuple[int, int, FakeNccl]] = []

    def open_backend(store: Any, rank: int, size: int) -> Any:
        assert all(one.works[0].ended.is_set() for _, of, one in opened if of > 1), "the one before is connected"
        opened.append((rank, size, FakeNccl()))
        return opened[-1][2].backend(store)

    monkeypatch.setattr(nccl, "open_backend", open_backend)
    groups = make_groups(ranks=3)
    add_part(groups, "across ", 0, 2)
    add_part(groups, "alone", 0)
    add_part(groups, "gradients of stages 0 and 1", 1, 0)
    connecting = Connecting(groups)
    for _ in range(3):
        until(lambda: any(one.works and not one.works[-1].ended.is_set() for *_, one in opened), "the next one begins")
        opened[-1][2].works[0].ended.set()
    assert connecting.end() is None
    # Of a part of one rank torch makes a communicator when a collective is called there.
    assert [one[:2] for one in opened] == [(0, 1), (0, 3), (0, 2), (1, 2)]
    assert [len(one.works) for *_, one in opened] == [0, 1, 1, 1]
    names = ["alone", "", "across ", "gradients of stages 0 and 1"]
    assert list(groups._nccl) == names
    assert groups.part("across ").nccl is groups.nccl_of("across ") is not groups.nccl
    groups.close()


def test_several_communicators_form_when_no_older_one_is_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two parts each a generation has three communicators."""
    fakes: list[FakeNccl] = []

    def open_backend(store: Any, *_: int) -> Any:
        fakes.append(FakeNccl())
        return fakes[-1].backend(store)

    monkeypatch.setattr(nccl, "open_backend", open_backend)
    old = [FakeNccl(abort_ends=False) for _ in range(3)]
    with_parts(*old).abort()
    for one in old:
        assert one.abort_began.wait(SOON_S)
    groups = make_groups()
    add_part(groups, "a", 0, 1)
    add_part(groups, "b", 0, 1)
    connecting = Connecting(groups)
    until(lambda: len(backends._one_less._waiters) > 0, "the helper waits")  # type: ignore[attr-defined]
    assert fakes == []
    for one in old[:-1]:
        one.abort_ends.set()
    until(lambda: len(backends._ending) == 1, "all but one have ended")
    assert fakes == [], "one alone is waited for, too"
    old[-1].abort_ends.set()
    for number in range(3):
        until(
            lambda number=number: len(fakes) > number and fakes[number].works,  # type: ignore[misc]
            "the next one begins",
            timeout_s=SOON_S,
        )
        fakes[number].works[0].ended.set()
    assert connecting.end() is None
    groups.close()
    for one in old:
        one.abort_ends.set()


def test_tensor_of_a_first_collective_lives_until_the_gpu_no_longer_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, before = FakeNccl(abort_ends=False), {*threading.enumerate()}  # another test may have left a helper
    monkeypatch.setattr(nccl, "open_backend", lambda store, *_: fake.backend(store))
    tensors = [torch.zeros(1)]
    monkeypatch.setattr(nccl, "first_tensor", lambda _device: tensors[0])
    groups = make_groups()
    connecting = Connecting(groups)
    until(lambda: fake.works and fake.works[0].asked.is_set(), "the first collective is waited for")
    tensor = weakref.ref(tensors.pop())
    groups.close()
    assert isinstance(connecting.end(), Aborted)
    until(lambda: not any(t.name == "regroup-connect" for t in {*threading.enumerate()} - before), "the helper ends")
    del groups, connecting
    gc.collect()
    assert tensor() is not None
    fake.abort_ends.set()
    until(lambda: gc.collect() >= 0 and tensor() is None, "it is let go")


# --- the end -----------------------------------------------------------------------------------------------------------


def test_abort_reaches_all_communicators_although_one_does_not_end() -> None:
    """An abort frees memory of the GPU, and that waits for the collectives of all the others."""
    fakes = [FakeNccl(), FakeNccl(abort_ends=False), FakeNccl()]
    groups = with_parts(*fakes)
    groups.abort()
    for fake in fakes:
        assert fake.abort_began.wait(SOON_S)
    assert groups.aborted
    fakes[1].abort_ends.set()


def nothing(_groups: Groups) -> None:
    pass


def ordered(groups: Groups) -> None:
    groups.order([groups.start(groups._nccl["1"], "allreduce", [torch.ones(1)])])


def given_up(groups: Groups) -> None:
    groups.start(groups._nccl["1"], "allreduce", [torch.ones(1)])


@pytest.mark.parametrize(
    ("before", "shut_down_in", "aborted_in"),
    [
        pytest.param(nothing, "regroup-end", "", id="all end in order"),
        pytest.param(ordered, "regroup-end", "", id="after a collective that the GPU waits for, too: NCCL finishes it"),
        pytest.param(given_up, "", "regroup-abort", id="nobody waits for a collective inside a part"),
    ],
)
def test_planned_change_ends_all_communicators_alike(
    before: Callable[[Groups], None], shut_down_in: str, aborted_in: str
) -> None:
    fakes = [FakeNccl(), FakeNccl()]
    groups = with_parts(*fakes)
    before(groups)
    groups.end_in_order()
    groups.close()
    backends.wait_ended(timeout_s=SOON_S)
    assert [(fake.shut_down_in, fake.aborted_in) for fake in fakes] == [(shut_down_in, aborted_in)] * 2


# --- who waits ---------------------------------------------------------------------------------------------------------


def test_gpu_waits_for_what_is_ordered_and_the_host_does_not() -> None:
    fakes = [FakeNccl(), FakeNccl()]
    groups = with_parts(*fakes)
    other = groups.start(groups._nccl[""], "allreduce", [torch.ones(1)])
    groups.order([groups.start(groups._nccl["1"], "allreduce", [torch.ones(1)])])
    work = fakes[1].works[0]
    assert work.seen_by_stream
    assert not any(one.asked.is_set() for one in (work, fakes[0].works[0])), "it comes hundreds of times in a step"
    assert list(groups._on_device.values()) == [other.work], (
        "what is let go now is used again after the collective only"
    )


def test_collective_that_is_given_up_keeps_its_tensors_until_it_has_ended() -> None:
    """A step that is cut off between the start and the wait. torch would let them go, and the GPU still writes there."""
    fakes = [FakeNccl(), FakeNccl()]
    groups = with_parts(*fakes)
    group = bound(groups, "1")
    group.allreduce([torch.ones(1, device=META)])
    gc.collect()
    assert [id(work) for work in groups._on_device.values()] == [id(work) for work in fakes[1].works]
    fakes[1].works[0].ended.set()
    groups.forget_ended()
    assert groups._on_device == {}
    groups.close()


def ends(_fake: FakeNccl, work: Any) -> None:
    work.ended.set()


@pytest.mark.parametrize(
    ("happens", "outcome"),
    [
        pytest.param(ends, None, id="it ends"),
        pytest.param(remote, PeerLost, id="NCCL has an error"),
    ],
)
def test_commit_waits_for_what_the_gpu_has_been_left_with(
    happens: Callable[[FakeNccl, Any], None], outcome: type[Exception] | None
) -> None:
    """One model group has nobody to sum with: nothing else would say that a collective inside it failed."""
    fakes = [FakeNccl(), FakeNccl()]
    groups = with_parts(*fakes)
    groups.order([groups.start(groups._nccl["1"], "allreduce", [torch.ones(1)])])
    waiting = Waiting(groups, for_all=True)
    assert fakes[1].works[0].asked.wait(SOON_S)
    assert waiting.outcome == []
    happens(fakes[1], fakes[1].works[0])
    error = waiting.end()
    assert error is None if outcome is None else isinstance(error, outcome)
    if outcome is None:
        groups.wait_all([])  # once is enough
        assert groups._ordered == {}
    groups.close()


@pytest.mark.parametrize(("size", "asked"), [(2, 1), (1, 0)], ids=["the only model group", "no mesh"])
def test_step_of_one_model_group_waits_for_what_was_computed_inside_it(size: int, asked: int) -> None:
    """It sums with nobody. Without that wait its row would be sent with whatever the GPU has by then."""
    log: list[str] = []
    alone = SimpleNamespace(world_size=1, ranks=(0,))
    groups: Any = SimpleNamespace(
        world_size=2,
        rank=0,
        part=lambda _name: alone,
        wait_all=lambda _pending: log.append("waits"),
        launch=lambda *_, **__: None,
    )
    model = torch.nn.Linear(2, 2)
    plan = SamplePlan(0, 64, 8, 2, 2, Layout.of({"tensor": size}))
    strategy = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    strategy.begin_generation(groups)
    strategy._wait()
    assert len(log) == asked


def test_lost_connection_ends_the_wait_for_what_the_gpu_has_been_left_with() -> None:
    groups = with_parts(FakeNccl(), FakeNccl())
    groups.order([groups.start(groups._nccl["1"], "allreduce", [torch.ones(1)])])
    groups.sockets = Lost(LOST)  # type: ignore[assignment]
    assert isinstance(Waiting(groups, for_all=True).end(), PeerLost)
    groups.close()


# --- torch's groups inside a model group -------------------------------------------------------------------------------


class Target:
    """In place of torch's ProcessGroup around a backend."""

    def __init__(self, backend: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.backend = backend
        self.returns_work = True

    def __getattr__(self, kind: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((kind, (*arguments, *options.values())))
            return self.backend.launch("allreduce", []) if self.returns_work else None

        return call


@pytest.fixture(autouse=True)
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "serves", lambda device: device.type in ("cuda", "meta"))


def bound(groups: Groups, part: str) -> LivingGroup:
    """Return one of torch's groups, bound to a part of a generation."""
    add_part(groups, part, 0, 1)
    group = LivingGroup(part, (0, 1), 0)
    group._serve = lambda _type, backend, _groups=None: Target(backend)  # type: ignore[assignment, method-assign]
    group.bind(groups, groups.part(part))
    return group


@pytest.fixture
def group() -> Iterator[LivingGroup]:
    """One of torch's groups, bound to a part of a generation on a GPU."""
    groups = with_parts(FakeNccl(), FakeNccl())
    yield bound(groups, "1")
    groups.close()


def test_collective_goes_by_the_backend_of_its_tensors(group: LivingGroup) -> None:
    here, there = torch.ones(2), torch.ones(2, device=META)
    group.allreduce([here])
    group.allreduce([there])
    group.allgather([[there, there]], [there])
    group._allgather_base(output=there, input=there)
    group.broadcast([here])
    assert [kind for kind, _ in group._target.calls] == ["allreduce", "broadcast"]
    assert [kind for kind, _ in group._on_gpu.calls] == ["allreduce", "allgather", "_allgather_base"]


def test_wait_for_a_collective_on_the_gpu_does_not_hold_the_host(group: LivingGroup) -> None:
    """It may depend on one that this host has not started yet."""
    fake = group._nccl._raw
    assert group.allreduce([torch.ones(2, device=META)]).wait()
    assert fake.works[0].seen_by_stream
    assert not fake.works[0].ended.is_set()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_host_waits_for_numbers_that_a_model_may_use_as_places(group: LivingGroup, dtype: torch.dtype) -> None:
    """An abort leaves anything in them, and the GPU fails for good at a place that does not exist."""
    fake = group._nccl._raw
    work = group.alltoall_base(torch.ones(2, dtype=dtype, device=META), torch.ones(2, dtype=dtype, device=META), [], [])
    outcome: list[Any] = []
    waiting = threading.Thread(target=lambda: outcome.append(work.wait()), daemon=True)
    waiting.start()
    assert fake.works[0].asked.wait(SOON_S)
    assert outcome == []
    fake.works[0].ended.set()
    waiting.join(SOON_S)
    assert outcome == [True]


def test_bytes_and_flags_are_waited_for_by_the_gpu(group: LivingGroup) -> None:
    """FSDP2 gathers parameters of several types as bytes."""
    assert group.allreduce([torch.ones(2, dtype=torch.uint8, device=META)]).wait()
    assert group.allreduce([torch.ones(2, dtype=torch.bool, device=META)]).wait()


def test_barrier_holds_the_host_whatever_device_it_names(group: LivingGroup) -> None:
    options = BarrierOptions()
    options.device = META
    work = group.barrier(opts=options)
    assert isinstance(work, living._Sliced)
    assert not isinstance(work, living._Ordered)
    ((kind, (given,)),) = group._target.calls
    assert (kind, given.device.type) == ("barrier", "cpu")
    assert group._on_gpu.calls == []


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("_reduce_scatter_base", lambda one: (one, one)),
        ("reduce_scatter_single", lambda one: (one, one)),
        ("reduce_scatter_tensor_coalesced", lambda one: ([one], [one])),
        ("reduce_scatter", lambda one: ([one], [[one, one]])),
    ],
)
def test_reduce_scatter_is_nccls_own(
    group: LivingGroup, kind: str, arguments: Callable[[torch.Tensor], tuple[Any, ...]]
) -> None:
    work = getattr(group, kind)(*arguments(torch.ones(2, device=META)))
    assert [called for called, _ in group._on_gpu.calls] == [kind]
    assert work.wait()
    getattr(group, kind)(*arguments(torch.ones(2)))
    assert [called for called, _ in group._target.calls] == ["allreduce"], "of gloo no wait for its own would end"


def test_coalesced_collectives_have_one_work_at_their_end(group: LivingGroup) -> None:
    group._start_coalescing(META)
    group._on_gpu.returns_work = False
    assert group.allreduce([torch.ones(2, device=META)]) is None
    group._on_gpu.returns_work = True
    assert group._end_coalescing(META).wait()
    assert [kind for kind, _ in group._on_gpu.calls] == ["_start_coalescing", "allreduce", "_end_coalescing"]
    assert group._target.calls == []


def test_collective_of_a_generation_that_has_ended_is_not_started(group: LivingGroup) -> None:
    work = group.allreduce([torch.ones(2, device=META)])
    assert group._groups is not None
    group._groups.abort()
    with pytest.raises(Aborted):
        work.wait()
    with pytest.raises(Aborted):
        group.allreduce([torch.ones(2, device=META)])


# --- an error of the script after an abort -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "size", "aborted", "named", "explained"),
    [
        pytest.param(
            AssertionError("the loss is nan"), 2, True, True, True, id="its own check of what an abort has left"
        ),
        pytest.param(RuntimeError("negative dimension"), 2, True, True, True, id="a size that an abort has left"),
        pytest.param(AssertionError("the loss is nan"), 2, False, True, False, id="nothing was aborted"),
        pytest.param(
            AssertionError("the loss is nan"), 1, True, True, False, id="nothing is computed from a collective"
        ),
        pytest.param(AssertionError("a hook"), 2, True, False, False, id="the step was being applied"),
        pytest.param(KeyboardInterrupt(), 2, True, True, False, id="a signal"),
    ],
)
def test_error_that_may_come_of_what_an_abort_has_left(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, size: int, aborted: bool, named: bool, explained: bool
) -> None:
    monkeypatch.setattr(nccl, "serves", lambda device: device.type == "cuda")
    regrouper = make_regrouper(Watcher())
    monkeypatch.setattr(regrouper, "_plan", SimpleNamespace(layout=Layout.of({"tensor": size})))
    monkeypatch.setattr(regrouper, "_state", SimpleNamespace(pair=(1, 2) if named else None))
    regrouper.groups = make_groups(FakeNccl())
    if aborted:
        regrouper.groups.abort()
    assert regrouper.explains(error) is explained
    if regrouper.groups is not None:
        regrouper.groups.close()


# --- the edges of a pipeline -------------------------------------------------------------------------------------------


class Wire:
    """A part of two ranks, as far as an edge goes. `log`: what was started and waited for, in order."""

    def __init__(self, rank: int, *, on_gpu: bool = True) -> None:
        self.rank, self.device = rank, META if on_gpu else torch.device("cpu")
        self.nccl = object() if on_gpu else None
        self.header = torch.zeros(edges.HEADER, dtype=torch.int64)
        self.log: list[tuple[str, Any]] = []
        self.ended = False

    def part(self, _name: str) -> Wire:
        return self

    def launch(self, method: str, tensors: list[torch.Tensor], options: Any, *, control: bool) -> Any:
        assert method == "broadcast"
        (tensor,) = tensors
        if control and options.rootRank != self.rank:
            tensor.copy_(self.header)
        way = "gloo" if control or self.nccl is None else "nccl"
        self.log.append(("sends" if options.rootRank == self.rank else "receives", (way, tensor.dtype)))
        return SimpleNamespace(work=tensor.dtype)

    def wait(self, pending: list[Any]) -> None:
        self.log += [("host waits", one.work) for one in pending]

    def order(self, pending: list[Any]) -> None:
        self.log += [("gpu waits", one.work) for one in pending]

    def is_completed(self, _work: Any) -> bool:
        return self.ended

    def forget_ended(self) -> None:
        self.log.append(("forgets", None))


def test_headers_go_by_gloo_and_tensors_by_nccl() -> None:
    wire = Wire(0)
    Edges(wire).send(0, [torch.ones(2, device=META), torch.ones(3, dtype=torch.int64, device=META)])  # type: ignore[arg-type]
    assert [one for one in wire.log if one[0] == "sends"] == [
        ("sends", ("gloo", torch.int64)),
        ("sends", ("nccl", torch.float32)),
        ("sends", ("nccl", torch.int64)),
    ]


def test_what_is_received_is_waited_for_by_the_gpu_but_for_places() -> None:
    wire = Wire(1)
    sent = [torch.ones(3, dtype=torch.int64, device=META), torch.ones(2, device=META, requires_grad=True)]
    wire.header = edges.header_of(sent, META)
    ends_ = Edges(wire)  # type: ignore[arg-type]
    ends_.expect(0)
    received = ends_.receive(0)
    assert [(one.dtype, one.shape, one.device) for one in received] == [(one.dtype, one.shape, META) for one in sent]
    assert wire.log == [
        ("receives", ("gloo", torch.int64)),
        ("host waits", torch.int64),
        ("receives", ("nccl", torch.int64)),
        ("receives", ("nccl", torch.float32)),
        ("gpu waits", torch.float32),
        ("host waits", torch.int64),
    ]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_gradients_are_received_by_nccl_when_they_are_needed(on_gpu: bool) -> None:
    """Its kernel would occupy a part of the GPU until they come."""
    wire = Wire(0, on_gpu=on_gpu)
    coming = Edges(wire).expect_gradients(0, [torch.ones(2, device=wire.device)])  # type: ignore[arg-type]
    begun = list(wire.log)
    (gradient,) = coming.wait()
    way = "nccl" if on_gpu else "gloo"
    assert begun == ([] if on_gpu else [("receives", (way, torch.float32))])
    assert wire.log == [("receives", (way, torch.float32)), ("gpu waits", torch.float32)]
    assert (gradient.shape, gradient.device) == (torch.Size([2]), wire.device)


def test_stage_that_only_sends_holds_no_more_than_what_is_on_its_way() -> None:
    """The first one receives no headers, so it waits for nobody before the step's end."""
    fakes = [FakeNccl(), FakeNccl()]
    groups = with_parts(*fakes)
    groups._parts["gradients of stages 0 and 1"] = Part(groups, "1", (0, 1), FakeNccl().backend())
    sender = Edges(groups)
    for _ in range(3):
        sender.send_gradients(0, [torch.ones(2)])
        fakes[1].works[-1].ended.set()
    assert len(sender._sent) == len(groups._on_device) == 1
    groups.close()


def test_what_lies_on_another_device_is_not_sent() -> None:
    with pytest.raises(UsageError, match=r"only dense tensors of numbers on the model's device \(meta\)"):
        Edges(Wire(0)).send(0, [torch.ones(2)])  # type: ignore[arg-type]


def test_wait_for_a_work_of_the_gpu_is_no_torch_wait(group: LivingGroup) -> None:
    """torch's own would abort the communicator in the thread that waits."""
    fake = group._nccl._raw
    fake.works.append(fake.allreduce([]))
    assert group.allreduce([torch.ones(2, dtype=torch.float64, device=META)], dist.AllreduceOptions()).wait()
