"""What an error is taken for: the membership's, with the rank that was lost, or the user's own."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from regroup.data import SamplePlan
from regroup.errors import Aborted, BackendError, GenerationChanged, GroupBroken, PeerLost, UsageError
from regroup.generation.backends import Backend
from regroup.generation.groups import FORGOTTEN_S, Groups, Pending
from regroup.generation.origins import is_collectives
from regroup.generation.regrouper import Regrouper
from regroup.generation.sockets import Connection
from regroup.generation.team import Team
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import TrainingState
from tests.builders.generations import make_assignment, make_document

HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.3")
PROCESSES = (1, 2, 1, 1)
"""Rank 0; ranks 1 and 2 of one member; ranks 3 and 4 are two members of one host."""


def make_groups() -> Groups:
    document = make_document(7000, hosts=HOSTS, processes=PROCESSES)
    part = replace(make_assignment(document, 4), document=document)
    groups = Groups(part, HOSTS[3], torch.device("cpu"))
    groups.peers.ranks_by_port = {5000: [0, 1], 5002: [2], 7000: [3]}
    return groups


class Lost:
    """In place of the groups' sockets: what has ended."""

    def __init__(self, *ended: tuple[str, int]) -> None:
        self.ended = ended

    def lost(self) -> list[Connection] | None:
        return [Connection(None, *one) for one in self.ended] or None  # type: ignore[arg-type]

    def shut_down(self) -> None:
        pass


@pytest.mark.parametrize(
    ("ended", "rank"),
    [
        pytest.param([("10.0.0.1", 5000)], 0, id="where it listens"),
        pytest.param([("10.0.0.2", 5000)], 1, id="another pod has a network of its own, and may use the same port"),
        pytest.param([("10.0.0.1", 7000)], 0, id="the store's host"),
        pytest.param([("10.0.0.3", 7000)], 3, id="a rank that listens at the store's port, elsewhere"),
        pytest.param([("10.0.0.2", 41000)], 1, id="it connected to us, and its host has one member"),
        pytest.param([("10.0.0.3", 41000)], None, id="it connected to us, and its host has two"),
        pytest.param([("10.0.0.2", 5000), ("10.0.0.2", 5002)], 1, id="two processes of one member"),
        pytest.param(
            [("10.0.0.1", 5000), ("10.0.0.2", 5002)], None, id="two members: one may have left because of the other"
        ),
    ],
)
def test_which_rank_was_lost(ended: list[tuple[str, int]], rank: int | None) -> None:
    groups = make_groups()
    groups.sockets = Lost(*ended)  # type: ignore[assignment]
    outcome = groups.failed(RuntimeError("Connection closed by peer"))
    assert isinstance(outcome, PeerLost)
    assert outcome.peer_rank == rank


class Watcher:
    """In place of the real one: says whether a newer generation comes while it is waited for."""

    stop = None

    def __init__(self, is_newer: bool) -> None:
        self.is_newer, self.waited = is_newer, False
        self.sent: list[Any] = []

    def wait_newer(self, _generation: int, _timeout_s: float) -> bool:
        self.waited = True
        return self.is_newer

    def knows_newer(self, _generation: int) -> bool:
        return self.is_newer

    def send(self, message: Any) -> None:
        self.sent.append(message)


LOST = ("10.0.0.1", 5000)


@pytest.mark.parametrize(
    ("error", "ended", "is_newer", "explained", "waited"),
    [
        pytest.param(GenerationChanged("x"), False, False, True, False, id="ours says so"),
        pytest.param(PeerLost("x", 1), False, False, True, False, id="a rank was lost"),
        pytest.param(Aborted("x"), False, False, True, False, id="ended here"),
        pytest.param(BackendError("x"), False, False, False, True, id="the backend failed, and nothing follows"),
        pytest.param(BackendError("x"), False, True, True, True, id="the backend failed, and a newer generation comes"),
        pytest.param(BackendError("x"), True, False, False, True, id="the backend failed, and another rank has ended by it"),
        pytest.param(RuntimeError("x"), False, True, False, False, id="the script's own, whatever comes"),
        pytest.param(RuntimeError("x"), True, False, True, False, id="a collective of the script's own, and a connection ended"),
        pytest.param(torch.distributed.DistBackendError("x"), False, False, True, False, id="NCCL notices it earlier"),
        pytest.param(torch.OutOfMemoryError("x"), True, False, False, False, id="no memory on the device"),
        pytest.param(ValueError("x"), True, True, False, False, id="no error of a collective"),
    ],
)  # fmt: skip
def test_what_an_error_is_taken_for(
    error: BaseException, ended: bool, is_newer: bool, explained: bool, waited: bool
) -> None:
    watcher = Watcher(is_newer)
    regrouper = make_regrouper(watcher, *([LOST] if ended else []))
    assert regrouper.explains(error) is explained
    assert watcher.waited is waited
    assert (regrouper.groups is None) is (explained and not isinstance(error, GenerationChanged))
    assert len(watcher.sent) == (regrouper.groups is None and not is_newer)


def make_regrouper(watcher: Watcher, *ended: tuple[str, int]) -> Regrouper:
    model = torch.nn.Linear(2, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    plan = SamplePlan(0, 8, 4, 2, 1)
    regrouper = Regrouper(watcher, state, plan, torch.device("cpu"), Durable(state, plan), Memory(state, plan, None, 0))  # type: ignore[arg-type]
    regrouper.groups = make_groups()
    regrouper.groups.sockets = Lost(*ended)  # type: ignore[assignment]
    return regrouper


class Forgotten:
    """In place of a collective that gloo never ends."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Wait timeout")


def test_message_that_gloo_has_forgotten_is_the_lost_rank() -> None:
    """Nobody else may know: both ends of a broken connection can have been in this wait."""
    groups = make_groups()
    groups.sockets = Lost(LOST)  # type: ignore[assignment]
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="does not") as caught:
        groups.wait([Pending(Forgotten(), Backend(None))])  # type: ignore[arg-type]
    assert caught.value.peer_rank == 0
    assert FORGOTTEN_S < time.monotonic() - began_s < FORGOTTEN_S + 5


@pytest.fixture
def as_before() -> Iterator[None]:
    """What torch's loaders install in a process is gone after the test."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)
    signal_handling._SIGCHLD_handler_set = False


@pytest.fixture
def loader() -> Iterator[Any]:
    """A loader with a worker that runs; torch's handler of SIGCHLD is installed."""
    rows = iter(DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    next(rows)
    yield rows
    del rows


@pytest.mark.parametrize("ended", [[], [LOST]], ids=["every rank lives", "a rank is lost, too"])
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("place", ["a wait of ours", "a start of ours", "the script"])
def test_killed_worker_of_a_loader_is_no_failure_of_a_collective(
    loader: Any, ended: list[tuple[str, int]], place: str
) -> None:
    """torch raises it from a signal's handler, wherever the process is."""
    regrouper = make_regrouper(Watcher(is_newer=False), *ended)
    groups = regrouper.groups
    assert groups is not None

    def kill(*_: Any) -> None:
        loader._workers[0].kill()
        time.sleep(10)

    def wait() -> None:
        threading.Timer(0.05, loader._workers[0].kill).start()
        groups.wait([Pending(Forgotten(), Backend(None))])  # type: ignore[arg-type]

    def start() -> None:
        groups.start(Backend(SimpleNamespace(allreduce=kill)), "allreduce")

    with pytest.raises(RuntimeError, match="is killed by signal: Killed") as caught:
        {"a wait of ours": wait, "a start of ours": start, "the script": kill}[place]()
    assert type(caught.value) is RuntimeError
    assert regrouper.explains(caught.value) is False


def test_error_of_a_script_s_signal_handler_is_its_own() -> None:
    class Handler:
        def __call__(self, *_: Any) -> None:
            raise RuntimeError("too slow")

        def method(self, *_: Any) -> None:
            self()

    for handler in (Handler(), Handler().method, functools.partial(Handler().method, 1)):
        before = signal.signal(signal.SIGUSR2, handler)
        try:
            with pytest.raises(RuntimeError, match="too slow") as caught:
                signal.raise_signal(signal.SIGUSR2)
            assert not is_collectives(caught.value)
        finally:
            signal.signal(signal.SIGUSR2, before)


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> int:
        raise RuntimeError("no such row")


@pytest.mark.usefixtures("as_before")
def test_error_of_a_dataset_in_a_worker_is_the_script_s_where_a_rank_is_lost() -> None:
    loader = DataLoader(Broken(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="no such row") as caught:
        next(iter(loader))
    assert make_regrouper(Watcher(is_newer=False), LOST).explains(caught.value) is False


def test_wait_lasts_as_long_as_every_connection_stands() -> None:
    groups = make_groups()
    groups.sockets = Lost()  # type: ignore[assignment]
    threading.Timer(FORGOTTEN_S + 1, groups.abort).start()
    with pytest.raises(Aborted):
        groups.wait([Pending(Forgotten(), Backend(None))])  # type: ignore[arg-type]


def test_nothing_communicates_while_a_commit_is_applied() -> None:
    groups = make_groups()
    groups.is_applying = True
    team = Team(groups, 0, 2, Backend(None), None, None)
    for call in (lambda: groups.launch("allreduce", []), lambda: team.all_reduce(torch.ones(1))):
        with pytest.raises(UsageError, match=r"Call it between steps, in job\.collective"):
            call()


def test_backends_error_keeps_its_text() -> None:
    groups = make_groups()
    groups.sockets = Lost()  # type: ignore[assignment]
    outcome = groups.failed(RuntimeError("Invalid scalar type"))
    assert isinstance(outcome, BackendError)
    assert not isinstance(outcome, GroupBroken)
    assert str(outcome) == "A collective failed, and no rank was lost: Invalid scalar type"
    assert str(groups.failed(outcome)) == str(outcome)
