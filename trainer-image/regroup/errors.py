"""What this library raises. `except regroup.RegroupError` catches all that is for the user.

RegroupError                 a sentence for the user
  UsageError                 the script asks for something that cannot work
  StateError                 a `state` entry, model or optimizer that cannot be saved or loaded
  DivergedError              ranks of one generation disagree (parameters, step)
  SampleError                a step would use samples other than its own (rule QUOTA)
  BackendError               torch's backend failed in a collective, and every connection stands: not a membership change
  data.errors.DataError      also a ValueError
  checkpoint.errors.CheckpointError
GenerationChanged            ends a `with step:` block; swallowed by it
JobEnded                     the job ended without this process; ends the script with exit code 0
GroupBroken                  what a membership change does to a collective; becomes GenerationChanged (internal)
  Aborted                    these groups were ended here
  PeerLost                   a connection ended: another rank has gone, or cannot be reached
Refused                      the group may not train: the newest state cannot be had here (internal)
"""


class RegroupError(Exception):
    """One sentence: what was found, which rule it breaks, what to do."""


class UsageError(RegroupError):
    pass


class StateError(RegroupError):
    pass


class DivergedError(RegroupError):
    pass


class SampleError(RegroupError):
    pass


class GenerationChanged(Exception):
    """The group that this code ran in is gone. `with step:` swallows it and the same step comes again.

    Code that catches everything inside the block must let it pass.
    """


class JobEnded(SystemExit):
    """This process has no further part in the job. `outcome`: Failed, Released, Suspended or Drained; Complete where a block of
    `job.collective()` began after the last step. Raised by the loop over `job.steps()` and by those blocks.

    Python ends the script with exit code 0 and prints nothing, unless the script catches it: to the agent this process did what it
    was told. A script that catches it may clean up; this process takes part in no further step.
    """

    def __init__(self, outcome: str) -> None:
        super().__init__(0)
        self.outcome = outcome

    def __str__(self) -> str:
        return f"The job ended for this process: {self.outcome}."


class DataEnded(GenerationChanged):
    """A stream ended before the step was whole, on some rank: it is committed nowhere, and the job ends before it."""


class BackendError(RegroupError):
    """A collective failed in torch's backend, with the backend's own text; no rank was lost."""


class GroupBroken(Exception):
    """A collective or the forming of a group ended because of membership. `peer_rank`: the rank that was lost, where that is
    known."""

    def __init__(self, message: str, peer_rank: int | None = None) -> None:
        super().__init__(message)
        self.peer_rank = peer_rank


class Aborted(GroupBroken):
    """`abort` ended the groups, because a newer generation was heard or because they were left."""


class PeerLost(GroupBroken):
    """A connection to another rank, or to the store, ended or could not be made."""


class Refused(Exception):
    """Adoption refused. `cause` is the fault's: `witness` (this group has no witness of the newest state) or `checkpoint`
    (it cannot read the checkpoint that it must have)."""

    def __init__(self, message: str, cause: str = "witness") -> None:
        super().__init__(message)
        self.cause = cause
