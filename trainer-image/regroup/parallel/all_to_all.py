"""All-to-all among the ranks of one dimension of `regroup.mesh()`, for forward and backward.

Each rank sends a piece of its rows to each other rank. The gradient of what was sent comes back the same way, so backward is the
same call with the two lists of sizes exchanged. A wait for it ends with the generation, as every wait of a living group does.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from regroup.errors import UsageError

Sizes = Sequence[int]


def ranks_of(mesh: Any, dimension: str, caller: str) -> int:
    """Return the number of ranks of the dimension that a caller was given, such as mesh["expert"]. None: the script has no mesh,
    and there is one. Raises UsageError for another mesh."""
    if mesh is None:
        return 1
    names = mesh.mesh_dim_names
    if names != (dimension,):
        raise UsageError(
            f"{caller}() was given a mesh of {', '.join(names or ('no named dimension',))}; it takes one dimension, "
            f'{dimension}. Pass mesh["{dimension}"].'
        )
    return int(mesh.size())


def all_to_all(rows: torch.Tensor, mesh: Any, sent: Sizes | None = None, received: Sizes | None = None) -> torch.Tensor:
    """Return the rows that came, in rank order. `rows`: [rows, ...], those for the first rank first.

    `mesh` has one dimension, such as mesh["expert"]; all its ranks call this, in forward and in backward. `sent` and `received` are
    the numbers of rows for and from each rank; None: equally many for each. Raises what `Groups.wait` does; for rows on a GPU, what
    `Groups.order` does: the host does not wait for them.
    """
    moved: torch.Tensor = _AllToAll.apply(rows, mesh.get_group(), sent, received)  # type: ignore[no-untyped-call]
    return moved


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, sent: Sizes | None, received: Sizes | None) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _exchange(gradients[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _exchange(rows: torch.Tensor, group: Any, sent: Sizes | None, received: Sizes | None) -> torch.Tensor:
    count = len(rows) if received is None else sum(received)
    came = rows.new_empty((count, *rows.shape[1:]))
    dist.all_to_all_single(
        came,
        rows.contiguous(),
        None if received is None else list(received),
        None if sent is None else list(sent),
        group=group,
    )
    return came


class Coming(NamedTuple):
    """A tensor on its way from one rank to this one."""

    work: Any
    rows: torch.Tensor | None

    def wait(self) -> torch.Tensor | None:
        """Return it; None: nobody sends anything. The wait ends with the generation."""
        self.work.wait()
        return self.rows


def exchange(rows: torch.Tensor, mesh: Any, to: int | None, of: int | None) -> Coming:
    """Start to send a tensor to one rank, and to receive one of its shape from another. None: not at all.

    mesh: one dimension, all of whose ranks call this, in one order. Has no gradient.
    """
    num, group = mesh.size(), mesh.get_group()
    sent = rows.reshape(-1) if to is not None else rows.new_empty(0)
    came = torch.empty_like(rows, memory_format=torch.contiguous_format) if of is not None else rows.new_empty(0)
    sizes = [
        [len(sent) if at == to else 0 for at in range(num)],
        [came.numel() if at == of else 0 for at in range(num)],
    ]
    work = dist.all_to_all_single(came.view(-1), sent, sizes[1], sizes[0], group=group, async_op=True)
    return Coming(work, came if of is not None else None)
