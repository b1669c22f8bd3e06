"""The name `horovod.torch.mpi_ops`."""

from regroup.horovod import *  # noqa: F403
