"""The error of this package."""

from regroup.errors import RegroupError


class DataError(RegroupError, ValueError):
    """The user's data or its settings cannot work. The text is one sentence that names the remedy."""
