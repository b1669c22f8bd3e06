"""The root of what this library raises for its user: `except regroup.RegroupError` catches all of it.

RegroupError                 a sentence for the user
  elastic.errors.*           UsageError, StateError, DivergedError, SampleError, BackendError
  data.errors.DataError      also a ValueError
  checkpoint.errors.CheckpointError
"""


class RegroupError(Exception):
    """One sentence: what was found, which rule it breaks, what to do."""
