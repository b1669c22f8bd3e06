"""The errors of this package."""

from regroup.errors import RegroupError


class CheckpointError(RegroupError):
    """A checkpoint cannot be written or read. The text is one sentence: the checkpoint, the reason, and the remedy or consequence.

    `why` is the reason without the checkpoint's name, for a list that has the names; it may be empty.
    """

    def __init__(self, text: str, *, why: str = "") -> None:
        super().__init__(text)
        self.why = why


def skipped(directory: str, why: str) -> CheckpointError:
    """Return the error of a checkpoint that is not used. `why` is a clause with its full stop: "its COMMIT.json is damaged."."""
    return CheckpointError(f"Skipped {directory}: {why}", why=why)


class ImportMissing(CheckpointError):
    """The checkpoint with which a job must begin does not exist. No later attempt would find it."""
