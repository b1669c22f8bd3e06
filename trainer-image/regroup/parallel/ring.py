"""The ring all-reduce, written out: what the library's all-reduce does, to read and to compare with.

A tensor is cut into as many chunks as there are ranks. Rank r only ever sends to r + 1 and receives from r - 1.

    reduce-scatter   W - 1 turns: pass a chunk on, and add the own part to the one that comes. Then rank r has all of chunk r + 1.
    all-gather       W - 1 turns: pass on what is complete, and put what comes in its place.

So each rank sends 2 (W - 1) / W of the tensor, whatever W is (P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations, 2009). Chunk c is added up in rank order from rank c on, and every rank gets a copy of that sum. So the
bits are the same on all ranks, and in every run with as many ranks.

A turn is one `alltoall_base` in which a rank has something for its right neighbour only. It is a collective of the whole
generation, because `Groups.abort` must end every wait. A wait for a single gloo send cannot be cut into slices, and gloo may
forget a send whose write fails. Over gloo the price is a message without content to each other rank in each turn.
"""

from collections.abc import Iterator

import torch

from regroup.generation.groups import Groups, Part, Pending

from .gradients import Bucket
from .hooks import Plain


def ring_sum(groups: Groups | Part, flat: torch.Tensor) -> Iterator[Pending]:
    """Sum a tensor [length] over all ranks, in place. Yields each turn's exchange, which must be complete before the next
    turn is asked for; it is summed when the iterator ends. Raises what `Groups.failed` says."""
    rank, size = groups.rank, groups.world_size
    chunks = flat.tensor_split(size)
    for turn in range(size - 1):
        mine, theirs = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
        received = torch.empty_like(theirs)
        yield pass_on(groups, mine, received)
        theirs.add_(received)
    for turn in range(size - 1):
        mine, theirs = chunks[(rank + 1 - turn) % size], chunks[(rank - turn) % size]
        yield pass_on(groups, mine, theirs)


def pass_on(groups: Groups | Part, mine: torch.Tensor, received: torch.Tensor) -> Pending:
    """Start to send `mine` to the right neighbour and to receive what the left one sends."""
    outgoing, incoming = [0] * groups.world_size, [0] * groups.world_size
    outgoing[(groups.rank + 1) % groups.world_size] = mine.nbytes
    incoming[(groups.rank - 1) % groups.world_size] = received.nbytes
    options = torch._C._distributed_c10d.AllToAllOptions()
    # As bytes: a backend knows only some types.
    output, input_ = received.view(torch.uint8), mine.view(torch.uint8)
    return groups.launch(
        "alltoall_base", output, input_, incoming, outgoing, options, control=mine.device.type == "cpu"
    )


class Ring(Plain):
    """The hook of algorithm="ring". The first turn of a bucket overlaps with backward. The others take turns with those of the
    other buckets."""

    def __init__(self) -> None:
        self._sums: list[Iterator[Pending]] = []

    def begin_step(self) -> None:
        """Drop the sums of a step that was cut off."""
        self._sums = []

    def send(self, groups: Groups | Part, bucket: Bucket, step: int) -> Pending:  # noqa: ARG002
        """Start the first turn of a bucket."""
        self._sums.append(ring_sum(groups, bucket.flat))
        return next(self._sums[-1])

    def finish(self, groups: Groups | Part) -> None:
        """Take all other turns."""
        while pending := [turn for sum_ in self._sums if (turn := next(sum_, None)) is not None]:
            groups.wait(pending)
        self._sums = []
