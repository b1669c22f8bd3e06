"""The name `horovod.torch.sync_batch_norm`."""

from regroup.horovod import *  # noqa: F403
