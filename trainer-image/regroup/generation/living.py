"""Torch's process groups inside a model group: one Python object each, which outlives generations.

Torch's world in each process is its *model group*: rank = inner index, size = m. So torch's ranks, meshes and group names never
change, and what is built on them (FSDP2, tensor parallel, DTensors, compiled code) stays as it is while members come and go. Each
group that torch makes is a `LivingGroup`: it hands every collective to a target, and a generation binds another target to it.
Until the first generation the target is nobody: a script builds its model alone, from the same seed as everybody else.

Waits are those of `Groups`: they end when the generation does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    FakeProcessGroup,
    HashStore,
    PrefixStore,
    ProcessGroup,
    ReduceOp,
    Work,
)

from regroup.errors import GenerationChanged, UsageError

from .backends import Backend
from .groups import Groups, Pending, open_gloo
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
    "barrier",
)
"""Collectives of a ProcessGroup that `Groups.wait` can wait for in slices."""
_SCATTERED = ("reduce_scatter_single", "_reduce_scatter_base")
_SCATTERED_TOGETHER = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
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

    @property
    def is_offline(self) -> bool:
        """No generation has been bound yet: there is nobody to communicate with."""
        return self._groups is None

    def bind(self, groups: Groups, backend: Backend) -> None:
        """Use this generation's connections from now on. They are the generation's to let go."""
        target = ProcessGroup(HashStore(), self._at, len(self.ranks))
        backend.serve(target, "cpu", ProcessGroup.BackendType.GLOO)
        groups.keep(target, backend)  # the backend of a part: released with it
        self._target, self._groups = target, groups

    def bind_alone(self) -> None:
        """Plain `python`: a group of one, for good."""
        target = ProcessGroup(HashStore(), 0, 1)
        alone = open_gloo(HashStore(), 0, 1, device_alone())
        alone.serve(target, "cpu", ProcessGroup.BackendType.GLOO)
        self._target = target

    def call(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Start a collective on the target; return torch's Work."""
        groups = self._groups
        if groups is None:
            return getattr(self._target, kind)(*arguments, **options)
        groups.check_use()
        check_together()
        with collective(groups.failed):
            work = getattr(self._target, kind)(*arguments, **options)
        return work if kind in _WHOLE else _Sliced(work, groups)

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

    def _nobody(self) -> Any:
        target = ProcessGroup(HashStore(), self._at, len(self.ranks))
        backend = FakeProcessGroup._create_internal(self._at, len(self.ranks))
        target._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
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
        return self._target._get_backend(device)

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


def _scatter(self: LivingGroup, output: Any, whole: Any, options: Any = None) -> Any:
    return self.sum_and_scatter([output], [whole], _operation(options))


def _scatter_together(self: LivingGroup, outputs: Any, wholes: Any, options: Any = None) -> Any:
    return self.sum_and_scatter(outputs, wholes, _operation(options))


def _scatter_lists(self: LivingGroup, outputs: Any, lists: Any, options: Any = None) -> Any:
    wholes = [torch.cat([part.reshape(-1) for part in parts]) for parts in lists]
    return self.sum_and_scatter(outputs, wholes, _operation(options))


def _operation(options: Any) -> Any:
    return ReduceOp.SUM if options is None else options.reduceOp


for _kind in (*_SLICED, *_WHOLE):
    setattr(LivingGroup, _kind, _delegate(_kind))
for _kind in _SCATTERED:
    setattr(LivingGroup, _kind, _scatter)
for _kind in _SCATTERED_TOGETHER:
    setattr(LivingGroup, _kind, _scatter_together)
LivingGroup.reduce_scatter = _scatter_lists  # type: ignore[method-assign, assignment]


class _Sliced(Work):
    """A collective whose wait ends with its generation."""

    def __init__(self, work: Any, groups: Groups) -> None:
        super().__init__()
        self._work, self._groups = work, groups

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Wait for it. Raises what `Groups.wait` does. No clock ends it: membership does."""
        self._groups.wait([Pending(self._work, on_gloo=True)])
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()

    def exception(self) -> Any:
        return self._work.exception()


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
        """It is complete once it has been waited for, as gloo's own."""
        return not self._parts


_living: dict[str, LivingGroup] = {}
"""By torch's name. Torch makes groups in the script's order, which is the same in every process; it never ends one."""
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

    torch.distributed.tensor splits a tensor by scattering that of rank 0. Before the first generation each process takes its part
    of its own, which is equal from the same seed; a process that joins gets a copy of the state afterwards.
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
    """What init_process_group, new_group and init_device_mesh call for each group that this process is in."""
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
    """A generation stands: each group uses the connections that it has opened for it (`Groups.part`)."""
    global _bound_to
    for group in living():
        group.bind(groups, groups.part(group.living_name).backend)
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


def bind_alone() -> None:
    """Plain `python`: each group has one rank."""
    for group in living():
        group.bind_alone()
