"""The durable tier: a training state in a directory, which is written aside, committed last, and verified when it is read.

Belongs here: names and order of checkpoints, the choice of the one to read, their files, and a state as tensors and JSON.
Does not: the consistency of the state and the commit of a step (`regroup.transaction`), and memory snapshots
(`regroup.state.memory`). The operator decides which checkpoints are deleted.

| module | what it does |
| --- | --- |
| `checkpointer` | writes and reads for a session, in the background |
| `selection` | decides from names and lineage, without I/O |
| `store` | reads and writes the files of one directory |
| `tree`, `stages`, `shards` | turn a state into tensors and JSON, never pickle: whole, of a pipeline, of split tensors |
| `staging` | copies tensors to host memory; memory snapshots use it too |

A checkpoint is plain torch DCP of {model, optimizer, state}. Without Regroup,
`torch.distributed.checkpoint.format_utils.dcp_to_torch_save` reads it. Rules STATE and CKPT of docs/design/protocol.md.
"""

from .checkpointer import Checkpointer, Newest
from .errors import CheckpointError, ImportMissing
from .selection import CheckpointInfo
from .tree import pack, unpack

__all__ = ["CheckpointError", "CheckpointInfo", "Checkpointer", "ImportMissing", "Newest", "pack", "unpack"]
