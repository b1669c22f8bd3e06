"""The exceptions of Horovod that a training script catches. `horovod.common.exceptions` has them, too."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: the ranks asked for different things, or a rank has ended. Elastic training recovers from it."""


class HostsUpdatedInterrupt(RuntimeError):
    """The workers of the job have changed. Elastic training goes on from the state as it is."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The workers of the job have changed.")
        self.skip_sync = skip_sync


CHANGED = "The workers of the job have changed, or are about to."
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or "
    "broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an exception, you should see the "
    "exception in the log before the first shutdown message."
)
DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently being "
    "processed.  If you want to request another tensor, use a different tensor name."
)
"""These sentences are Horovod's, since scripts and users search for them."""
