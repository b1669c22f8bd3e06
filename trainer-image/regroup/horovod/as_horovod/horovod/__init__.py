"""The name `horovod` for `regroup.horovod`, in a process with REGROUP_HOROVOD=1. Only horovod.torch is there.

The library's finder answers `import horovod` with this package, and with no other that may be installed.
"""

__version__ = "0.28.1"
"""Release of Horovod that has this API. Some scripts compare it."""
