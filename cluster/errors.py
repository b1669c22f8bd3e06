"""The one exception of this package: a sentence for the person at the terminal."""


class ClusterError(Exception):
    """What is wrong and what to do about it, in one sentence; the command line prints it without a traceback."""
