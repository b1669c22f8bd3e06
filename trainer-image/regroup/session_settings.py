"""The arguments of `regroup.session` as one record, and the checks of their values. Pure.

`regroup.job` and `regroup.wiring` make the checks that also need the environment, the samples or the strategy's parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import strategies
from .checkpoint.shards import local_of
from .checkpoint.tree import unsaved_kind
from .data import LoaderSource, Stream
from .errors import UsageError

REDUCTIONS = ("fast", "exact")
"""Values that a script may pass as `reduction`."""


@dataclass(frozen=True)
class SessionSettings:
    """The arguments of `regroup.session`, whose docstring explains them."""

    model: torch.nn.Module
    optimizer: Any
    data: Any
    global_batch: int | None
    microbatch: int
    state: Mapping[str, Any]
    seed: int
    shuffle: bool | None
    reduction: str
    scaler: Any
    rehearse: bool | None
    strategy: strategies.Description
    batch_per_rank: int | None
    rate_scaling: strategies.RateScaling | None
    noise_scale: bool

    def largest_batch(self, max_world_size: int) -> int:
        """Return the number of samples in a step at the largest number of ranks."""
        batch = self.global_batch if self.batch_per_rank is None else max_world_size * self.batch_per_rank
        assert batch is not None  # `check` refuses it
        return batch


def check(settings: SessionSettings, group_size: int) -> None:
    """Raise UsageError for the first setting that cannot work. `group_size` is the number of ranks in a model group."""
    _check_values(settings)
    _check_batch(settings)
    asked_exact, described = settings.reduction == "exact", settings.strategy
    is_served = isinstance(described, strategies.ParameterServer)  # `regroup.parameter_server.settings` refuses more
    if asked_exact and not is_served and described != strategies.DataParallel():
        raise UsageError(
            f'reduction is "exact" and strategy is {described}: only DataParallel() without options gives the same bits at any '
            'number of processes. Leave out strategy, or pass reduction="fast".'
        )
    asked = {'reduction="exact"': asked_exact, "scaler": settings.scaler is not None}
    if group_size > 1:
        per_rank = {"batch_per_rank": settings.batch_per_rank is not None}
        refuse("{} does not work with regroup.mesh() so far. Leave one of them out.", asked | per_rank)
    if settings.noise_scale:
        # In these no rank has the gradient of its own share, or the norm of one that is comparable with the sum's.
        kind = f"strategy {type(described).__name__}"
        rounds = {kind: isinstance(described, (strategies.LocalSGD, strategies.DiLoCo))}
        hook = {"a PowerSGD hook": isinstance(getattr(described, "hook", None), strategies.PowerSGD)}
        mesh = {"regroup.mesh()": group_size > 1}
        refuse("noise_scale=True does not work with {}. Leave one of them out.", asked | rounds | hook | mesh)


def refuse(sentence: str, asked: Mapping[str, bool]) -> None:
    """Raise UsageError if an entry of `asked` is True. Its name replaces `{}` in the sentence."""
    for name, is_asked in asked.items():
        if is_asked:
            raise UsageError(sentence.format(name))


def _check_values(settings: SessionSettings) -> None:
    """Raise UsageError for a value that is wrong by itself."""
    model, state, seed = settings.model, settings.state, settings.seed
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    _refuse_meta(model)
    _refuse_layouts(model)
    _refuse_synchronised(model)
    if not isinstance(state, Mapping):
        raise UsageError(f'state is a {type(state).__name__}; it must be a dict: state={{"schedule": schedule}}.')
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(f"seed is {seed!r}; it must be a whole number.")
    for name, choices, words in (
        ("reduction", REDUCTIONS, '"fast" or "exact"'),
        ("rehearse", (None, True, False), "True, False, or None: where the model is compiled"),
        ("noise_scale", (True, False), "True or False"),
        ("shuffle", (None, True, False), "True or False"),
    ):
        if getattr(settings, name) not in choices:
            raise UsageError(f"{name} is {getattr(settings, name)!r}; it must be {words}.")
    if not isinstance(settings.strategy, strategies.Description):
        raise UsageError(
            f"strategy is a {type(settings.strategy).__name__}; it must be one of regroup.strategies, such as "
            "regroup.strategies.DataParallel()."
        )
    if not isinstance(settings.rate_scaling, strategies.RateScaling | None):
        raise UsageError(
            f"rate_scaling is a {type(settings.rate_scaling).__name__}; it must be None or one of regroup.strategies, such as "
            "regroup.strategies.RateScaling(base_batch=256)."
        )


def _check_batch(settings: SessionSettings) -> None:
    """Raise UsageError if the batch is not chosen in exactly one way, or if the other settings do not fit that way."""
    per_rank, microbatch, described = settings.batch_per_rank, settings.microbatch, settings.strategy
    if (settings.global_batch is None) == (per_rank is None):
        raise UsageError(
            f"global_batch is {settings.global_batch!r} and batch_per_rank is {per_rank!r}; exactly one of them must be given. "
            "Pass global_batch for a step that is the same at any number of processes."
        )
    if per_rank is None:
        if settings.rate_scaling is not None:
            raise UsageError(
                "rate_scaling is set, and global_batch never changes. Pass batch_per_rank, or leave it out."
            )
        return
    if not isinstance(per_rank, int) or isinstance(per_rank, bool) or per_rank < 1:
        raise UsageError(f"batch_per_rank is {per_rank!r}; it must be a whole number of at least 1.")
    if isinstance(microbatch, int) and microbatch > 0 and per_rank % microbatch:
        raise UsageError(f"batch_per_rank ({per_rank}) is not a multiple of microbatch ({microbatch}). Change one.")
    if settings.reduction == "exact":
        raise UsageError(
            'reduction is "exact" and batch_per_rank is set: steps that differ by the number of processes have no equal bits. Pass '
            'global_batch, or reduction="fast".'
        )
    if isinstance(described, (strategies.LocalSGD, strategies.DiLoCo)):
        raise UsageError(
            f"batch_per_rank does not work with strategy {type(described).__name__} so far. Pass global_batch."
        )
    if isinstance(described, strategies.DataParallel) and described.uneven:
        raise UsageError(
            "batch_per_rank is set, which gives each process the same work, and strategy is DataParallel(uneven=True). Pass "
            "global_batch, or leave out uneven."
        )


def shuffles(asked: bool | None, source: Any) -> bool:
    """Return whether each epoch has an order of its own, from the argument `shuffle` and the data. Raises UsageError."""
    if isinstance(source, LoaderSource):
        if asked is not None:
            raise UsageError(
                f"shuffle is {asked} and data is a DataLoader, whose own shuffle ({not source.in_order}) counts. Leave out "
                "shuffle, and pass it to the DataLoader."
            )
        return not source.in_order
    if isinstance(source, Stream) and asked is not None:
        raise UsageError(f"shuffle is {asked} and data is a stream, which has an order of its own. Leave out shuffle.")
    return asked is None or bool(asked)


def _refuse_meta(model: torch.nn.Module) -> None:
    """Raise UsageError for a tensor of the model on the meta device. Subclasses are left out: one may hold its values elsewhere."""
    for what, named in (("Parameter", model.named_parameters()), ("Buffer", model.named_buffers())):
        for name, tensor in named:
            local = getattr(tensor, "_local_tensor", tensor)
            if local.is_meta and type(local) in (torch.Tensor, torch.nn.Parameter):
                raise UsageError(
                    f"{what} {name} of the model is on the meta device, so it has no values: call "
                    "model.to_empty(device=...) and initialise the model before regroup.session(), or build it on its device."
                )


def _refuse_layouts(model: torch.nn.Module) -> None:
    """Raise UsageError for a tensor of the model that cannot be compared, copied and saved byte by byte, such as a sparse one.

    The check does not rely on `state_dict`, from which a module may hide tensors.
    """
    left_alone = {
        id(module._buffers[name]) for module in model.modules() for name in module._non_persistent_buffers_set
    }
    for what, named in (("Parameter", model.named_parameters()), ("Buffer", model.named_buffers())):
        for name, tensor in named:
            local = local_of(tensor)
            if id(tensor) in left_alone:
                continue
            if (kind := unsaved_kind(local)) is not None:
                raise UsageError(
                    f"{what} {name} of the model is a {kind} tensor, and a session compares, copies and saves dense ones only. "
                    "Register it as a buffer with persistent=False if the script can build it again: the session leaves such "
                    "buffers alone. Otherwise store its parts in dense buffers."
                )
            if any(stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride())):
                raise UsageError(
                    f"{what} {name} of the model has strides {list(local.stride())} for shape {list(local.shape)}: several "
                    "elements share one place in memory, so no state can be loaded into it. Make it contiguous."
                )


def _refuse_synchronised(model: torch.nn.Module) -> None:
    """Raise UsageError for a layer that communicates over torch's default process group, such as SyncBatchNorm.

    A session has no such group, so the layer would silently use the statistics of its own rank.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"{name or 'The model'} is a SyncBatchNorm, which would see the samples of its own rank only: a session has no "
                "default process group. Use BatchNorm, whose running statistics the session averages, or a norm that does not "
                "depend on the batch, such as GroupNorm."
            )
