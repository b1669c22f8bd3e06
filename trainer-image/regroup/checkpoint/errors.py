"""The one error of this package."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read. The text is one sentence: what, where, and what to do or what follows."""
