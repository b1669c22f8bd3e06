"""The exceptions of this library. `except regroup.RegroupError` catches all that are for the user.

The tree of exceptions:

    RegroupError                 a sentence for the user
      UsageError                 the script asks for something that cannot work
      StateError                 a `state` entry, model or optimizer cannot be saved or loaded
      DivergedError              ranks of one generation disagree (parameters, step)
      SampleError                a step would use samples other than its own (rule QUOTA)
      BackendError               torch's backend failed in a collective, without a membership change
      data.errors.DataError      also a ValueError
      checkpoint.errors.CheckpointError
    GenerationChanged            ends a `with step:` block, which swallows it
      DataEnded                  a stream ended before the step was whole (internal)
    JobEnded                     the job has no further work for this process; ends the script with exit code 0
    GroupBroken                  a membership change ended a collective; becomes GenerationChanged (internal)
      Aborted                    this process ended its groups
      PeerLost                   a connection ended: another rank has gone or cannot be reached
    Refused                      the group may not train, because it cannot get the newest state (internal)
"""


class RegroupError(Exception):
    """An error for the user. Its text is one sentence: the value that was found, the rule that it breaks, and the remedy."""


class UsageError(RegroupError):
    """The script asks for something that cannot work."""


class StateError(RegroupError):
    """A `state` entry, model or optimizer cannot be saved or loaded."""


class DivergedError(RegroupError):
    """Ranks of one generation disagree, for example in their parameters."""


class SampleError(RegroupError):
    """A step would use samples other than its own (rule QUOTA)."""


class GenerationChanged(Exception):
    """The group in which this code ran has ended. `with step:` swallows the exception, and the same step comes again.

    Code inside the block that catches all exceptions must let this one pass.
    """


class JobEnded(SystemExit):
    """This process has no further part in the job. Raised by the loop over `job.steps()` and by blocks of `job.collective()`.

    `outcome` is Failed, Released, Suspended or Drained, or Complete if the block began after the last step. Python ends the script
    with exit code 0 and prints nothing, since the process obeyed its agent. A script that catches the exception may
    clean up, but takes part in no further step.
    """

    def __init__(self, outcome: str) -> None:
        super().__init__(0)
        self.outcome = outcome

    def __str__(self) -> str:
        return f"The job ended for this process: {self.outcome}."


class DataEnded(GenerationChanged):
    """A stream ended on some rank before the step was whole. No rank commits the step, and the job ends before it."""


class BackendError(RegroupError):
    """A collective failed in torch's backend although no rank was lost. The text is the backend's own."""


class GroupBroken(Exception):
    """A membership change has ended a collective or the forming of a group. `peer_rank` is the lost rank, if it is known."""

    def __init__(self, message: str, peer_rank: int | None = None) -> None:
        super().__init__(message)
        self.peer_rank = peer_rank


class Aborted(GroupBroken):
    """This process has ended its groups, because it heard of a newer generation or left them."""


class PeerLost(GroupBroken):
    """A connection to another rank or to the store has ended, or could not be made."""


class Refused(Exception):
    """Adoption was refused. `cause` is the cause of the fault to report.

    - `witness`: this group has no witness of the newest state
    - `checkpoint`: this group cannot read the checkpoint that it must have
    """

    def __init__(self, message: str, cause: str = "witness") -> None:
        super().__init__(message)
        self.cause = cause
