"""One rank of the tests in test_horovod.py: `python horovod_ranks.py CASE ...`. What it prints is what the test compares."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import regroup.horovod as hvd


def refused(call: Any, kind: type[Exception] = hvd.HorovodInternalError) -> str:
    """Return the error of a call that must have one."""
    try:
        call()
    except kind as error:
        return str(error)
    raise SystemExit(f"no {kind.__name__}")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def operations() -> None:
    """Each operation with the types and the shapes that users have."""
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ):
        for shape in ((), (0,), (5,), (2, 3, 4, 5)):
            own = torch.full(shape, rank + 1).to(dtype)
            if len(shape) == 4:
                own = own.to(memory_format=torch.channels_last)
            summed = hvd.allreduce(own, op=hvd.Sum)
            assert (summed.dtype, summed.shape) == (dtype, own.shape)
            assert bool((summed == total).all()), (dtype, shape)
            assert bool((hvd.allreduce(own, op=hvd.Max) == size).all())
            assert bool((hvd.allreduce(own, op=hvd.Product) == torch.tensor(range(1, size + 1)).prod()).all())
            assert bool((hvd.broadcast(own, size - 1) == size).all())
            assert bool((own == rank + 1).all()), "the input is as it was"
    assert hvd.allreduce(torch.tensor([rank == 0, True]), op=hvd.Min).tolist() == [size == 1, True]
    averaged = hvd.allreduce(
        torch.arange(6.0).reshape(2, 3).t() * (rank + 1), prescale_factor=2.0, postscale_factor=0.5
    )
    assert torch.allclose(averaged, torch.arange(6.0).reshape(2, 3).t() * total / size)
    halves = [torch.full((3,), float(rank)), torch.full((2, 2), rank, dtype=torch.int64)]
    first, second = hvd.grouped_allreduce(halves, op=hvd.Sum)
    assert (first.tolist(), second.dtype) == ([total - size] * 3, torch.int64)

    for dtype in (torch.float32, torch.bool, torch.int16):
        rows = hvd.allgather(torch.full((rank, 2), rank, dtype=dtype))  # rank 0 has none
        assert rows.dtype == dtype
        assert rows.shape == (total - size, 2)
    assert hvd.allgather(torch.tensor(rank)).tolist() == list(range(size))
    received, counts = hvd.alltoall(torch.arange(size) + 10 * rank, splits=torch.ones(size, dtype=torch.int32))
    assert received.tolist() == [10 * r + rank for r in range(size)]
    assert counts.tolist() == [1] * size
    scattered = hvd.reducescatter(torch.arange(2 * size + 1), op=hvd.Sum)
    assert scattered.tolist() == [i * size for i in ([2 * rank, 2 * rank + 1, 2 * rank + 2] if rank == 0 else
                                                     [2 * rank + 1, 2 * rank + 2])]  # fmt: skip
    in_place = torch.ones(4, 4).t()[::2]
    assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
    assert bool((in_place == size).all())
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([2.0]), (size,))
    assert hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense().sub(2.0 / size).abs().max() < 1e-6
    assert hvd.broadcast_object({"a": [1, torch.ones(2), None]} if rank == 0 else None)["a"][1].tolist() == [1, 1]
    assert hvd.allgather_object(("rank", rank)) == [("rank", each) for each in range(size)]
    assert "only data travels" in refused(lambda: hvd.broadcast_object(print if rank == 0 else None), TypeError)


def orders() -> None:
    """Names in another order on each rank, with reductions and broadcasts mixed."""
    rank, size = hvd.rank(), hvd.size()
    for _ in range(20):
        names = [f"n{i}" for i in range(10)]
        names = names[rank * 3 :] + names[: rank * 3]
        handles = {name: hvd.allreduce_async(torch.tensor([float(name[1:])]), name=name, op=hvd.Sum) for name in names}
        hvd.barrier()
        for name in reversed(names):
            assert hvd.synchronize(handles[name]).item() == size * float(name[1:])
    if rank == 0:  # the others ask for it only after the second call here
        first = hvd.allreduce_async(torch.ones(1), name="twice")
        assert "same name as another tensor" in refused(
            lambda: hvd.allreduce_async(torch.ones(1), name="twice"), ValueError
        )
    hvd.barrier()
    hvd.synchronize(first if rank == 0 else hvd.allreduce_async(torch.ones(1), name="twice"))
    even = hvd.add_process_set(range(0, size, 2))
    if even.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=even).item() == len(range(0, size, 2))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size, "names without a name still agree"
    assert hvd.remove_process_set(even)
    assert even.process_set_id is None


def mismatches() -> None:
    rank, size = hvd.rank(), hvd.size()
    last = rank == size - 1
    for words, call in (
        ("Mismatched ALLREDUCE tensor shapes", lambda: hvd.allreduce(torch.ones(3 if last else 2))),
        ("Mismatched data types", lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64 if last else torch.float32))),
        ("Mismatched reduction operation", lambda: hvd.allreduce(torch.ones(2), op=hvd.Max if last else hvd.Sum)),
        ("root ranks", lambda: hvd.broadcast(torch.ones(2), root_rank=rank)),
        ("with dimension 1 equal to", lambda: hvd.allgather(torch.ones(2, 3 if last else 2))),
        ("Mismatched names", lambda: hvd.allreduce(torch.ones(2), name="x" if last else "y")),
        (
            "Mismatched operations",
            lambda: hvd.allgather(torch.ones(2), name="z") if last else hvd.allreduce(torch.ones(2), name="z"),
        ),
    ):
        said = refused(call)
        assert words in said, said
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size, "the world goes on after an error"


def saves() -> None:
    """Rank 0 does something else for longer than the stall time, after it has waited for the same name itself."""
    rank, size = hvd.rank(), hvd.size()
    for busy in (size - 1, 0):
        if rank == busy:
            time.sleep(2.5)
        assert hvd.allreduce(torch.ones(1), name="w", op=hvd.Sum).item() == size


def joins() -> None:
    rank, size = hvd.rank(), hvd.size()
    for step in range(rank + 1):
        there = size - step
        averaged = hvd.allreduce(torch.full((2,), 4.0))
        assert torch.allclose(averaged, torch.tensor(4.0 * there / size)), "ranks that joined add zeros"
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def trains() -> None:
    """The optimizer: ranks with different data get the parameters of one process with all data."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(rank)

    def build() -> Any:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 3)
        )
        any_model: Any = model
        any_model.to(memory_format=torch.channels_last)
        model.add_module("unused", torch.nn.Linear(2, 2))
        model[1].requires_grad_(False)
        model[1].eval()
        return model

    def optimizer_of(model: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": [*model[3].parameters(), *model.unused.parameters()]},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    data = torch.randn(size, 2, 8, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"groups": 2},
        {"backward_passes_per_step": 2},
        {"gradient_predivide_factor": 2.0},
        {"op": hvd.Sum},
    )
    for options in choices:
        model = build()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        alone = build()
        alone.load_state_dict(model.state_dict())
        named = [(name, each) for name, each in model.named_parameters()]
        optimizer: Any = hvd.DistributedOptimizer(optimizer_of(model), named_parameters=named, **options)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        reference = optimizer_of(alone)
        passes = options.get("backward_passes_per_step", 1)
        for _ in range(3):
            optimizer.zero_grad()
            reference.zero_grad()
            for index in range(passes):
                model[3](model[2](model[0](data[rank, index]))).square().mean().backward()
                for each in range(size):
                    scale = 1 if options.get("op") == hvd.Sum else 1 / size
                    (alone[3](alone[2](alone[0](data[each, index]))).square().mean() * scale).backward()
            assert "race condition" in refused(optimizer.zero_grad, AssertionError)
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            reference.step()
        for mine, its in zip(model.parameters(), alone.parameters()):
            assert torch.allclose(mine, its, atol=1e-5), options

    norm: Any
    torch_norm: Any
    part: Any
    every: Any
    norm, torch_norm = hvd.SyncBatchNorm(4), torch.nn.BatchNorm2d(4)
    whole = torch.randn(size * 3, 4, 5, 5, generator=torch.Generator().manual_seed(5))
    part, every = whole[rank * 3 : rank * 3 + 3].clone().requires_grad_(), whole.clone().requires_grad_()
    norm(part).pow(3).sum().backward()
    torch_norm(every).pow(3).sum().backward()
    assert torch.allclose(norm.running_var, torch_norm.running_var, atol=1e-5)
    assert torch.allclose(part.grad, every.grad[rank * 3 : rank * 3 + 3], atol=1e-3)


def wraps() -> None:
    """An optimizer that a scheduler, a hook or a second wrapper knows still uses the gradients of all ranks, once for each step."""
    rank, size = hvd.rank(), hvd.size()
    for op in (hvd.Average, *([hvd.Adasum] if size != 3 else [])):
        for before in (True, False):
            model = torch.nn.Linear(2, 1)
            torch.nn.init.ones_(model.weight)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            if before:
                scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for _ in range(2):  # the second wrapper replaces the first one
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
            if not before:
                scheduler = torch.optim.swa_utils.SWALR(optimizer, 0.1)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            optimizer.load_state_dict(optimizer.state_dict())
            hooks: list[int] = []
            optimizer.register_step_pre_hook(lambda *_, hooks=hooks: hooks.append(1))
            for step in range(2):
                optimizer.zero_grad()
                model(torch.tensor([[1.0 + rank, 2.0 - rank]])).square().mean().backward()
                optimizer.step()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    scheduler.step()
                assert len(hooks) == step + 1
            weights = hvd.allgather(model.weight.detach())
            assert bool((weights == weights[0]).all()), (op, before, weights)
            assert not bool((weights[0] == 1).any())


def groups_of_parameters() -> None:
    """Ranks make the same groups from names alone: they come there at different times, and list parameters in different orders."""
    rank, size = hvd.rank(), hvd.size()
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(12)])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    parameters = list(model.parameters())

    def build() -> Any:
        listed = parameters if rank == 0 else parameters[::-1]
        return hvd.DistributedOptimizer(torch.optim.SGD(listed, lr=0.1), model.named_parameters(), groups=5)

    optimizer = build() if rank == 0 else None
    hvd.barrier()
    optimizer = optimizer or build()
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    optimizer.step()
    weights = hvd.allgather(torch.cat([each.detach().reshape(1, -1) for each in parameters], 1))
    assert bool((weights == weights[0]).all())
    assert len(weights) == size


def restarts() -> None:
    """`init` after `shutdown`, without threads and connections that stay."""
    for turn in range(3):
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert "hvd.init()" in refused(hvd.rank, ValueError)
        hvd.init()
        hvd.allreduce(torch.ones(1))
        if turn == 0:
            first = threading.active_count(), open_files()
    assert threading.active_count() <= first[0]
    assert open_files() <= first[1] + 2, "connections were closed"


def idles() -> None:
    """A world that has nothing to do costs no CPU."""
    hvd.barrier()
    before = time.process_time()
    time.sleep(1.5)
    spent = time.process_time() - before
    assert spent < 0.05, f"{spent:.3f} s of CPU in 1.5 s of sleep"


def waits() -> None:
    """Wait for a rank that never comes, until the test has killed it."""
    hvd.allreduce(torch.ones(1))
    print("waits", flush=True)
    if hvd.rank() == int(sys.argv[2]):
        time.sleep(600)
    handle = hvd.allreduce_async(torch.ones(1 << 20))
    said = refused(lambda: hvd.synchronize(handle))
    assert f"Rank {sys.argv[2]} has ended" in said or "Rank 0 has ended" in said, said
    assert "shut down" in refused(lambda: hvd.allreduce(torch.ones(1)))


CASES = {
    each.__name__: each
    for each in (operations, orders, mismatches, saves, joins, trains, wraps, groups_of_parameters, restarts, idles)
}


def be_late() -> None:
    """Have this rank call the coordinator a second after all others."""
    connect = socket.create_connection

    def late(*args: Any, **kwargs: Any) -> socket.socket:
        time.sleep(1.0)
        return connect(*args, **kwargs)

    socket.create_connection = late


if __name__ == "__main__":
    if sys.argv[1] == "late" and os.environ["RANK"] != "0":
        be_late()
    hvd.init()
    assert "regroup.job" not in sys.modules, "the import makes no session"
    if sys.argv[1] == "waits":
        waits()
    for case in CASES.values() if sys.argv[1] == "all" else [CASES[name] for name in sys.argv[1:] if name in CASES]:
        case()
        print("passed", case.__name__, flush=True)
    hvd.shutdown()
