"""Faults inside a trainer process that no signal from outside can time: a test names one in TEST_FAULT."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from regroup import step
from regroup.errors import GroupBroken
from regroup.generation import transfer
from regroup.generation.groups import Groups, Part
from regroup.parallel import ring_attention
from regroup.parallel.all_to_all import _AllToAll
from regroup.parallel.ddp import DataParallel
from regroup.parallel.gradients import Bucket
from regroup.parallel.strategy import Share, Word
from regroup.transaction import agreement
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
    dies-in-forward:N           SIGKILL in the second all-to-all of forward in step N
    dies-in-backward:N          the same in backward
    dies-in-ring-forward:N      SIGKILL in the second turn of ring attention in step N, which sends keys and values
    dies-in-ring-backward:N     the same in backward, before gradients are sent
    hangs-in-backward:N         SIGSTOP there
    dies-in-sum:N               SIGKILL when the first gradients of step N are on their way to the other groups
    breaks-in-backward:N        the group breaks in backward number N, counted from 0, in its second block of two
    rows-lost:N                 step N is reduced everywhere, this process has sent its row, and those of the others do not come
    rows-lost-first:G           the same, in the first step of generation G
    dies-in-schedule:N:K        SIGKILL to this process in step N, once it has done K actions of its pipeline's schedule
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
    elif kind == "dies-in-schedule":
        _dies_in_schedule(*map(int, number.split(":")))
    elif kind == "rows-lost":
        _rows_lost(lambda generation, step: (generation, step) == (1, int(number)))
    elif kind == "rows-lost-first":
        _rows_lost(lambda generation, _: generation == int(number))
    elif kind.startswith("dies-in-ring-"):
        _dies_in_ring(kind.rpartition("-")[2], int(number))
    elif kind in ("dies-in-forward", "dies-in-backward", "dies-in-sum", "hangs-in-backward"):
        _ends_in(kind.rpartition("-")[2], int(number), signal.SIGKILL if kind.startswith("dies") else signal.SIGSTOP)
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


def _ends_in(phase: str, index: int, by: signal.Signals) -> None:
    launch, send = DataParallel._launch, DataParallel._send
    step, calls = 0, 0

    def launched(strategy: DataParallel, share: Share) -> None:
        nonlocal step
        launch(strategy, share)
        step = share.index + 1

    def reached(number: int) -> None:
        nonlocal calls
        calls += step == index
        if calls == number:
            os.kill(os.getpid(), by)

    def sent(strategy: DataParallel, bucket: Bucket) -> None:
        send(strategy, bucket)
        reached(1)

    def exchanging(original: Any) -> Any:
        def exchange(*arguments: Any) -> Any:
            reached(2)
            return original(*arguments)

        return staticmethod(exchange)

    DataParallel._launch = launched  # type: ignore[method-assign, assignment]
    if phase == "sum":
        DataParallel._send = sent  # type: ignore[method-assign, assignment]
    else:
        setattr(_AllToAll, phase, exchanging(getattr(_AllToAll, phase)))


def _dies_in_ring(phase: str, index: int) -> None:
    launch, ring = DataParallel._launch, cast(Any, ring_attention)
    exchange, original = ring.exchange, getattr(ring._RingAttention, phase)
    step, turns, is_inside = 0, 0, False

    def launched(strategy: DataParallel, share: Share) -> None:
        nonlocal step
        launch(strategy, share)
        step = share.index + 1

    def exchanging(*arguments: Any) -> Any:
        nonlocal turns
        turns += is_inside and step == index
        if turns == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*arguments)

    def passing(*arguments: Any) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return original(*arguments)
        finally:
            is_inside = False

    DataParallel._launch = launched  # type: ignore[method-assign, assignment]
    ring.exchange = exchanging
    setattr(ring._RingAttention, phase, staticmethod(passing))


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
    settle = DataParallel._settle  # what a commit asks for between the reduction and the optimizer

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

    DataParallel._settle = ending  # type: ignore[method-assign, assignment]


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
    gather = agreement.gather

    def losing(groups: Groups | None, row: Row, *others: Any) -> tuple[Header, torch.Tensor | None]:
        found = gather(groups, row, *others)
        if groups is not None and is_it(groups.generation, row.step):
            raise GroupBroken("TEST_FAULT")
        return found

    agreement.gather = losing  # type: ignore[assignment]
