"""The one error of this package."""

from regroup.errors import RegroupError


class DataError(RegroupError, ValueError):
    """A mistake in what the user asked for or passed as data. The text is one sentence that says what to do."""
