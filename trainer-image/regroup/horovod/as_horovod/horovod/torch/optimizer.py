"""The name `horovod.torch.optimizer`."""

from regroup.horovod import *  # noqa: F403
