"""Groups on a GPU: the process outlives an error of another rank, only what has succeeded counts, an abort always gets through.

The backend is a fake that behaves as the real one was seen to, and as the sources of torch 2.13 say (`fake_nccl`).
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch._C._distributed_c10d import ErrorType

from harness.polling import until
from regroup.errors import Aborted, BackendError, GroupBroken, PeerLost, UsageError
from regroup.generation import backends, nccl
from regroup.generation.groups import Groups

from .fake_nccl import FakeNccl, FakeWork
from .nccl_kit import SOON_S, Connecting, Waiting, make_groups, remote
from .test_outcomes import LOST, Lost

# --- settings ----------------------------------------------------------------------------------------------------------

USERS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("environment", "want", "sentences"),
    [
        pytest.param({}, {**nccl.OURS, **nccl.DEFAULTS}, [], id="all is ours, without a word"),
        pytest.param({**nccl.OURS, **nccl.DEFAULTS}, {}, [], id="set already: the next generation changes nothing"),
        pytest.param(
            USERS,
            {k: v for k, v in {**nccl.OURS, **nccl.DEFAULTS}.items() if k != "TORCH_NCCL_BLOCKING_WAIT"},
            ["TORCH_NCCL_ASYNC_ERROR_HANDLING is 1, and is set to 0"],
            id="a contrary value is changed, and said",
        ),
        pytest.param(
            {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0", **nccl.OURS},
            {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "300"},
            [],
            id="a user may choose communicators that block",
        ),
    ],
)
def test_settings(environment: dict[str, str], want: dict[str, str], sentences: list[str]) -> None:
    found = nccl.settings(environment)
    assert found.environment == want
    assert len(found.sentences) == len(sentences)
    assert all(said.startswith(start) for said, start in zip(found.sentences, sentences, strict=True))


def test_torch_knows_every_setting() -> None:
    """A name that torch drops would end processes again, silently."""
    library = torch.__path__[0] + "/lib/libtorch_cuda.so"
    try:
        content = open(library, "rb").read()  # noqa: SIM115
    except FileNotFoundError:
        pytest.skip("this torch is built without CUDA")
    assert [name for name in (*nccl.OURS, *nccl.DEFAULTS) if name.encode() + b"\0" not in content] == []


# --- success is asked for ----------------------------------------------------------------------------------------------


TELLS = pytest.mark.parametrize("tells", [pytest.param(True, id="torch 2.13"), pytest.param(False, id="torch 2.11")])


@TELLS
def test_wait_lasts_until_the_gpu_has_ended(tells: bool) -> None:
    fake = FakeNccl(tells=tells)
    waiting = Waiting(make_groups(fake))
    assert fake.works[0].asked.wait(SOON_S)
    assert waiting.outcome == []
    assert not fake.works[0].seen_by_stream
    fake.works[0].ended.set()
    assert waiting.end() is None
    assert fake.works[0].seen_by_stream


def watchdog(fake: FakeNccl, work: FakeWork) -> None:
    fake.error = ErrorType.COMM_ERROR
    work.ended.set()


def device(_fake: FakeNccl, work: FakeWork) -> None:
    work.query_fails = RuntimeError("CUDA error: an illegal memory access was encountered")


@TELLS
@pytest.mark.parametrize(
    ("happens", "outcome", "text"),
    [
        pytest.param(remote, PeerLost, "remote process exited", id="the work has an exception"),
        pytest.param(watchdog, PeerLost, "COMM_ERROR", id="only a watchdog has seen it"),
        pytest.param(device, BackendError, "illegal memory access", id="the GPU failed: the user's own"),
    ],
)
def test_work_that_failed_is_no_success(
    happens: Callable[[FakeNccl, FakeWork], None], outcome: type[Exception], text: str, tells: bool
) -> None:
    fake = FakeNccl(tells=tells)
    waiting = Waiting(make_groups(fake))
    happens(fake, fake.works[0])
    error = waiting.end()
    assert isinstance(error, outcome)
    assert text in str(error)
    assert not fake.works[0].seen_by_stream


def test_error_whose_abort_never_ends_holds_up_nobody() -> None:
    """torch 2.11 says what the error is only after it has aborted the communicator."""
    fake = FakeNccl(tells=False, abort_ends=False)
    waiting = Waiting(make_groups(fake))
    remote(fake, fake.works[0])
    error = waiting.end()
    assert isinstance(error, PeerLost)
    assert "within 0.5 s" in str(error)
    assert fake.aborted_in == "regroup-errors"
    later = FakeNccl(tells=False)
    waiting = Waiting(make_groups(later))  # the next generation: the thread that is lost is another one
    later.works[0].ended.set()
    assert waiting.end() is None
    fake.abort_ends.set()


def test_lost_rank_that_nccl_does_not_notice_ends_the_wait() -> None:
    groups = make_groups(FakeNccl())
    groups.sockets = Lost(LOST)  # type: ignore[assignment]
    assert isinstance(Waiting(groups).end(), PeerLost)


def test_collective_that_cannot_start_is_the_users() -> None:
    fake = FakeNccl()
    fake.error_at_launch = RuntimeError("Unsupported data type")
    with pytest.raises(BackendError, match="Unsupported data type"):
        make_groups(fake).launch("allreduce", [torch.ones(1)])


# --- abort -------------------------------------------------------------------------------------------------------------


def test_abort_returns_at_once_and_frees_who_waits_although_nccls_never_ends() -> None:
    fake = FakeNccl(abort_ends=False)
    groups = make_groups(fake)
    waiting = Waiting(groups)
    assert fake.works[0].asked.wait(SOON_S)
    groups.abort()  # as the watcher does
    assert isinstance(waiting.end(), Aborted)
    assert fake.abort_began.wait(SOON_S)
    assert fake.aborted_in == "regroup-abort"
    fake.abort_ends.set()


def test_question_that_does_not_end_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the watcher's thread, which calls abort, nor NCCL's abort: that may be what ends the question."""
    monkeypatch.setattr(backends, "ASKED_S", 0.01)
    fake = FakeNccl()
    groups = make_groups(fake)
    groups.launch("allreduce", [torch.ones(1)])
    asked, answer = threading.Event(), threading.Event()

    def is_completed() -> bool:
        asked.set()
        return answer.wait()

    fake.works[0].is_completed = is_completed  # type: ignore[method-assign]
    threading.Thread(target=groups.is_completed, args=(fake.works[0],), daemon=True).start()
    assert asked.wait(SOON_S)
    groups.abort()
    assert fake.abort_began.wait(SOON_S)
    answer.set()


def test_abort_begins_once_a_question_is_answered() -> None:
    """NCCL would hold the question, and with it the interpreter, until the abort has ended."""
    fake, asking = FakeNccl(), threading.Lock()
    with asking:
        fake.backend().abort(asking, keep=None)
        assert not fake.abort_began.wait(0.05)
    assert fake.abort_began.wait(SOON_S)


def test_tensors_of_a_collective_live_until_the_gpu_no_longer_writes_them() -> None:
    fake = FakeNccl(abort_ends=False)
    groups = make_groups(fake)
    groups.launch("allreduce", [torch.ones(1)])
    work = weakref.ref(fake.works.pop())
    groups.close()
    del groups
    gc.collect()
    assert fake.abort_began.wait(SOON_S)
    assert work() is not None
    fake.abort_ends.set()
    until(lambda: work() is None, "the work is let go")


def test_collective_that_succeeded_is_not_kept() -> None:
    fake = FakeNccl()
    groups = make_groups(fake)
    pending = groups.launch("allreduce", [torch.ones(1)])
    fake.works[0].ended.set()
    groups.wait([pending])
    assert groups._on_device == {}


def test_close_in_the_middle_of_an_abort_leaves_the_communicator_to_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread sees the flag while the watcher still shuts the sockets down, and closes the groups."""
    fake = FakeNccl()
    groups = make_groups(fake)
    groups.launch("allreduce", [torch.ones(1)])

    def main_is_faster() -> None:
        main = threading.Thread(target=groups.close, daemon=True)
        main.start()
        main.join(SOON_S)
        assert not main.is_alive()

    monkeypatch.setattr(groups.sockets, "shut_down", main_is_faster)
    groups.abort()
    assert fake.abort_began.wait(SOON_S)
    assert fake.aborted_in == "regroup-abort"


def test_collective_that_nobody_waits_for_is_let_go_once_it_has_ended() -> None:
    fake = FakeNccl()
    groups = make_groups(fake)
    tensor = torch.ones(1)
    alive = weakref.ref(groups.launch("allreduce", [tensor]).work)
    fake.works[0].ended.set()
    fake.works.clear()
    pending = groups.launch("allreduce", [tensor])
    fake.works[0].ended.set()
    groups.wait([pending])
    gc.collect()
    assert alive() is None


def test_communicator_is_ending_until_its_memory_is_let_go() -> None:
    """Else the next one could form beside more than may be ending."""
    fake, num_ending = FakeNccl(abort_ends=False), list[int]()
    weakref.finalize(fake, lambda: num_ending.append(len(backends._ending)))
    backend, may_end = fake.backend(), fake.abort_ends
    backend.abort(threading.Lock(), keep=None)
    backend.release()
    del fake
    may_end.set()
    backends.wait_ended(timeout_s=SOON_S)
    assert num_ending == [1]


@pytest.mark.parametrize(
    ("ages_s", "most", "want_s"),
    [
        pytest.param([], 0, 0.0, id="none is ending"),
        pytest.param([0.5], 2, 0.0, id="the next one forms at once"),
        pytest.param([0.5, 9.0], 2, 0.0, id="beside two that are ending, too"),
        pytest.param([0.5, 9.0, 20.0], 2, 40.0, id="of three, the oldest is waited for"),
        pytest.param([9.0, 0.5, 20.0], 1, 51.0, id="of three, all but one are waited for"),
        pytest.param([0.5, 9.0], 0, 59.5, id="all are waited for, by the user's choice"),
        pytest.param([60.0], 0, 0.0, id="one that never ends is not waited for by every later generation"),
        pytest.param([60.0, 99.0, 1.0, 2.0, 3.0], 2, 57.0, id="those that never end take no place of the others"),
    ],
)
def test_how_long_the_next_communicator_waits(ages_s: list[float], most: int, want_s: float) -> None:
    assert backends.patience_s(ages_s, most) == want_s


@pytest.mark.parametrize(
    ("said", "want"),
    [(None, nccl.ENDING), ("", nccl.ENDING), ("0", 0), ("7", 7), ("-1", None), ("two", None), ("\u0662", None)],
)
def test_how_many_may_be_ending(said: str | None, want: int | None) -> None:
    environment = {} if said is None else {"REGROUP_NCCL_ENDING": said}
    if want is not None:
        assert nccl.most_ending(environment) == want
        return
    with pytest.raises(UsageError, match=f"REGROUP_NCCL_ENDING is '{said}', and must be a whole number, 0 or more"):
        nccl.most_ending(environment)


def test_wrong_number_that_may_be_ending_is_refused_in_a_world_of_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROUP_NCCL_ENDING", "two")
    with pytest.raises(UsageError, match="REGROUP_NCCL_ENDING is 'two'"):
        make_groups(ranks=1).connect()


def test_abort_that_does_not_end_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(backends, "END_S", 0.01)
    fake = FakeNccl(abort_ends=False)
    make_groups(fake).abort()
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "has not ended its communicator" in said

    until(is_said, "it is said")
    fake.abort_ends.set()


# --- connecting --------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeNccl], None]]:
    """Call it with the backend that is opened next."""
    for name in (*nccl.OURS, *nccl.DEFAULTS):
        monkeypatch.setenv(name, {**nccl.OURS, **nccl.DEFAULTS}[name])
    monkeypatch.setattr(nccl, "first_tensor", lambda _device: torch.zeros(1))
    upcoming: list[FakeNccl] = []
    monkeypatch.setattr(nccl, "open_backend", lambda store, *_: upcoming.pop().backend(store))
    yield upcoming.append
    backends.wait_ended(timeout_s=SOON_S)
    assert not backends._ending, "a test leaves one behind that the next test would wait for"


def test_gpus_are_connected_once_a_first_collective_has_succeeded(opened: Callable[[FakeNccl], None]) -> None:
    fake = FakeNccl()
    opened(fake)
    groups = make_groups()
    connecting = Connecting(groups)
    until(lambda: fake.works, "the first collective is started")
    assert groups.nccl is not None
    fake.works[0].ended.set()
    assert connecting.end() is None


def test_abort_reaches_a_communicator_that_is_forming(opened: Callable[[FakeNccl], None]) -> None:
    fake = FakeNccl(forms=False)
    opened(fake)
    groups = make_groups()
    connecting = Connecting(groups)
    assert fake.connecting.wait(SOON_S)
    groups.abort()
    assert isinstance(connecting.end(), Aborted)
    assert fake.abort_began.wait(SOON_S)
    assert fake.aborted_in == "regroup-abort"


def test_first_collective_is_not_asked_after_an_abort(opened: Callable[[FakeNccl], None]) -> None:
    fake = FakeNccl(abort_ends=False)
    opened(fake)
    groups = make_groups()
    connecting = Connecting(groups)
    until(lambda: fake.works and fake.works[0].asked.is_set(), "the first collective is waited for")
    groups.abort()
    assert isinstance(connecting.end(), Aborted)
    until(lambda: not any(t.name == "regroup-connect" for t in threading.enumerate()), "the helper ends")
    assert fake.abort_began.wait(SOON_S)
    assert not fake.asked_too_late
    fake.abort_ends.set()


def test_abort_before_the_backend_is_there_leaves_none_behind(
    opened: Callable[[FakeNccl], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, may_open, opening = FakeNccl(), threading.Event(), threading.Event()
    opened(fake)

    def tensor(_device: torch.device) -> torch.Tensor:
        opening.set()
        may_open.wait()
        return torch.zeros(1)

    monkeypatch.setattr(nccl, "first_tensor", tensor)
    groups = make_groups()
    connecting = Connecting(groups)
    assert opening.wait(SOON_S)
    groups.abort()
    assert isinstance(connecting.end(), Aborted)
    may_open.set()
    until(lambda: not any(t.name == "regroup-connect" for t in threading.enumerate()), "the helper ends")
    assert fake.works == []
    assert groups.nccl is None


def test_communicator_that_an_abort_came_too_early_for_is_let_go_in_a_thread(
    opened: Callable[[FakeNccl], None],
) -> None:
    """Its destructor waits, and in a world of one the main thread opens it."""
    fake, let_go_in = FakeNccl(), list[threading.Thread]()
    weakref.finalize(fake, lambda: let_go_in.append(threading.current_thread()))
    opened(fake)
    del fake
    groups = make_groups(ranks=1)
    groups.abort()
    with pytest.raises(Aborted):
        groups.connect()
    until(lambda: let_go_in, "it is let go")
    assert let_go_in[0] is not threading.main_thread()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(
            torch.distributed.DistBackendError("NCCL timeout in: NCCLUtils.cpp"), "NCCL timeout", id="torch's bound"
        ),
        pytest.param(None, "not connected after 0.02 s", id="our own"),
    ],
)
def test_gpus_that_do_not_connect_are_a_lost_rank(
    opened: Callable[[FakeNccl], None], monkeypatch: pytest.MonkeyPatch, error: RuntimeError | None, text: str
) -> None:
    monkeypatch.setattr(nccl, "CONNECT_S", 0.02)
    fake = FakeNccl()
    fake.error_at_launch = error
    opened(fake)
    outcome = Connecting(make_groups()).end()
    assert isinstance(outcome, GroupBroken)
    assert text in str(outcome)


def test_call_of_nccl_that_never_returns_is_left(
    opened: Callable[[FakeNccl], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Communicators that block, by the user's choice."""
    monkeypatch.setattr(nccl, "CONNECT_S", 0.02)
    fake = FakeNccl(forms=False)
    opened(fake)
    outcome = Connecting(make_groups()).end()
    assert isinstance(outcome, PeerLost)
    fake.forms.set()


def helper_waits() -> bool:
    """The helper thread waits for ends of communicators."""
    return len(backends._one_less._waiters) > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("said", "num_ending", "waits_for"),
    [
        pytest.param(None, 1, 0, id="a new one forms beside an old one that is aborted"),
        pytest.param(None, 2, 0, id="two generations in quick succession"),
        pytest.param(None, 3, 1, id="three in quick succession: memory of the GPU is bounded"),
        pytest.param("0", 1, 1, id="by the user's choice it waits for the old one's end"),
        pytest.param("0", 2, 2, id="and for the ends of all"),
    ],
)
def test_next_communicator_forms_beside_old_ones_that_end(
    opened: Callable[[FakeNccl], None],
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    num_ending: int,
    waits_for: int,
) -> None:
    if said is not None:
        monkeypatch.setenv("REGROUP_NCCL_ENDING", said)
    old, fake = [FakeNccl(abort_ends=False) for _ in range(num_ending)], FakeNccl()
    for one in old:
        make_groups(one).abort()
        assert one.abort_began.wait(SOON_S)
    opened(fake)
    connecting = Connecting(make_groups())
    for one in old[:waits_for]:
        until(helper_waits, "the helper waits")
        assert fake.works == []
        one.abort_ends.set()
    until(lambda: fake.works, "the next one is connected")
    fake.works[0].ended.set()
    assert connecting.end() is None
    for one in old:
        one.abort_ends.set()


def test_communicators_of_generations_in_quick_succession_are_all_let_go(opened: Callable[[FakeNccl], None]) -> None:
    fakes = [FakeNccl(abort_ends=False) for _ in range(nccl.ENDING + 1)]
    for fake in fakes:
        opened(fake)
        groups = make_groups()
        connecting = Connecting(groups)
        until(lambda fake=fake: fake.works, "it connects")  # type: ignore[misc]
        fake.works.pop().ended.set()
        assert connecting.end() is None
        groups.close()
        assert fake.abort_began.wait(SOON_S)
    del groups, connecting, fake
    alive = [weakref.ref(one) for one in fakes]
    while fakes:
        fakes.pop(0).abort_ends.set()
    until(lambda: not any(one() for one in alive), "their memory is let go")


def test_connect_that_comes_too_late_is_aborted_and_no_error_of_torch(
    opened: Callable[[FakeNccl], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups are closed while the helper waits. The store is gone then, and torch's words for that were a ValueError."""
    monkeypatch.setenv("REGROUP_NCCL_ENDING", "0")
    old, outcome, allocated = FakeNccl(abort_ends=False), list[BaseException](), list[torch.device]()
    make_groups(old).abort()
    opened(FakeNccl())
    monkeypatch.setattr(nccl, "first_tensor", allocated.append)
    groups = make_groups()
    connect = groups._connect

    def late(members: Any) -> None:
        try:
            connect(members)
        except BaseException as error:
            outcome.append(error)
            raise

    monkeypatch.setattr(groups, "_connect", late)
    connecting = Connecting(groups)
    until(helper_waits, "the helper waits")
    groups.close()
    assert isinstance(connecting.end(), Aborted)
    old.abort_ends.set()
    until(lambda: outcome, "the helper ends")
    assert [type(error) for error in outcome] == [Aborted]
    assert allocated == [], "the GPU is the next generation's"


@pytest.mark.parametrize("use", ["a communicator", "a part"])
def test_store_that_is_gone_is_an_abort(use: str) -> None:
    """Whatever a helper thread still asks of it."""
    groups = make_groups()
    groups.close()
    with pytest.raises(Aborted):
        groups._open_nccl("", [0, 1]) if use == "a communicator" else groups.open_among([0, 1], "part")


# --- a world of one ----------------------------------------------------------------------------------------------------


def test_world_of_one_makes_a_communicator_only_for_a_collective_of_the_script(
    opened: Callable[[FakeNccl], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, fake, served = FakeNccl(abort_ends=False), FakeNccl(forms=False), list[tuple[str, Any]]()
    make_groups(old).abort()
    opened(fake)
    groups = make_groups(ranks=1)
    monkeypatch.setenv("REGROUP_NCCL_ENDING", "0")
    assert Connecting(groups).end() is None  # it waits for nobody, and for no abort
    assert not fake.connecting.is_set()
    fake.forms.set()
    old.abort_ends.set()

    monkeypatch.setattr(
        backends.Backend, "serve", lambda backend, _group, device, _kind: served.append((device, backend))
    )
    groups._gloo = FakeNccl().backend()
    assert groups.world is not None
    assert served == [("cpu", groups.control), ("cuda", groups.nccl)]  # torch makes it when the script calls something
    waiting = Waiting(groups)
    assert fake.is_connected
    fake.works[0].ended.set()
    assert waiting.end() is None
    groups.close()


# --- in order ----------------------------------------------------------------------------------------------------------


def nothing(_groups: Groups) -> None:
    pass


def not_waited_for(groups: Groups) -> None:
    groups.launch("allreduce", [torch.ones(1)])


def waited_for(groups: Groups) -> None:
    pending = groups.launch("allreduce", [torch.ones(1)])
    pending.work.ended.set()  # type: ignore[attr-defined]
    groups.wait([pending])


def lost(groups: Groups) -> None:
    groups.sockets = Lost(LOST)  # type: ignore[assignment]


def left(groups: Groups) -> None:
    groups.abort()


@pytest.mark.parametrize(
    ("before", "rank_died", "shut_down_in", "aborted_in"),
    [
        pytest.param(nothing, False, "regroup-end", "", id="it ends in order, and nobody aborts it"),
        pytest.param(waited_for, False, "regroup-end", "", id="after a step that has been waited for, too"),
        pytest.param(nothing, True, "regroup-end", "regroup-end", id="a rank dies meanwhile: then it is aborted"),
        pytest.param(not_waited_for, False, "", "regroup-abort", id="a collective may still run"),
        pytest.param(lost, False, "", "regroup-abort", id="a rank was lost before"),
        pytest.param(left, False, "", "regroup-abort", id="it was aborted before"),
    ],
)
def test_planned_change_ends_the_communicator_in_order(
    before: Callable[[Groups], None], rank_died: bool, shut_down_in: str, aborted_in: str
) -> None:
    fake = FakeNccl(rank_died=rank_died)
    groups = make_groups(fake)
    before(groups)
    groups.end_in_order()
    groups.close()
    backends.wait_ended(timeout_s=SOON_S)
    assert (fake.shut_down_in, fake.aborted_in) == (shut_down_in, aborted_in)


def test_next_generation_waits_for_no_communicator_that_ends_in_order(opened: Callable[[FakeNccl], None]) -> None:
    """Neither its forming nor the closing of what was left, and its memory is let go in the end."""
    old, fake = FakeNccl(shutdown_ends=False), FakeNccl()
    opened(fake)
    groups, backend = make_groups(old), weakref.ref(old)
    groups.end_in_order()
    assert old.shutdown_began.wait(SOON_S)
    connecting = Connecting(make_groups())
    until(lambda: fake.works, "the next one is connected")
    fake.works[0].ended.set()
    assert connecting.end() is None
    groups.close()
    assert not old.abort_began.is_set()
    old.shutdown_ends.set()
    del old, groups
    until(lambda: backend() is None, "its memory is let go")


def test_synchronous_collective_has_a_work_all_the_same() -> None:
    """torch returns None for it on NCCL: nobody could ask whether it has ended, or failed."""
    fake = FakeNccl()
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    groups = make_groups(fake)
    pending = groups.launch("_allgather_base", torch.ones(2), torch.ones(1), options)
    assert pending.work is not None
    fake.works[0].ended.set()
    groups.wait([pending])
