"""How the work of a job is split over its ranks: what a script passes as `regroup.session(strategy=...)`.

Only descriptions: one frozen class for each strategy, checked when it is made. Pure, without torch, so that a configuration can
be read where torch is not installed. What does the work is in `regroup.parallel`, and `regroup.job.make_strategy` goes from one
to the other.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataParallel:
    """Each rank has a whole copy of the model, and gradients are summed over ranks in each step. The default."""


Description = DataParallel
"""What `strategy` may be."""
