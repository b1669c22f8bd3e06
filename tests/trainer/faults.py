"""Faults inside a trainer process that no signal from outside can time: a test names one in TEST_FAULT."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from regroup import step
from regroup.errors import GroupBroken
from regroup.generation import transfer
from regroup.generation.groups import Groups, Part
from regroup.parallel.ddp import DataParallel
from regroup.parallel.strategy import Word
from regroup.transaction import commit
from regroup.transaction.header import Header, Row


def install(name: str) -> None:
    """Arrange for a fault:

    source-dies-in-transfer:G   SIGKILL to the source in mid-copy of generation G
    dies-before-apply:N         step N is reduced everywhere and committed by the others (the file TEST_FAULT_GO says so);
                                then SIGKILL, before this process applies it
    breaks-before-apply:N       the same moment, but the group breaks and the process lives on
    rows-lost:N                 step N is reduced everywhere, this process has sent its row, and those of the others do not come
    dies-in-schedule:N:K        SIGKILL to this process in step N, once it has done K actions of its pipeline's schedule
    """
    kind, _, number = name.partition(":")
    if kind == "source-dies-in-transfer":
        _source_dies(int(number))
    elif kind == "dies-in-schedule":
        _dies_in_schedule(*map(int, number.split(":")))
    elif kind == "rows-lost":
        _rows_lost(int(number))
    else:
        assert kind in ("dies-before-apply", "breaks-before-apply"), name
        _ends_before_apply(int(number), dies=kind.startswith("dies"))


def _source_dies(generation: int) -> None:
    transfer.CHUNK_BYTES = 4096
    broadcast, chunks = transfer._broadcast, 0

    def dying(groups: Groups | Part, tensor: torch.Tensor, source: int) -> None:
        nonlocal chunks
        if isinstance(groups, Groups) and groups.generation == generation and groups.rank == source:
            chunks += 1
            if chunks == 6:  # length, text, three chunks, and no more
                os.kill(os.getpid(), signal.SIGKILL)
        broadcast(groups, tensor, source)

    transfer._broadcast = dying


def _dies_in_schedule(index: int, actions: int) -> None:
    done = 0
    check = step._Microbatches.check  # what a schedule asks before each action

    def dying(work: step._Microbatches) -> None:
        nonlocal done
        if work._step.index == index:
            if done == actions:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
        check(work)

    step._Microbatches.check = dying  # type: ignore[method-assign, assignment]


def _ends_before_apply(index: int, *, dies: bool) -> None:
    settle = DataParallel.settle  # what a commit asks for between the reduction and the optimizer

    def ending(strategy: DataParallel, words: Sequence[Word]) -> bool:
        if settle(strategy, words):
            return True  # rows are gathered again
        if strategy._step == index and strategy._groups is not None and strategy._groups.generation == 1:
            deadline_s = time.monotonic() + 60
            while not Path(os.environ["TEST_FAULT_GO"]).exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise GroupBroken("TEST_FAULT")
        return False

    DataParallel.settle = ending  # type: ignore[method-assign, assignment]


def _rows_lost(index: int) -> None:
    exchange = commit.exchange

    def losing(groups: Groups | None, row: Row, group_size: int = 1) -> Header:
        header = exchange(groups, row, group_size)
        if row.step == index and groups is not None and groups.generation == 1:
            raise GroupBroken("TEST_FAULT")
        return header

    commit.exchange = losing
