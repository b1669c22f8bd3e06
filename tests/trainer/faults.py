"""Faults inside a trainer process that no signal from outside can time: a test names one in TEST_FAULT."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from regroup.errors import GroupBroken
from regroup.generation import transfer
from regroup.generation.groups import Groups, Part
from regroup.parallel.ddp import DataParallel
from regroup.parallel.strategy import Word
from regroup.transaction import commit
from regroup.transaction.header import Header, Row


def install(name: str) -> None:
    """Arrange for a fault, or several with commas in between:

    source-dies-in-transfer:G   SIGKILL to the source in mid-copy of generation G
    small-chunks                a state is copied in chunks of 4096 bytes; on all ranks, or they do not fit together
    dies-before-apply:N         step N is reduced everywhere and committed by the others (the file TEST_FAULT_GO says so);
                                then SIGKILL, before this process applies it
    breaks-before-apply:N       the same moment, but the group breaks and the process lives on
    dies-in-eval:N              SIGKILL in the first block of the model's evaluation number N, counted from 0
    breaks-in-eval:N            the same moment, but the group breaks and the process lives on
    breaks-in-backward:N        the group breaks in backward number N, counted from 0, in its second block of two
    rows-lost:N                 step N is reduced everywhere, this process has sent its row, and those of the others do not come
    rows-lost-first:G           the same, in the first step of generation G
    """
    for one in name.split(","):
        _install(one)


def _install(name: str) -> None:
    kind, _, number = name.partition(":")
    if kind == "source-dies-in-transfer":
        _source_dies(int(number))
    elif kind in ("dies-in-eval", "breaks-in-eval"):
        _ends_in_eval(int(number), dies=kind.startswith("dies"))
    elif kind == "breaks-in-backward":
        _breaks_in_backward(int(number))
    elif kind == "small-chunks":
        transfer.CHUNK_BYTES = 4096
    elif kind == "rows-lost":
        _rows_lost(lambda generation, step: (generation, step) == (1, int(number)))
    elif kind == "rows-lost-first":
        _rows_lost(lambda generation, _: generation == int(number))
    else:
        assert kind in ("dies-before-apply", "breaks-before-apply"), name
        _ends_before_apply(int(number), dies=kind.startswith("dies"))


def _source_dies(generation: int) -> None:
    transfer.CHUNK_BYTES = 4096
    broadcast, chunks = transfer._broadcast, 0

    def dying(groups: Groups | Part, tensor: torch.Tensor, source: int) -> None:
        nonlocal chunks
        of = groups if isinstance(groups, Groups) else groups.groups
        if of.generation == generation and groups.rank == source:
            chunks += 1
            if chunks == 6:  # length, text, three chunks, and no more
                os.kill(os.getpid(), signal.SIGKILL)
        broadcast(groups, tensor, source)

    transfer._broadcast = dying


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


def _ends_in_eval(number: int, *, dies: bool) -> None:
    seen = 0

    def ending(module: torch.nn.Module, _arguments: object) -> None:
        nonlocal seen
        if not isinstance(module, torch.nn.LayerNorm) or module.training:  # the parameters of its block are gathered
            return
        seen += 1
        if seen == 2 * number + 1:  # the model has two blocks
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise GroupBroken("TEST_FAULT")

    torch.nn.modules.module.register_module_forward_pre_hook(ending)


def _breaks_in_backward(number: int) -> None:
    seen = 0

    def ended(module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> None:
        if isinstance(module, torch.nn.LayerNorm) and output.requires_grad:
            output.register_hook(breaking)  # type: ignore[no-untyped-call]

    def breaking(_gradient: torch.Tensor) -> None:
        nonlocal seen
        seen += 1
        if seen == 2 * number + 1:  # the model has two blocks, and backward comes to the second one first
            raise GroupBroken("TEST_FAULT")

    torch.nn.modules.module.register_module_forward_hook(ended)


def _rows_lost(is_it: Callable[[int, int], bool]) -> None:
    exchange = commit.exchange

    def losing(groups: Groups | None, row: Row, group_size: int = 1) -> Header:
        header = exchange(groups, row, group_size)
        if groups is not None and is_it(groups.generation, row.step):
            raise GroupBroken("TEST_FAULT")
        return header

    commit.exchange = losing
