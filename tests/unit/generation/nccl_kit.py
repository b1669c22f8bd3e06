"""Groups and regroupers with a fake of NCCL, and threads that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore

from regroup.data import SamplePlan
from regroup.generation.groups import Groups, Pending
from regroup.generation.regrouper import Regrouper
from regroup.protocol.local import Answer
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import TrainingState
from tests.builders.generations import make_assignment, make_document

from .fake_nccl import FakeNccl, FakeWork
from .test_outcomes import Lost

GPU = torch.device("cuda", 0)
SOON_S = 5.0


def make_groups(fake: FakeNccl | None = None, *, ranks: int = 2) -> Groups:
    document = make_document(7000, ranks)
    groups = Groups(make_assignment(document, 0), "127.0.0.1", GPU)
    groups.sockets = Lost()  # type: ignore[assignment]
    groups._store = HashStore()
    if fake is not None:
        groups._nccl = {"": fake.backend()}
    return groups


def _launched(groups: Groups) -> Pending:
    pending = groups.launch("allreduce", [torch.ones(1)])
    assert pending.backend.on_gpu
    return pending


class Waiting:
    """Another thread waits for one collective on the GPU; with `for_all` for what `order` has left to it."""

    def __init__(self, groups: Groups, *, for_all: bool = False) -> None:
        self.outcome: list[BaseException | None] = []
        waits = partial(groups.wait_all, []) if for_all else partial(groups.wait, [_launched(groups)])
        self._thread = threading.Thread(target=self._run, args=(waits,), daemon=True)
        self._thread.start()

    def _run(self, waits: Callable[[], None]) -> None:
        try:
            waits()
            self.outcome.append(None)
        except Exception as error:
            self.outcome.append(error)

    def end(self) -> BaseException | None:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive(), "the wait does not end"
        return self.outcome[0]


def remote(_fake: FakeNccl, work: FakeWork) -> None:
    work.error = RuntimeError("NCCL error: remote process exited or there was a network error")
    work.ended.set()


class Connecting:
    """Another thread connects the GPUs."""

    def __init__(self, groups: Groups) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(groups,), daemon=True)
        self._thread.start()

    def _run(self, groups: Groups) -> None:
        try:
            groups.connect()
        except Exception as error:
            self.error = error

    def end(self) -> BaseException | None:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive(), "connecting does not end"
        return self.error


class Watcher:
    """In place of the real one: what the agent is told."""

    stop = None

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.watch = self.unwatch = lambda *_args, **_more: None
        self.knows_newer = lambda _number: False

    def ask(self, message: Any) -> Answer:
        return Answer("entering", message.generation, ok=True, adopted=0)

    def take_store(self, _generation: int) -> None:
        return None

    def send(self, message: Any) -> None:
        self.sent.append(message)


def make_regrouper(watcher: Watcher) -> Regrouper:
    model = torch.nn.Linear(2, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    plan = SamplePlan(0, 8, 4, 2, 1)
    return Regrouper(watcher, state, plan, GPU, Durable(state, plan), Memory(state, plan, None, 0))  # type: ignore[arg-type]
