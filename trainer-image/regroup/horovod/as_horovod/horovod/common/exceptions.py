"""The name `horovod.common.exceptions`."""

from regroup.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
