"""The name `horovod.torch.functions`."""

from regroup.horovod import *  # noqa: F403
