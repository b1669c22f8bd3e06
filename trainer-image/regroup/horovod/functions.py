"""Sends parameters, the state of an optimizer, and plain objects from one rank to others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from regroup.horovod import classes, codec, world
from regroup.horovod import operations as ops
from regroup.horovod.process_sets import ProcessSet, global_process_set


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with those of the root. `params` is a state dict, or a list of parameters or of pairs with names."""
    if isinstance(params, Mapping):
        named: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not torch.is_tensor(params) and not isinstance(params, (str, set)):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    # `extra_state` of a module may be anything, and it is no tensor.
    handles = [ops.broadcast_async_(each, root_rank, name) for name, each in named if torch.is_tensor(each)]
    for handle in handles:
        ops.synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Overwrite state and options of the optimizer with those of the root.

    A new optimizer has no state. So it makes one step without gradients' effect, as in Horovod, which leaves zero gradients.
    `model` says which parameters have sparse gradients.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state_dict()["state"]:
        _make_state(optimizer, _sparse_parameters(model))
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer_state")
    if world.rank() != root_rank:
        optimizer.load_state_dict(state)


def _sparse_parameters(model: Any) -> set[int]:
    modules = model.modules() if model is not None else ()
    return {
        id(parameter)
        for module in modules
        if isinstance(module, torch.nn.Embedding) and module.sparse
        for parameter in module.parameters()
    }


def _make_state(optimizer: torch.optim.Optimizer, sparse: set[int]) -> None:
    """Make the step that creates the state. Options that would change parameters without a gradient are zero meanwhile."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (group, {name: group[name] for name in ("weight_decay", "lr") if name in group})
        for group in optimizer.param_groups
    ]
    for group, options in saved:
        for name, value in options.items():
            group[name] = torch.zeros_like(value) if torch.is_tensor(value) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter)
                is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or (
                    isinstance(optimizer, torch.optim.SGD) and id(parameter) in sparse
                )
                parameter.grad = gradient.to_sparse() if is_sparse else gradient
    try:
        classes.class_of_the_user(optimizer).step(
            optimizer
        )  # the step of a distributed optimizer would ask the other ranks
    finally:
        for group, options in saved:
            group.update(options)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of the root. It must be plain data: the other ranks raise TypeError, too, if it is not."""
    name = name or "object"
    content, refused = (b"", "")
    if world.rank() == root_rank:
        content, refused = _encoded(obj)
    head = ops.synchronize(
        ops.broadcast_async(torch.tensor([len(content), bool(refused)]), root_rank, f"{name}.sz", process_set)
    )
    sent = _tensor_of(content) if world.rank() == root_rank else torch.empty(int(head[0]), dtype=torch.uint8)
    received = ops.synchronize(ops.broadcast_async(sent, root_rank, f"{name}.t", process_set))
    if head[1]:
        raise TypeError(_bytes_of(received).decode())
    return obj if world.rank() == root_rank else codec.decode(_bytes_of(received))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks. They must be plain data: all ranks raise TypeError if one of them is not."""
    name = name or "object"
    content, refused = _encoded(obj)
    head = ops.synchronize(
        ops.allgather_async(torch.tensor([[len(content), bool(refused)]]), f"{name}.sz", process_set)
    )
    gathered = ops.synchronize(ops.allgather_async(_tensor_of(content), f"{name}.t", process_set))
    parts = gathered.split(head[:, 0].tolist())
    for part, (_, is_refused) in zip(parts, head.tolist()):
        if is_refused:
            raise TypeError(_bytes_of(part).decode())
    return [codec.decode(_bytes_of(part)) for part in parts]


def _encoded(obj: Any) -> tuple[bytes, str]:
    """Return the bytes to send, and why the object cannot be sent. Then the bytes are that sentence, so that all ranks raise it."""
    try:
        return codec.encode(obj), ""
    except (TypeError, RuntimeError, ValueError) as error:
        return str(error).encode(), str(error)


def _tensor_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
