"""`regroup.mesh()`: the ranks that together hold one copy of the model, as torch's DeviceMesh.

A script calls it before it builds the model, and splits the model over it with torch's own functions (FSDP2, tensor parallel).
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import accelerator
from .checkpoint import shards
from .errors import UsageError
from .generation import edges, living
from .layout import PIPELINE, WHOLE, Layout, inner_index
from .protocol import env

if TYPE_CHECKING:
    from .parallel.pipeline import Pipeline

_layout = WHOLE
_inner = 0


def layout() -> Layout:
    """Return how this process's model is split: what `mesh` was called with."""
    return _layout


def inner() -> int:
    """Return this process's index in its model group."""
    return _inner


def mesh(*, device: Any = None, **sizes: int) -> Any:
    """Return the DeviceMesh of this process's model group: `mesh = regroup.mesh(shard=2, tensor=2)`, outermost dimension first.

    Call it once, before the model is built. shard: ranks that compute different samples and split the parameters (FSDP2); tensor:
    ranks that compute the same samples, each its part of a layer; context: each its part of every sequence (`regroup.attention`);
    expert: ranks that compute different samples and split a layer's experts (`regroup.MixtureOfExperts`); pipeline: ranks that
    compute the same samples, each some of the layers (`regroup.pipeline`). The other ranks of the job hold further copies of the
    model. Torch's world (`torch.distributed.get_rank()`) is the model group from then on. Until the loop begins there is nobody to
    communicate with: every process builds the model from the same seed. device: the model's, such as "cpu"; None:
    `regroup.device()`.
    Raises UsageError for a mesh that does not fit the workers, and for dimensions that do not work together.
    """
    global _layout, _inner
    if _layout is not WHOLE:
        raise UsageError("regroup.mesh() was called a second time. Call it once, and take parts of it: mesh['shard'].")
    wanted = Layout.of(sizes)
    here = _device_of(device)
    workers, processes = _number(env.WORKERS_PER_GROUP, 1), _number(env.LOCAL_WORLD_SIZE, 1)
    place = _number(env.GROUP_PLACE, _number(env.LOCAL_RANK, 0))
    _inner = inner_index(wanted, place, processes, workers)
    _layout = wanted
    accelerator.make_current(here)
    living.start(_inner, wanted.size)
    from torch.distributed.device_mesh import init_device_mesh

    names = tuple(name for name, _ in wanted.dims)
    shards.mesh = init_device_mesh(here.type, tuple(size for _, size in wanted.dims), mesh_dim_names=names)
    if here.type == "cuda":
        _draw_without_asking(shards.mesh, here)
    if not os.environ.get(env.SOCKET):
        living.bind_alone(here)
    return shards.mesh


def pipeline(
    modules: Any, *, schedule: str = "1f1b", boundaries: Sequence[int] | None = None, stages: int | None = None
) -> "Pipeline":
    """Return the model that this process trains: those of `modules` that are in its stages of the mesh's `pipeline` dimension.

    modules: a torch.nn.Sequential or a list, the whole model, each called with what the one before returns (a tuple as several
    arguments). They keep their names, so a checkpoint is that of torch.nn.Sequential(*modules). Without a pipeline in the mesh the
    process has them all, and the same script trains. schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble". boundaries: the
    number of the module with which each stage but the first begins; None: so that the parameters are spread evenly. stages: on each
    process; None: 2 for "interleaved", else 1. Call it after `mesh`, and step.run() in each step. Raises UsageError.
    """
    from .parallel.pipeline import make

    num_ranks = dict(_layout.dims).get(PIPELINE, 1)
    rank = _layout.coordinates(_inner).get(PIPELINE, 0)
    model = make(modules, schedule, boundaries, stages, rank, num_ranks)
    edges.plan(model.num_stages)
    return model


def check_device(model_device: torch.device) -> None:
    """Raise UsageError where the model is not on the device that `mesh` was made for."""
    if shards.mesh is not None and shards.mesh.device_type != model_device.type:
        raise UsageError(
            f"The model is on {model_device}, and regroup.mesh() was made for {shards.mesh.device_type}. Move the model with "
            f"model.to(regroup.device()) before it is split, or pass device={model_device.type!r} to regroup.mesh()."
        )


def _device_of(said: Any) -> torch.device:
    """Return the device that a script means. Raises UsageError."""
    if said is None:
        return accelerator.device()
    try:
        wanted = torch.device(said)
    except (RuntimeError, TypeError):
        wanted = torch.device("meta")
    if wanted.type not in ("cpu", "cuda"):
        raise UsageError(
            f'device of regroup.mesh() is {said!r}; it must be "cuda", "cpu", or a torch.device of these. Leave it out to have '
            "regroup.device()."
        )
    if wanted.type == "cpu" or wanted.index is not None:
        return wanted
    here = accelerator.device()
    if here.type != "cuda":
        raise UsageError(
            f"device of regroup.mesh() is {said!r}, and this process sees no GPU. Leave it out to train on the CPU."
        )
    return here


def _draw_without_asking(made: Any, here: torch.device) -> None:
    """Let random operations of a DTensor on a GPU communicate with nobody. A session seeds the ranks of a microbatch alike.

    Torch would compare the seeds of all ranks at the first such operation, and a process that joins later would do so alone.
    """
    from torch.distributed.tensor import _random

    tracker = _random.OffsetBasedRNGTracker(made, run_state_sync=False)
    tracker._device = here  # torch takes the one of this number in the model group
    _random._rng_tracker = tracker


def _number(name: str, default: int) -> int:
    said = os.environ.get(name) or str(default)
    if not said.isdecimal():
        raise UsageError(f"{name} is {said!r}; it must be a whole number. Unset it: Regroup sets it in each process.")
    return int(said)
