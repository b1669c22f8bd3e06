"""Torch's process groups inside a model group: one Python object each, which outlives generations.

Torch's world in each process is its *model group*: rank = inner index, size = m. So torch's ranks, meshes and group names never
change. FSDP2, tensor parallel, DTensors and compiled code are built on them, and stay as they are while members come and go. Each
group that torch makes is a `LivingGroup`: it hands every collective to a target, and a generation binds another target to it.
Until the first generation the target is nobody: a script builds its model alone, from the same seed as everybody else.

Waits are those of `Groups`: they end when the generation does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    FakeProcessGroup,
    HashStore,
    PrefixStore,
    ProcessGroup,
    ReduceOp,
    Work,
)

from regroup.errors import GenerationChanged, UsageError

from . import nccl
from .backends import Backend
from .groups import Groups, Part, Pending, open_gloo
from .origins import collective
from .sockets import device_alone

NAME = "regroup"
"""Torch's name of the backend."""
_SLICED = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "broadcast",
    "reduce",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "scatter",
)
"""Collectives of a ProcessGroup that `Groups.wait` can wait for in slices."""
_SCATTERED: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    **dict.fromkeys(("reduce_scatter_single", "_reduce_scatter_base"), lambda output, whole: ([output], [whole])),
    **dict.fromkeys(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        lambda outputs, wholes: (outputs, wholes),
    ),
    "reduce_scatter": lambda outputs, lists: (
        outputs,
        [torch.cat([one.reshape(-1) for one in parts]) for parts in lists],
    ),
}
"""Reduce-scatters of a ProcessGroup. Each function turns the arguments into a list of outputs and a list of summed tensors."""
_WHOLE = ("send", "recv", "recv_anysource")
"""gloo closes the pair when a wait for one of these times out."""


class Apart(GenerationChanged):
    """This process's model group is not all in a block of the user's collectives, so its model cannot compute there."""


class LivingGroup(ProcessGroup):
    """A process group of torch's whose members and connections a generation exchanges. `ranks`: inner indexes."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.living_name, self.ranks = name, ranks
        """`living_name`: torch's, as it was when the group was made."""
        self._at = rank
        self._groups: Groups | None = None
        self._target = self._nobody()

        self._on_gpu: Any = None
        """The target for tensors on a GPU, where there is one."""
        self._gloo: Any = None
        self._nccl: Any = None
        """The targets' backends, in a generation."""

    @property
    def is_offline(self) -> bool:
        """No generation has been bound yet: there is nobody to communicate with."""
        return self._groups is None

    def bind(self, groups: Groups, part: Part) -> None:
        """Use this generation's connections from now on. They are the generation's to let go."""
        self._target = self._serve("cpu", part.backend, groups)
        self._on_gpu = None if part.nccl is None else self._serve("cuda", part.nccl, groups)
        self._gloo, self._nccl, self._groups = part.backend, part.nccl, groups

    def bind_alone(self, device: torch.device) -> None:
        """Plain `python` on a device: a group of one, for good."""
        self._target = self._serve("cpu", open_gloo(HashStore(), 0, 1, device_alone()))
        if nccl.serves(device):
            self._on_gpu = self._serve("cuda", nccl.open_backend(HashStore(), 0, 1))

    def _serve(self, device_type: str, backend: Backend, groups: Groups | None = None) -> Any:
        target = ProcessGroup(HashStore(), self._at, len(self.ranks))
        kind = ProcessGroup.BackendType
        backend.serve(target, device_type, kind.NCCL if backend.on_gpu else kind.GLOO)
        if groups is not None:
            groups.keep(target, backend)  # a part's backend: released with it
        return target

    def call(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Start a collective on the target; return torch's Work."""
        groups, target = self._groups, self._target_for((*arguments, *options.values()))
        if groups is None:
            return getattr(target, kind)(*arguments, **options)
        groups.check_use()
        check_together()
        on_gpu = target is self._on_gpu
        if on_gpu:
            nccl.with_work((*arguments, *options.values()))
        with collective(groups.failed):
            work = getattr(target, kind)(*arguments, **options)
        if work is None:  # between `_start_coalescing` and `_end_coalescing`, which returns it for all
            return None
        if on_gpu:
            waits = _Sliced if nccl.hold_places((*arguments, *options.values())) else _Ordered
            return waits(groups.started(work, self._nccl), groups)
        return work if kind in _WHOLE else _Sliced(Pending(work, self._gloo), groups)

    def barrier(self, opts: Any = None) -> Any:  # noqa: ARG002
        """Wait for the others: the host does, so by gloo wherever the tensors are."""
        options = BarrierOptions()
        options.device = torch.device("cpu")
        return self.call("barrier", (options,), {})

    def scatters(self, arguments: Sequence[Any]) -> bool:
        """Return whether the backend for these tensors has a reduce-scatter of its own."""
        return self._target_for(arguments) is self._on_gpu

    def sum_and_scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], operation: Any) -> Any:
        """Reduce each input over the group, and put this rank's part of it into its output; return torch's Work.

        gloo's own reduce-scatter is this, too: an all-reduce and a copy (torch 2.13). But a wait for that takes no notice of its
        time limit, so nothing could end it where gloo has forgotten a message.
        """
        options = AllreduceOptions()
        options.reduceOp = operation
        wholes = [one.clone() for one in inputs]
        works = [self.call("allreduce", ([whole], options), {}) for whole in wholes]
        size = len(self.ranks)
        parts = [(out, whole.view(size, -1)[self._at]) for out, whole in zip(outputs, wholes)]
        return _Scattered(works, parts)

    def _target_for(self, arguments: Sequence[Any]) -> Any:
        if self._on_gpu is None:
            return self._target
        device = _first_device(arguments)
        return self._target if device is None or not nccl.serves(device) else self._on_gpu

    def _nobody(self) -> Any:
        target = ProcessGroup(HashStore(), self._at, len(self.ranks))
        backend = FakeProcessGroup._create_internal(self._at, len(self.ranks))
        for device_type in ("cpu", "cuda"):
            target._register_backend(torch.device(device_type), ProcessGroup.BackendType.GLOO, backend)
        target._set_default_backend(ProcessGroup.BackendType.GLOO)
        return target

    # --- what torch asks a group ---------------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._at

    def size(self) -> int:
        return len(self.ranks)

    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return self._target_for([device])._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        self._target_for([device])._start_coalescing(device)

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupDesc(self) -> str:
        return NAME

    def _set_group_desc(self, text: str) -> None:
        pass

    setGroupDesc = _set_group_desc

    @property
    def group_desc(self) -> str:
        return NAME

    def shutdown(self) -> None:
        pass


def _delegate(kind: str) -> Any:
    def call(self: LivingGroup, *arguments: Any, **options: Any) -> Any:
        return self.call(kind, arguments, options)

    return call


def _scatter(kind: str) -> Any:
    def call(self: LivingGroup, outputs: Any, inputs: Any, options: Any = None) -> Any:
        if self.scatters((outputs,)):
            return self.call(kind, (outputs, inputs) if options is None else (outputs, inputs, options), {})
        return self.sum_and_scatter(*_SCATTERED[kind](outputs, inputs), _operation(options))

    return call


def _first_device(values: Sequence[Any]) -> torch.device | None:
    for value in values:
        found = _first_device(value) if isinstance(value, (list, tuple)) else getattr(value, "device", value)
        if isinstance(found, torch.device):
            return found
    return None


def _operation(options: Any) -> Any:
    return ReduceOp.SUM if options is None else options.reduceOp


for _kind in (*_SLICED, *_WHOLE, "_end_coalescing"):
    setattr(LivingGroup, _kind, _delegate(_kind))
for _kind in _SCATTERED:
    setattr(LivingGroup, _kind, _scatter(_kind))


class _Sliced(Work):
    """A collective whose wait ends with its generation."""

    def __init__(self, pending: Pending, groups: Groups) -> None:
        super().__init__()
        self._pending, self._groups = pending, groups

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Wait for it. Raises what `Groups.wait` does. No clock ends it: membership does."""
        self._groups.wait([self._pending])
        return True

    def is_completed(self) -> bool:
        return self._groups.is_completed(self._pending.work)

    def get_future(self) -> Any:
        return self._pending.work.get_future()

    def exception(self) -> Any:
        return self._pending.work.exception()


class _Ordered(_Sliced):
    """A collective on the GPU. Its wait is one of the GPU, as torch's own: the host goes on.

    Whether it has succeeded is known at the commit. A rank sends its row once the sums over the copies have ended, which come after
    it. An abort that ends it early ends that wait, too (docs/design/adr/0029-parts-of-a-model.md).
    """

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Have the current stream wait for it. Raises what `Groups.order` does."""
        self._groups.order([self._pending])
        return True


class _Scattered(Work):
    """A reduce-scatter: all-reduces, and then this rank's part of each into its output."""

    def __init__(self, works: Sequence[Any], parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._works, self._parts = works, parts

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Wait for it. Raises what `Groups.wait` does."""
        for work in self._works:
            work.wait()
        for output, part in self._parts:
            output.copy_(part.view_as(output))
        self._parts = ()
        return True

    def is_completed(self) -> bool:
        """Return whether it has been waited for, as gloo's own does."""
        return not self._parts


_living: dict[str, LivingGroup] = {}
"""The groups by torch's name. Torch makes them in the script's order, which is the same in every process; it never ends one."""
_bound_to: Groups | None = None
_refused = False
"""This process is in a block of the user's collectives without the rest of its model group."""


def start(inner: int, size: int) -> None:
    """Make this process's model group torch's world, with nobody else in it yet. Raises UsageError where torch has a world."""
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed is initialized already, and the model group of regroup.mesh() is to be its world. Remove "
            "init_process_group() from the script."
        )
    _split_alone()
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=PrefixStore("world", HashStore()), rank=inner, world_size=size)


def _split_alone() -> None:
    """Let a process that has nobody to communicate with yet split its own tensors.

    torch.distributed.tensor splits a tensor by scattering that of rank 0. Before the first generation each process splits its own
    tensor, which is equal from the same seed. A process that joins gets a copy of the state afterwards.
    """
    from torch.distributed.tensor import placement_types

    scatter: Any = placement_types.mesh_scatter  # type: ignore[attr-defined]

    def split(
        output: torch.Tensor, scatter_list: list[torch.Tensor], mesh: Any, mesh_dim: int = 0, *more: Any, **options: Any
    ) -> Any:
        group = mesh.get_group(mesh_dim)
        if isinstance(group, LivingGroup) and group.is_offline:
            output.copy_(scatter_list[mesh.get_local_rank(mesh_dim)])
            return None
        return scatter(output, scatter_list, mesh, mesh_dim, *more, **options)

    placement_types.mesh_scatter = split  # type: ignore[attr-defined]


def _create(options: Any, _backend_options: Any) -> LivingGroup:
    """Return a new group. Called by init_process_group, new_group and init_device_mesh for each group of this process."""
    if _bound_to is not None:
        raise UsageError(
            "A process group is made after the session has begun: only this process would make it. Make meshes and groups before "
            "regroup.session()."
        )
    name = str(options.group_id)
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    group = _living[name] = LivingGroup(name, ranks, options.group_rank)
    return group


def living() -> Sequence[LivingGroup]:
    """Return all of them, in an order that is the same in all processes of a model group."""
    return [_living[name] for name in sorted(_living)]


def parts(rank: int, size: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of a generation in each group that this rank is in, by the group's name. `size`: of a model group."""
    first = rank - rank % size
    return {group.living_name: tuple(first + inner for inner in group.ranks) for group in living()}


def bind(groups: Groups) -> None:
    """Give each living group the connections that the generation has opened for it (`Groups.part`).

    Afterwards torch can make no further group: `_create` raises UsageError. An earlier `refuse(True)` ends.
    """
    global _bound_to
    for group in living():
        group.bind(groups, groups.part(group.living_name))
    _bound_to = groups
    refuse(False)


def refuse(yes: bool) -> None:
    """Raise Apart for what this process communicates inside its model group, until this is called again or a generation begins."""
    global _refused
    _refused = yes


def check_together() -> None:
    """Raise Apart where `refuse` was called: what follows needs the rest of the model group."""
    if _refused:
        raise Apart("Another process of this model group does not take part in this block.")


def bind_alone(device: torch.device) -> None:
    """Plain `python` on a device: each group has one rank."""
    for group in living():
        group.bind_alone(device)
