"""Makes one object of the optimizers that a script passes, and refuses those that a session cannot use.

A commit steps the optimizer once, with gradients that are equal on all ranks. So an optimizer that evaluates the loss again or that
communicates cannot be used.
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
    """Several optimizers as one. They are stepped one after the other."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Param groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in getattr(optimizer, "param_groups", ())]

    def step(self) -> None:
        """Step each optimizer."""
        for optimizer in self.optimizers:
            step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer by its number."""
        return {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of each optimizer by its number."""
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(i)])


def as_optimizer(optimizer: Any, model: torch.nn.Module) -> Any:
    """Return the script's optimizer, or its list of optimizers as one. Raises UsageError."""
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

    On a GPU torch steps the parameters of a group together. It cannot if they are split over different meshes, or if only some are
    split. Such a group is stepped parameter by parameter, unless the script has set `foreach` or `fused` itself.
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
    """Load a state_dict with the type of each tensor as it was saved.

    torch's own load_state_dict casts the state of a parameter to the parameter's type. Moments in float32 of parameters in bfloat16
    would be rounded, on the ranks that load and on no other. The further differences are:

    - A tensor in its parameter's shape gets the parameter's strides. Fused optimizers go through both side by side, and a state
      from another rank or a file is contiguous.
    - If the optimizer had a tensor of the same shape before, the new one has its device and strides. A script may keep moments in
      host memory.
    - A tensor among the settings of a group, such as the learning rate, stays the same object and gets the saved value. A schedule,
      a compiled step or a captured graph may hold it.

    An object that is no torch optimizer only gets its own load_state_dict called.
    """
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
    """Put the script's own tensors back into the settings of a param group, and copy the loaded values into them."""
    for key, loaded in group.items():
        mine = own.get(key)
        if not isinstance(loaded, torch.Tensor) or not isinstance(mine, torch.Tensor):
            continue
        if (loaded.shape, loaded.dtype) == (mine.shape, mine.dtype):
            group[key] = mine.copy_(loaded)


def _as_saved(loaded: Any, saved: Any, own: Any, parameter: torch.Tensor) -> Any:
    """Return a loaded part of the state, its tensors with saved values and types. `own` is the part before the load."""
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
    """Return the present learning rate of each param group, NaN for a group without one.

    A rate that is a tensor is copied, since a scheduler changes it in place.
    """
    rates = [group.get("lr") for group in getattr(optimizer, "param_groups", ())]
    return tuple(
        rate.clone() if isinstance(rate, torch.Tensor) else math.nan if rate is None else rate for rate in rates
    )


def _check(optimizer: Any, model: torch.nn.Module, name: str) -> None:
    """Raise UsageError for an optimizer that a commit cannot step once on each rank.

    Also raises it for a parameter that the model does not own, which would be no part of the state and of no reduction.
    """
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
