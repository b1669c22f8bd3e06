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
    """Return the layout of this process's model, as the script passed it to `mesh`."""
    return _layout


def inner() -> int:
    """Return this process's index in its model group."""
    return _inner


def mesh(*, device: Any = None, **sizes: int) -> Any:
    """Return the DeviceMesh of this process's model group: `mesh = regroup.mesh(shard=2, tensor=2)`, outermost dimension first.

    Call it once, before the model is built. The dimensions:

    - shard: ranks compute different samples and split the parameters (FSDP2)
    - tensor: ranks compute the same samples, each its part of a layer
    - context: ranks compute the same samples, each its part of every sequence (`regroup.attention`)
    - expert: ranks compute different samples and split a layer's experts (`regroup.MixtureOfExperts`)
    - pipeline: ranks compute the same samples, each some of the layers (`regroup.pipeline`)

    `device` is the model's device, a GPU or "cpu", and becomes torch's current one. The default is `regroup.device()`.

    The other ranks of the job hold further copies of the model. Torch's world (`torch.distributed.get_rank()`) is the model group
    from here on. Before the loop begins no rank communicates, so every process must build the model from the same seed.
    Raises UsageError for a mesh that does not fit the workers, dimensions that do not work together, and a missing device.
    """
    global _layout, _inner
    if _layout is not WHOLE:
        raise UsageError("regroup.mesh() was called a second time. Call it once, and take parts of it: mesh['shard'].")
    wanted = Layout.of(sizes)
    workers, processes = _number(env.WORKERS_PER_GROUP, 1), _number(env.LOCAL_WORLD_SIZE, 1)
    place = _number(env.GROUP_PLACE, _number(env.LOCAL_RANK, 0))
    _inner = inner_index(wanted, place, processes, workers)
    _layout = wanted
    here = _device(device)
    accelerator.make_current(here)
    living.start(_inner, wanted.size)
    from torch.distributed.device_mesh import init_device_mesh

    names = tuple(name for name, _ in wanted.dims)
    shards.mesh = init_device_mesh(here.type, tuple(size for _, size in wanted.dims), mesh_dim_names=names)
    _draw_apart(shards.mesh, here)
    if not os.environ.get(env.SOCKET):
        living.bind_alone(here)
    return shards.mesh


def pipeline(
    modules: Any, *, schedule: str = "1f1b", boundaries: Sequence[int] | None = None, stages: int | None = None
) -> "Pipeline":
    """Return the model that this process trains: the modules of its stages in the mesh's `pipeline` dimension.

    Call it after `mesh`, and `step.run()` in each step. Without a pipeline in the mesh the process has all modules, and the same
    script trains. Raises UsageError.

    - `modules`: the whole model, a torch.nn.Sequential or a list. Each module is called with the output of the one before, a tuple
      as several arguments. Names stay, so a checkpoint is that of torch.nn.Sequential(*modules).
    - `schedule`: "gpipe", "1f1b", "interleaved" or "zero_bubble"
    - `boundaries`: number of the first module of each stage but the first. By default the parameters are spread evenly.
    - `stages`: number of stages on each process. The default is 2 for "interleaved", else 1.
    """
    from .parallel.pipeline import make

    num_ranks = dict(_layout.dims).get(PIPELINE, 1)
    rank = _layout.coordinates(_inner).get(PIPELINE, 0)
    model = make(modules, schedule, boundaries, stages, rank, num_ranks)
    edges.plan(model.num_stages)
    return model


def check_device(model: torch.nn.Module) -> None:
    """Raise UsageError for a parameter on another kind of device than the mesh, with which its ranks could not communicate."""
    wanted = shards.mesh.device_type
    for name, parameter in model.named_parameters():
        found = shards.local_of(parameter.detach()).device
        if found.type != wanted:
            to = "regroup.device()" if wanted == "cuda" else f"{wanted!r}"
            raise UsageError(
                f"Parameter {name} of the model is on {found}, and regroup.mesh() is for {wanted}. Move the model to {to} before "
                f"it is split, without an offload policy, or pass device={found.type!r} to regroup.mesh()."
            )


def _device(asked: Any) -> torch.device:
    """Return the device of a mesh from the argument of `mesh`. Raises UsageError."""
    try:
        wanted = None if asked is None else torch.device(asked)
    except (RuntimeError, TypeError):
        wanted = torch.device("meta")
    if wanted is None or (wanted.type == "cuda" and wanted.index is None and torch.cuda.is_available()):
        return accelerator.device()
    if wanted.type == "cpu" or (wanted.type == "cuda" and (wanted.index or 0) < torch.cuda.device_count()):
        return wanted
    raise UsageError(
        f"device of regroup.mesh() is {str(asked)!r}; it must be 'cpu', or a GPU that torch sees "
        f"({torch.cuda.device_count()} here). Leave it out: it is regroup.device() then."
    )


def _draw_apart(mesh: Any, here: torch.device) -> None:
    """Make torch draw random numbers for split tensors on a GPU without communication.

    At the first draw torch makes the whole group agree on a state. A process that joins would wait there for ranks that drew
    before, and a stage of a pipeline for one that never draws. No agreement is needed: ranks with parts of one tensor
    seed their generators alike for each microbatch (`data.rng`). Torch would also use the GPU with the number of the rank, which
    may be another process's.
    """
    if here.type != "cuda":
        return
    from torch.distributed.tensor import _random

    _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
    _random._rng_tracker._device = here


def _number(name: str, default: int) -> int:
    said = os.environ.get(name) or str(default)
    if not said.isdecimal():
        raise UsageError(f"{name} is {said!r}; it must be a whole number. Unset it: Regroup sets it in each process.")
    return int(said)
