"""The name `horovod.torch.compression`."""

from regroup.horovod import *  # noqa: F403
