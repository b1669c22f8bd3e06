"""The optimizer, or optimizers, that a script passes: as one object with a state, and what cannot be used refused.

A commit steps it once, with gradients that are equal on all ranks. So one that evaluates the loss again, or that communicates,
cannot be used.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from regroup.checkpoint import shards
from regroup.checkpoint.shards import is_split
from regroup.errors import UsageError

_COMMUNICATE = ("ZeroRedundancyOptimizer", "DistributedOptimizer", "PostLocalSGDOptimizer")
"""Torch's own optimizers whose `step` calls collectives."""


class Together:
    """Several optimizers, stepped one after the other."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all."""
        return [group for optimizer in self.optimizers for group in getattr(optimizer, "param_groups", ())]

    def step(self) -> None:
        """Step each."""
        for optimizer in self.optimizers:
            step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each by its number."""
        return {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(i)])


def as_optimizer(optimizer: Any, model: torch.nn.Module) -> Any:
    """Return what steps the model: `optimizer` itself, or a list of them as one. Raises UsageError."""
    if not isinstance(optimizer, (list, tuple)):
        _check(optimizer, model, "optimizer")
        return optimizer
    if not optimizer:
        raise UsageError("optimizer is an empty list. Pass at least one.")
    seen: dict[int, int] = {}
    for i, one in enumerate(optimizer):
        _check(one, model, f"optimizer[{i}]")
        for group in getattr(one, "param_groups", ()):
            for parameter in group["params"]:
                if seen.setdefault(id(parameter), i) != i or optimizer.index(one) != i:
                    raise UsageError(
                        f"optimizer[{i}] steps a parameter of shape {list(parameter.shape)} that optimizer[{seen[id(parameter)]}] "
                        "steps, too. Give each parameter to one of them."
                    )
    return Together(optimizer)


def step(optimizer: Any) -> None:
    """Step one of the script's own optimizers.

    torch steps the parameters of a group together on a GPU, and cannot where they are split over different meshes, or only some of
    them are. Such a group is stepped parameter by parameter, unless the script has set `foreach` or `fused` itself.
    """
    groups = [
        group
        for group in getattr(optimizer, "param_groups", ())
        if "foreach" in group and group["foreach"] is None and not group.get("fused") and _is_mixed(group["params"])
    ]
    for group in groups:
        group["foreach"] = False
    try:
        optimizer.step()
    finally:
        for group in groups:
            group["foreach"] = None


def _is_mixed(parameters: Sequence[Any]) -> bool:
    if shards.mesh is None:
        return False
    meshes = {one.device_mesh if is_split(one) else None for one in parameters}
    return len(meshes) > 1


def load_exactly(optimizer: Any, state: Any) -> None:
    """Load a state_dict with each tensor as it was saved. Torch's own load_state_dict casts what it keeps of a parameter to the
    parameter's type: moments in float32 of parameters in bfloat16 would be rounded, on the ranks that load and on no other.

    What has its parameter's shape gets the parameter's strides, too, as when the optimizer made it: fused optimizers go through
    both side by side, and a state that comes from another rank or a file is contiguous. Where the optimizer has had a tensor of the
    same shape, its device and its strides count: moments may be kept in host memory. A tensor among the settings of a group,
    such as the learning rate, stays the script's own, with the value that was saved: a schedule, a compiled step or a captured
    graph may hold it, and it is to stay on its device. An object that is no optimizer loads its state by its own load_state_dict
    alone."""
    parts = [one for one in parts_of(optimizer) if isinstance(one, torch.optim.Optimizer)]
    settings = [[dict(group) for group in one.param_groups] for one in parts]
    held = {id(one): dict(one.state) for one in parts}
    optimizer.load_state_dict(state)
    for one, before in zip(parts, settings):
        for group, mine in zip(one.param_groups, before):
            _keep_tensors(group, mine)
    for i, one in enumerate(parts_of(optimizer)):
        if not isinstance(one, torch.optim.Optimizer):
            continue
        saved = (state[str(i)] if isinstance(optimizer, Together) else state).get("state", {})
        ours = [parameter for group in one.param_groups for parameter in group["params"]]
        numbers = [number for group in one.state_dict()["param_groups"] for number in group["params"]]
        for parameter, number in zip(ours, numbers):
            if number in saved and parameter in one.state:
                own = held[id(one)].get(parameter)
                one.state[parameter] = _as_saved(one.state[parameter], saved[number], own, parameter)


def _keep_tensors(group: dict[str, Any], own: dict[str, Any]) -> None:
    """Put the script's own tensors back into the settings of a param group, with the values that were loaded."""
    for key, loaded in group.items():
        mine = own.get(key)
        if not isinstance(loaded, torch.Tensor) or not isinstance(mine, torch.Tensor):
            continue
        if (loaded.shape, loaded.dtype) == (mine.shape, mine.dtype):
            group[key] = mine.copy_(loaded)


def _as_saved(loaded: Any, saved: Any, own: Any, parameter: torch.Tensor) -> Any:
    """Return what was loaded, its tensors with the values and types that were saved. own: what there was before."""
    if isinstance(loaded, dict) and isinstance(saved, dict):
        held: dict[Any, Any] = own if isinstance(own, dict) else {}
        return {key: _as_saved(value, saved.get(key), held.get(key), parameter) for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)) and isinstance(saved, (list, tuple)) and len(loaded) == len(saved):
        mine = own if isinstance(own, (list, tuple)) and len(own) == len(loaded) else [None] * len(loaded)
        return type(loaded)([_as_saved(*three, parameter) for three in zip(loaded, saved, mine)])
    if not isinstance(loaded, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return loaded
    if is_split(loaded):
        return shards.with_values(loaded, saved) if is_split(saved) and loaded.dtype != saved.dtype else loaded
    if loaded.shape != saved.shape:
        return loaded
    like = loaded
    if isinstance(own, torch.Tensor) and own.shape == loaded.shape and not is_split(own):
        like = own
    elif loaded.shape == parameter.shape:
        like = parameter
    device = loaded.device if like is parameter else like.device
    if (loaded.dtype, loaded.stride(), loaded.device) == (saved.dtype, like.stride(), device):
        return loaded
    return torch.empty_like(like, dtype=saved.dtype, device=device, requires_grad=False).copy_(saved)


def parts_of(optimizer: Any) -> list[Any]:
    """Return the script's own optimizers."""
    return optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]


def learning_rates(optimizer: Any) -> tuple[Any, ...]:
    """Return the learning rate of each param group as it is now; NaN for a group without one. A scheduler changes a rate that is
    a tensor in place, so such a rate is copied."""
    rates = [group.get("lr") for group in getattr(optimizer, "param_groups", ())]
    return tuple(
        rate.clone() if isinstance(rate, torch.Tensor) else math.nan if rate is None else rate for rate in rates
    )


def _check(optimizer: Any, model: torch.nn.Module, name: str) -> None:
    """Raise UsageError for an optimizer that cannot be stepped once by each rank, and for a parameter that it steps and the model
    does not own: that would be no part of the state, and its gradient of no reduction."""
    kind = type(optimizer).__name__
    if any(base.__name__ in _COMMUNICATE for base in type(optimizer).__mro__):
        raise UsageError(
            f"{name} is a {kind}, whose step() calls collectives: a rank that dies in it would leave the others with half a step. "
            "Pass the optimizer that it wraps."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            f"{name} is a {kind}, which takes sparse gradients only, and a session sums them as dense ones. Pass torch.optim.Adam; "
            "a layer with sparse=True may stay as it is."
        )
    if not callable(getattr(optimizer, "step", None)):
        raise UsageError(f"{name} is a {kind} without step(). Pass a torch optimizer.")
    if _needs_closure(optimizer):
        raise UsageError(
            f"{name} is a {kind}, whose step() evaluates the loss again in a closure, which would need all ranks each time. Pass "
            "an optimizer whose step() takes no closure."
        )
    owned = {id(parameter) for parameter in model.parameters()}
    for i, group in enumerate(getattr(optimizer, "param_groups", ())):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in owned:
                raise UsageError(
                    f"{name}.param_groups[{i}]['params'][{j}], of shape {list(parameter.shape)}, is not a parameter of "
                    "the model. Put everything that is trained into one module, and pass that as model."
                )


def _needs_closure(optimizer: Any) -> bool:
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty
