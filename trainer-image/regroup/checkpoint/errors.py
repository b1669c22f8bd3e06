"""The one error of this package."""

from regroup.errors import RegroupError


class CheckpointError(RegroupError):
    """A checkpoint that cannot be written or read. The text is one sentence: what, where, and what to do or what follows."""


class ImportMissing(CheckpointError):
    """The checkpoint that a job is to begin with does not exist: no later attempt would find it."""
