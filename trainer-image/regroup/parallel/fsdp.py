"""FSDP2 inside a model group: what a session needs of the modules that `fully_shard` made.

FSDP2 averages over its group and hangs its state on the modules. Here the sum over all samples is divided once, by the weight of
the batch; and a forward or backward that was cut off leaves parameters gathered and gradients half reduced.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch


def modules_of(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the modules that `fully_shard` was applied to. Nothing is imported for a model without any."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield from (module for module in model.modules() if isinstance(module, fsdp.FSDPModule))


def sum_gradients(model: torch.nn.Module) -> None:
    """Make reductions inside the model group sums instead of averages."""
    for module in modules_of(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


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
