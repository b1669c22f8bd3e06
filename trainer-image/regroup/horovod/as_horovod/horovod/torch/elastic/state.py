"""The name `horovod.torch.elastic.state`."""

from regroup.horovod.elastic.state import *  # noqa: F403
