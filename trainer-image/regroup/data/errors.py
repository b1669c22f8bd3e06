"""The one error of this package."""


class DataError(ValueError):
    """A mistake in what the user asked for or passed as data. The text is one sentence that says what to do."""
