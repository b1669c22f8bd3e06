"""The errors of this package."""

from regroup.errors import RegroupError


class CheckpointError(RegroupError):
    """A checkpoint that cannot be written or read. The text is one sentence: what, where, and what to do or what follows.

    `why` is the sentence without the name of the checkpoint, for a list that has the names already; empty: there is none."""

    def __init__(self, text: str, *, why: str = "") -> None:
        super().__init__(text)
        self.why = why


def skipped(directory: str, why: str) -> CheckpointError:
    """Return the error of a checkpoint that is not used. `why`: a clause that says what is wrong with it, with its full stop."""
    return CheckpointError(f"Skipped {directory}: {why}", why=why)


class ImportMissing(CheckpointError):
    """The checkpoint that a job is to begin with does not exist: no later attempt would find it."""
