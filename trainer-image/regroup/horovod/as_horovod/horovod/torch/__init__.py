"""The name `horovod.torch`."""

from regroup.horovod import *  # noqa: F403
