"""A backend's destructor may never end, so it must not run in the thread that trains, whatever the script still holds."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroup, ProcessGroupGloo

from harness.polling import until
from regroup.errors import Aborted
from regroup.generation.backends import Backend, let_go


class Raw:
    """In place of torch's backend: says in which thread it ended."""

    def __init__(self, ended_in: list[str]) -> None:
        self.ended_in = ended_in

    @staticmethod  # torch's has no frame that could hold it
    def allreduce(_tensors: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def __del__(self) -> None:
        self.ended_in.append(threading.current_thread().name)


class Group:
    """In place of a ProcessGroup."""


def test_backend_ends_in_the_closing_thread_although_a_traceback_lives() -> None:
    ended_in: list[str] = []
    backend = Backend(Raw(ended_in))
    with pytest.raises(RuntimeError, match="closed by peer") as caught:
        backend.launch("allreduce", [])
    let_go(backend.release(), [])
    until(lambda: ended_in, "the backend ends")
    assert ended_in == ["regroup-close"]
    assert caught.tb is not None


@pytest.mark.parametrize("num_groups", [1, 2])
def test_backend_that_a_group_of_the_script_holds_ends_in_the_closing_thread(num_groups: int) -> None:
    ended_in: list[str] = []
    groups = [Group() for _ in range(num_groups)]
    let_go([Raw(ended_in)], groups)
    before = threading.active_count()
    while groups:
        assert ended_in == []
        assert threading.active_count() == before  # nobody polls for it
        groups.pop()
    until(lambda: ended_in, "the backend ends")
    assert ended_in == ["regroup-close"]


def test_group_that_dies_in_a_cycle_lets_its_backend_go() -> None:
    """The garbage collector may run in any thread, and in the middle of anything."""
    ended_in: list[str] = []
    group = Group()
    group.itself = group  # type: ignore[attr-defined]
    let_go([Raw(ended_in)], [group])
    del group
    gc.collect()
    until(lambda: ended_in, "the backend ends")
    assert ended_in == ["regroup-close"]


def test_torchs_group_is_followed_like_one_of_these() -> None:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads, options._timeout = 1, timedelta(seconds=10)
    store = HashStore()
    backend = Backend(ProcessGroupGloo(store, 0, 1, options))
    group = ProcessGroup(store, 0, 1)
    backend.serve(group, "cpu", ProcessGroup.BackendType.GLOO)
    torch.distributed.all_reduce(torch.ones(2), group=group)
    held = backend.release()
    gloo = weakref.ref(held[0])
    let_go(held, [group])
    assert gloo() is not None
    del group
    until(lambda: gloo() is None, "gloo ends")
    assert held == []


def test_released_backend_starts_nothing() -> None:
    backend = Backend(Raw([]))
    assert len(backend.release()) == 1
    assert backend.release() == []
    with pytest.raises(Aborted):
        backend.launch("allreduce", [])
