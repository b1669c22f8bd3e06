"""FSDP2 inside a model group: what a session needs of the modules that `fully_shard` made.

FSDP2 averages over its group and hangs its state on the modules. Here the sum over all samples is divided once, by the weight of
the batch. A forward or backward that was cut off leaves parameters gathered and gradients half reduced.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from regroup import torch_versions


def modules_of(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the modules that `fully_shard` was applied to. Nothing is imported for a model without any."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield from (module for module in model.modules() if isinstance(module, fsdp.FSDPModule))


def _served(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the modules that `fully_shard` was applied to. Raises UsageError where torch is too old for them in a session."""
    for module in modules_of(model):
        torch_versions.require_fsdp()
        yield module


def sum_gradients(model: torch.nn.Module) -> None:
    """Make reductions inside the model group sums instead of averages, of all parameters that were gathered.

    What a rank has not used counts as zero. Else ranks that have used different ones would sum tensors of different sizes, and
    gloo ends the process. Raises UsageError where torch is too old for it."""
    for module in _served(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)


class Uses:
    """Watches which split parameters got a gradient on this rank. FSDP2 hands over the sum, which all ranks of the group get."""

    def __init__(self, model: torch.nn.Module, on_use: Callable[[torch.Tensor], None]) -> None:
        """`on_use(split parameter)` is called from autograd for each, before its sum begins.

        Raises UsageError where torch is too old for it.
        """
        self._parameters = [
            parameter
            for module in _served(model)
            for group in module._get_fsdp_state()._fsdp_param_groups
            for parameter in group.fsdp_params
        ]
        self._on_use = on_use
        self._watched: dict[int, tuple[torch.Tensor, Any]] = {}
        """The gathered parameter, which torch makes when it is first used, and the hook's handle. The key is a place in
        `_parameters`."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The split ones."""
        return [parameter.sharded_param for parameter in self._parameters]

    def watch(self) -> None:
        """Look at what the forward has gathered for the first time: its backward begins."""
        for at, parameter in enumerate(self._parameters):
            gathered = getattr(parameter, "_unsharded_param", None)
            known = self._watched.get(at)
            if gathered is None or not gathered.requires_grad or (known is not None and known[0] is gathered):
                continue
            if known is not None:
                known[1].remove()
            self._watched[at] = gathered, gathered.register_post_accumulate_grad_hook(self._hook(parameter))

    def close(self) -> None:
        """Remove the gradient hooks from the gathered parameters. `on_use` is then no longer called."""
        for _, handle in self._watched.values():
            handle.remove()
        self._watched = {}

    def _hook(self, parameter: Any) -> Callable[[torch.Tensor], None]:
        return lambda _gathered: self._on_use(parameter.sharded_param)


def begin_anew(model: torch.nn.Module) -> None:
    """Forget what a forward or backward that did not end has left: all parameters are split again, without gradients.
    Communicates with nobody.

    torch 2.13's `reset_iter_state` leaves two things. It waits for a gather that was begun, which may be one of a group that has
    ended. And gradients of whole parameters whose reduction had not begun stay, and would be added to those of the next backward.
    """
    for module in modules_of(model):
        state = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            group._all_gather_result = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                    gathered.grad = None
    for module in modules_of(model):
        if module._get_fsdp_state()._is_root:  # only a root may be asked; before its first forward there is none
            module.reset_iter_state()


class Order:
    """The order in which this rank has run the modules of a step, as a hash. Ranks of a group gather their parameters together. A
    rank that runs another module than the others would compute with that module's parameters, if they have the same size."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.hash = 0
        self._handles = [
            module.register_forward_pre_hook(self._hook(number)) for number, module in enumerate(modules_of(model), 1)
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, number: int) -> Callable[..., None]:
        def ran(*_: object) -> None:
            self.hash = (self.hash * 1_000_003 + number) & ((1 << 63) - 1)

        return ran
