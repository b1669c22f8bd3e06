"""The durable tier: a training state in a directory, written aside, committed last, read with suspicion.

Belongs here: names and order of checkpoints, which one may be read, the files themselves, a state as tensors and JSON.
Does not: when the state is consistent and who has committed which step (`regroup.transaction`), what may be deleted (the
operator's word), memory snapshots (the agent).

`selection` decides, from names and lineage, without I/O; `tree` is a state as tensors plus JSON, never pickle; `store` is
the I/O of one directory; `checkpointer` is what a session holds. Rules STATE and CKPT of docs/design/protocol.md.

A checkpoint is plain torch DCP of {model, optimizer, state}: `torch.distributed.checkpoint.format_utils.dcp_to_torch_save`
reads it where Regroup is not installed.
"""

from .checkpointer import Checkpointer, Newest
from .errors import CheckpointError, ImportMissing
from .selection import CheckpointInfo
from .tree import pack, unpack

__all__ = ["CheckpointError", "CheckpointInfo", "Checkpointer", "ImportMissing", "Newest", "pack", "unpack"]
