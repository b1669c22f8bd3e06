"""The index of a checkpoint that several processes wrote."""

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from regroup.checkpoint import store


def index(*offsets: int) -> Metadata:
    """What a process has written of a tensor: pieces of one element."""
    chunks = [ChunkStorageMetadata(torch.Size([offset]), torch.Size([1])) for offset in offsets]
    return Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size([3]), chunks)}, storage_data={})


def test_a_piece_that_two_processes_wrote_is_listed_once() -> None:
    """Empty pieces of several processes have one place."""
    joined = store._joined(store._joined(index(0), index(1, 2)), index(2))
    assert [tuple(chunk.offsets) for chunk in joined.state_dict_metadata["w"].chunks] == [(0,), (1,), (2,)]
