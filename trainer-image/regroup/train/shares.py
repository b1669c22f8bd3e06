"""Deals the held-out samples to the processes, for whole and split models. Pure but for the mesh's layout."""

from collections.abc import Iterator

from regroup import model_group
from regroup.layout import Layout


def held_out(
    rank: int, world_size: int, num_samples: int, batch: int, layout: Layout | None = None
) -> Iterator[tuple[int, bool]]:
    """Yield the first sample of each batch that a rank evaluates, and whether its result counts.

    Every sample counts on one rank, or on all ranks that have a part of its sequence. The ranks of a model group make equally many
    forward passes, because they communicate in them: some repeat the first batch without counting it. A rank without the rest of
    its group gets a batch as well; its first pass raises `living.Apart`. The default `layout` is that of regroup.mesh().
    """
    layout = layout if layout is not None else model_group.layout()
    group, inner = divmod(rank, layout.size)
    num_shares = max(1, world_size // layout.size) * layout.num_data
    mine = group * layout.num_data + layout.data_index(inner)
    num_batches = -(-num_samples // batch)
    for first in range(0, num_batches, num_shares):
        index = first + mine
        if index < num_batches:
            yield index * batch, layout.adds_loss(rank)
        elif layout.size > 1:
            yield 0, False
