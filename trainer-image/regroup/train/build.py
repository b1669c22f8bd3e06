"""Applies a configuration to a task's model: device, split, recomputation, compilation, optimizer, learning rate.

Each function makes one choice. `prepare` has the order in which they apply to the model.
"""

import math
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import regroup
from regroup import accelerator, strategies
from regroup.checkpoint.shards import is_split
from regroup.errors import UsageError

from . import sections
from .config import Config, ConfigError
from .tasks.task import Chain, Task

_aten = torch.ops.aten
SAVED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Operations with most of the time of a forward pass. Selective recomputation keeps their results."""
ALIGNED = 64
"""Multiple to which the classes of a compiled output layer are rounded up on a GPU. A width of 50257 gives unaligned kernels."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(name: str) -> torch.device:
    """Return the device on which this process trains. Of several GPUs it is that of the local rank. Raises ConfigError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device ('cuda') needs a GPU, and torch sees none. Write device: cpu, or request a GPU for the worker."
        )
    try:
        return accelerator.device()
    except UsageError as error:  # fewer GPUs than processes
        raise ConfigError(str(error)) from None


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError if torch.compile would find no compiler. torch reports that in the first step, in a long traceback."""
    if device.type == "cpu":
        found, wanted = shutil.which(os.environ.get("CXX", "g++")), "C++ compiler (g++, or the one that CXX names)"
    else:  # Triton's
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        found, wanted = next(filter(None, map(shutil.which, names)), None), "C compiler (gcc, or the one that CC names)"
    if found is None:
        raise ConfigError(f"compile (true) needs a {wanted}, and none is found. Install one, or write compile: false.")


def mesh_of(settings: Config, device: torch.device) -> Any:
    """Return the DeviceMesh of this process's model group, or None if the model is not split.

    Called once, before the model is built. Raises ConfigError for a mesh that does not fit the workers.
    """
    sizes = settings.mesh.sizes if settings.mesh is not None else {}
    if not sizes:
        return None
    try:
        return regroup.mesh(device=device, **sizes)
    except UsageError as error:
        raise ConfigError(str(error)) from None


def prepare(task: Task, settings: Config, mesh: Any) -> torch.nn.Module:
    """Split a task's model over `mesh` and set how it runs, in place. Names of parameters stay.

    Returns the model to train, which in a pipeline has this process's stages only. torch needs this order:

    1. layers are split (tensor, context, expert)
    2. blocks are recomputed and compiled, recomputation within the compiled part
    3. parameters are split (FSDP2), which gathers them around a whole block
    4. the row of blocks is cut into stages
    """
    model, dims = task.model, mesh.mesh_dim_names if mesh is not None else ()
    if "tensor" in dims:
        split_layers(task, mesh["tensor"])
    if "context" in dims:
        assert task.split_sequences is not None, "refusals.py refuses context for this task"
        assert settings.mesh is not None
        task.split_sequences(mesh["context"], settings.mesh.attention)
    if "expert" in dims:
        split_experts(model, mesh["expert"])
    prepare_blocks(model.blocks, settings.activation_checkpointing, settings.compile)
    if settings.compile and mesh is None:
        prepare_loss(model)
    if "shard" in dims:
        assert settings.mesh is not None
        split_parameters(model, mesh["shard"], reshard=settings.mesh.reshard, is_row="pipeline" in dims)
    if "pipeline" in dims:
        return cut(model, settings)
    return model


def split_layers(task: Task, mesh: Any) -> None:
    """Split the layers of each block by the task's plan (tensor parallel)."""
    from torch.distributed.tensor.parallel import parallelize_module

    assert task.layers is not None, "refusals.py refuses tensor for this task"
    for block, plan in zip(task.model.blocks, task.layers(), strict=True):
        parallelize_module(block, mesh, plan)


def split_experts(model: torch.nn.Module, mesh: Any) -> None:
    """Keep only this process's experts of each mixture."""
    for module in list(model.modules()):
        if isinstance(module, regroup.MixtureOfExperts):
            module.split(mesh)


def split_parameters(model: Chain, mesh: Any, *, reshard: bool, is_row: bool) -> None:
    """Split the parameters of each block by itself, so that one block is whole at a time, then those outside of blocks (FSDP2).

    With `reshard` a block's parameters are split again after its forward, else after its backward. With `is_row` the model is never
    called as a whole, so each of its modules is split by itself.
    """
    from torch.distributed.fsdp import fully_shard

    for module in model if is_row else model.blocks:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    if not is_row:
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def cut(model: Chain, settings: Config) -> torch.nn.Module:
    """Return this process's stages of a pipeline. Raises ConfigError.

    The session calls forward module by module, so each module gets the precision.
    """
    assert settings.mesh is not None
    device_type = next(model.parameters()).device.type
    for module in model:
        module.forward = in_precision(module.forward, settings.precision, device_type)
    try:
        # Sequential, since a pipeline takes a row without a forward of its own.
        row = torch.nn.Sequential(OrderedDict(zip(model._modules, model)))
        return regroup.pipeline(row, schedule=settings.mesh.schedule)
    except UsageError as error:
        raise ConfigError(str(error)) from None


def in_precision(forward: Callable[..., Any], precision: str, device_type: str) -> Callable[..., Any]:
    """Return a function that calls `forward` under autocast in this precision."""
    if precision == "float32":
        return forward

    def run(*inputs: Any) -> Any:
        with torch.autocast(device_type, DTYPES[precision]):
            return forward(*inputs)

    return run


def prepare_blocks(blocks: Any, recompute: str, compiles: bool, backend: str = "inductor") -> None:
    """Recompute and compile each block of a model, in place. `recompute` is the field activation_checkpointing."""
    for block in blocks:
        if recompute != "none":
            block.forward = _recomputed(block.forward, recompute)
        if compiles:
            block.compile(backend=backend)


def prepare_loss(model: Any, backend: str = "inductor") -> None:
    """Compile the output layer together with the loss, in place. Names and shapes of parameters stay.

    The blocks stay regions of their own, which share one graph. A model compiled as a whole gives all gradients at the end
    of its backward, so that no bucket could be sent during it.
    """
    if next(model.parameters()).device.type == "cuda":
        model.align(ALIGNED)
    model.loss = torch.compile(model.loss, backend=backend)


def _recomputed(forward: Callable[..., Any], recompute: str) -> Callable[..., Any]:
    context: dict[str, Any] = {"context_fn": _selective} if recompute == "selective" else {}

    # This function gives torch.compile a frame: it skips those of torch.utils.checkpoint, with everything that they call.
    def run(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **context)

    return run


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def optimizer_of(settings: sections.Sgd | sections.AdamW, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with weight decay only for parameters of two and more dimensions.

    AdamW is fused (one kernel for all parameters) if the model is whole, since the kernel does not take different meshes together.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if isinstance(settings, sections.Sgd):
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum)
    betas = (settings.beta1, settings.beta2)
    is_whole = not any(is_split(parameter) for parameter in parameters)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=is_whole or None)


def strategy_of(settings: Config) -> strategies.Description:
    """Return the session's strategy. LocalSGD and DiLoCo clip in their inner steps, so they get `max_norm`."""
    strategy = settings.strategy
    if isinstance(strategy, sections.DataParallel):
        return strategies.DataParallel(
            hook=hook_of(settings.hook), algorithm=strategy.algorithm, uneven=strategy.uneven
        )
    values = strategy.model_dump(exclude={"name"})
    if isinstance(strategy, sections.ParameterServer):
        return strategies.ParameterServer(**values)
    kind = strategies.LocalSGD if isinstance(strategy, sections.LocalSgd) else strategies.DiLoCo
    return kind(max_norm=settings.max_norm, **values)


def hook_of(settings: sections.Rounded | sections.PowerSgd | None) -> str | strategies.PowerSGD | None:
    """Return the session's hook for the compression of gradients, or None."""
    if isinstance(settings, sections.PowerSgd):
        return strategies.PowerSGD(**settings.model_dump(exclude={"name"}))
    return settings.name if settings is not None else None


def rate_scaling_of(settings: sections.RateScaling | None) -> strategies.RateScaling | None:
    """Return the session's rate scaling, or None."""
    return None if settings is None else strategies.RateScaling(**settings.model_dump())


def rate_factor(settings: sections.Constant | sections.Decay, step: int, steps: int) -> float:
    """Return the factor of the learning rate in step `step`, counted from 0, of `steps`. Pure."""
    warmup = settings.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if isinstance(settings, sections.Constant):
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    left = 1 - done if settings.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.final_fraction + (1 - settings.final_fraction) * left


def schedule_of(settings: Config, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning rate schedule, a function of the number of committed steps."""
    # torch warns if the first step overflowed and was skipped (float16), since the schedule is ahead of the optimizer then.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(settings.schedule, step, settings.steps)
    )
