"""The one exception of this package."""


class ClusterError(Exception):
    """An error for the person at the terminal. Its text is one sentence: the fault and its remedy, printed without a traceback."""
