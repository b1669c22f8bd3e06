"""The name `horovod.common`."""
