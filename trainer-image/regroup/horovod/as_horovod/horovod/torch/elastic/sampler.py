"""The name `horovod.torch.elastic.sampler`."""

from regroup.horovod.elastic.sampler import *  # noqa: F403
