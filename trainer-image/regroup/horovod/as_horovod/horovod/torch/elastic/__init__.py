"""The name `horovod.torch.elastic`."""

from regroup.horovod.elastic import *  # noqa: F403
