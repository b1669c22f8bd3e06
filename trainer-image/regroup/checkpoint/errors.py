"""The one error of this package."""

from regroup.errors import RegroupError


class CheckpointError(RegroupError):
    """A checkpoint that cannot be written or read. The text is one sentence: what, where, and what to do or what follows."""
