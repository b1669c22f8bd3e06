"""Which samples a step uses, where they come from, and sums that do not depend on the world size.

Belongs here: pure functions of (seed, step, virtual worker) and adapters that turn what a user has into `fetch(ids)`.
Does not: generations, groups, the decision to commit (`regroup.transaction`), files of a checkpoint (`regroup.checkpoint`).

The unit is the *virtual worker*: one microbatch of every step. A job has `global_batch / microbatch` of them for life;
a rank of a generation plays a contiguous share of them. `ids` which samples a virtual worker reads; `quotas` how many virtual
workers a rank plays; `sources` how samples are read, `streams` in order, `feed` by whom, `cache` from where; `rng` random numbers;
`tree` and `exact` the sum over virtual workers that is bitwise equal at any world size. So there is neither loader state nor
random-number state to save: the step says everything.
"""

from .cache import cached
from .errors import DataError
from .exact import ExactSum, Exchange, GroupExchange
from .feed import Feed, Key, make_feed
from .ids import UNKNOWN, SamplePlan, share_of, shares_of
from .quotas import Quotas
from .rng import microbatch_rng
from .sources import Batch, LoaderSource, Source, as_source
from .streams import EndOfStream, Stream, as_stream, stream

__all__ = [
    "Batch",
    "UNKNOWN",
    "DataError",
    "LoaderSource",
    "EndOfStream",
    "ExactSum",
    "Exchange",
    "Feed",
    "GroupExchange",
    "Key",
    "Quotas",
    "SamplePlan",
    "Source",
    "Stream",
    "as_source",
    "as_stream",
    "cached",
    "make_feed",
    "microbatch_rng",
    "share_of",
    "shares_of",
    "stream",
]
