"""The samples of each step, the sources that give them, and sums that do not depend on the world size.

Belongs here: pure functions of (seed, step, virtual worker), and adapters that turn a user's data into `fetch(ids)`.
Does not: generations, groups, the decision to commit (`regroup.transaction`), files of a checkpoint (`regroup.checkpoint`).

A *virtual worker* is one microbatch of every step. A job has `global_batch / microbatch` of them for life, and each rank of a
generation computes a contiguous share of them. Samples and random numbers follow from the step and the virtual worker. So there is
no state of a loader or of a random number generator to save.

| module | what it does |
| --- | --- |
| `ids` | computes the samples of each virtual worker |
| `quotas` | deals virtual workers to ranks |
| `sources`, `streams` | read samples by number, or in order |
| `feed` | reads the batches of a session, if asked in worker processes |
| `cache` | keeps samples from slow storage on the node's disk |
| `rng` | seeds random numbers for each virtual worker |
| `sum_tree`, `exact` | sum over virtual workers, bitwise equal at any world size |
"""

from .cache import cached
from .errors import DataError
from .exact import ExactSum, GroupExchange
from .feed import Feed, Key, make_feed
from .ids import UNKNOWN, SamplePlan, share_of, shares_of
from .quotas import Quotas
from .rng import microbatch_rng
from .sources import Batch, LoaderSource, as_source
from .streams import EndOfStream, Stream, as_stream, stream

__all__ = [
    "Batch",
    "UNKNOWN",
    "DataError",
    "LoaderSource",
    "EndOfStream",
    "ExactSum",
    "Feed",
    "GroupExchange",
    "Key",
    "Quotas",
    "SamplePlan",
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
